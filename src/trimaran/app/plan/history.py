"""`trimaran history`: the plans that runs measured, by model and cluster."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from trimaran.app.recipe.options import Json, complete_cluster

Folders = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[FOLDER...]",
        show_default=False,
        file_okay=False,
        help="Folders with runs. [default: runs/, and the runs of `trimaran jobs`]",
    ),
]
ModelName = Annotated[str | None, typer.Option(metavar="X", help="Only models whose name contains X.")]
ClusterName = Annotated[
    str | None,
    typer.Option(metavar="C", help="Only clusters whose name contains C, such as H100 or 2x8xH100.",
                 autocompletion=complete_cluster),
]  # fmt: skip


def history(
    folders: Folders = None,
    model: ModelName = None,
    cluster: ClusterName = None,
    as_json: Json = False,
) -> int:
    """List the plans that runs measured: speed, memory, what was predicted, goodput; the fastest first.

    Each run counts with its steady steps, without warm-up, checkpoints and evaluation.

    \b
    trimaran history
    trimaran history /shared/runs --model llama --cluster H100
    trimaran history --json | jq '.groups[].plans[0]'
    """
    from trimaran.app.plan.history_view import group_plans, show_history
    from trimaran.app.plan.measured_plans import read_index, runs_in
    from trimaran.app.show.clean_console import open_console

    with open_console(stderr=True).status("reading runs"):
        runs = runs_in(folders or [], os.environ)
        index = read_index(runs, os.environ)
    known = {str(run): index.runs[str(run)] for run in runs}
    plans = [
        each
        for run in known.values()
        for each in run.measured
        if (model or "").casefold() in each.model.casefold()
        and (cluster or "").casefold() in each.job.cluster.casefold()
    ]
    groups, skipped = group_plans(plans), {key: run.reason for key, run in known.items() if run.reason}
    if as_json:
        found = [{"model": name, "parameters": parameters, "cluster": where,
                  "plans": [each.as_dict() | {"error": each.error} for each in group]}
                 for (name, parameters, where), group in groups.items()]  # fmt: skip
        reasons = [{"run": run, "reason": reason} for run, reason in skipped.items()]
        typer.echo(json.dumps({"groups": found, "num_runs": len(runs), "skipped": reasons}))
        return 0
    show_history(groups, open_console())
    if not plans:
        typer.echo("no measured plan was found; name folders with runs: trimaran history FOLDER")
    if skipped:
        typer.echo(f"\n{len(skipped)} of {len(runs)} runs have no measured plan; --json says why")
    return 0
