"""`trimaran calibrate`: fits the rates that the planner uses to runs that were measured."""

import json
from pathlib import Path
from typing import Annotated

import typer

from trimaran.app.recipe.options import Json, argument, cluster_option, complete_run
from trimaran.core import UserError

FROM_HELP = "Run directories, their names under runs/, or folders that contain runs."
More = Annotated[list[str] | None, argument("[RUN...]", "More of them.", complete_run)]
Output = Annotated[Path | None, typer.Option(metavar="FILE", help="Write to this file instead of the user's cache.")]


def calibrate(
    runs: Annotated[
        list[str] | None, typer.Option("--from", metavar="RUN...", help=FROM_HELP, autocompletion=complete_run)
    ] = None,
    more: More = None,
    cluster: Annotated[str | None, cluster_option("What all of the runs ran on. [default: as each run says]")] = None,
    output: Output = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be fitted, and write nothing.")] = False,
    as_json: Json = False,
) -> int:
    """Fit the rates of devices, links and hosts to measured runs. The planner then uses them for such devices.

    Rates that the runs do not determine stay as they are, and nothing is written unless predictions get better.
    `trimaran bench calibrate` measures single operators of this machine instead.

    \b
    trimaran calibrate --from runs/stdlib-tiny
    trimaran calibrate --from runs /shared/alice/runs --dry-run
    trimaran calibrate --from old-runs --cluster 4x8xH100 --output fleet.json   # for `calibration:` in a cluster file
    """
    from trimaran.app.machine.bench import refuse_unwritable, write_calibration
    from trimaran.app.machine.calibrate_runs import calibrate_runs, show_calibration
    from trimaran.app.show.clean_console import open_console
    from trimaran.planner.measure.fit_rates import median_error

    if output is not None and not dry_run:
        refuse_unwritable(output)
    with open_console(stderr=True).status("fitting rates to the runs"):
        answer = calibrate_runs([*(runs or []), *(more or [])], cluster=cluster, output=output)
    if not as_json:
        show_calibration(answer, open_console())
    if not answer.better:
        errors = ", ".join(f"{median_error(each.result.before):.1%} for {each.device}" for each in answer.fits)
        raise UserError("P086.nothing-gets-better", where="trimaran calibrate --from", errors=errors)
    for each in answer.better:
        if not dry_run and each.calibration is not None:
            refuse_unwritable(each.path)
            write_calibration(each.path, each.calibration)
    if as_json:
        skipped = [{"run": run, "reason": reason} for run, reason in answer.skipped]
        devices = [each.as_dict() | {"written": each in answer.better and not dry_run} for each in answer.fits]
        typer.echo(json.dumps({"devices": devices, "skipped": skipped}))
        return 0
    for each in answer.better:
        typer.echo(f"\n{'would be written' if dry_run else 'written'} to {each.path}")
    if output and not dry_run:
        typer.echo(f"in a cluster file:  calibration: {output.resolve()}")
    return 0
