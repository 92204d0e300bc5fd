"""`trimaran simulate`: a job at scale over weeks, with failures, checkpoints and spares."""

import json
from pathlib import Path
from typing import Annotated

import typer

from trimaran.app.recipe.options import (
    GlobalBatch,
    Json,
    SeqLen,
    Settings,
    argument,
    cluster_option,
    complete_model_or_recipe,
    complete_run,
)

MAX_FAILURES = 200_000  # that are simulated in minutes


def complete_plan(incomplete: str) -> list[str]:
    """Return what `simulate` accepts: runs, and what `plan` accepts."""
    return [*complete_run(incomplete), *complete_model_or_recipe(incomplete)]


PLAN_HELP = "A run, its plan.json, a file of `plan --json`, a recipe, or a model, which is planned first."
Runs = Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="Simulate the job so often, and average.")]
SPARES_HELP = "Spare nodes. [default: enough for 99.9% of the time]"
INTERVAL_HELP = "Between checkpoints. [default: the best]"
Restart = Annotated[float, typer.Option(metavar="SECONDS", min=0, max=10**6, help="From a failure to the first step.")]
Repair = Annotated[float, typer.Option(metavar="HOURS", min=0.01, max=10**5, help="Until a broken node is back.")]
Mtbf = Annotated[
    float | None,
    typer.Option(metavar="HOURS", min=1e-3, max=1e12,
                 help="Mean time between failures of one GPU. [default: as in the Llama 3 run, 50,700]"),
]  # fmt: skip
RAILS_HELP, POD_HELP = "Network cards of a node. [default: one a GPU]", "Nodes with full bandwidth. [default: all]"
OUT_HELP = "Write the answer there, and timelines of a step and the job for Perfetto."


def simulate(
    what: Annotated[str | None, argument("PLAN", PLAN_HELP, complete_plan)] = None,
    cluster: Annotated[str | None, cluster_option("12500x8xH100, or a YAML file. [default: the plan's]")] = None,
    days: Annotated[float, typer.Option(metavar="N", min=0.01, max=3650, help="How long the job runs.")] = 30.0,
    seed: Annotated[int, typer.Option(metavar="N", min=0, max=2**31, help="The same seed gives the same answer.")] = 0,
    runs: Runs = 4,
    spares: Annotated[int | None, typer.Option(metavar="N", min=0, max=10**6, help=SPARES_HELP)] = None,
    save_every: Annotated[float | None, typer.Option(metavar="SECONDS", min=0.1, max=10**7, help=INTERVAL_HELP)] = None,
    restart: Restart = 600.0,
    repair: Repair = 24.0,
    mtbf: Mtbf = None,
    rails: Annotated[int, typer.Option(metavar="N", min=0, max=64, show_default=False, help=RAILS_HELP)] = 0,
    pod: Annotated[int, typer.Option(metavar="NODES", min=0, max=10**6, show_default=False, help=POD_HELP)] = 0,
    oversubscription: Annotated[
        float, typer.Option(metavar="N", min=1, max=1000, help="How much less bandwidth leads out of a pod.")
    ] = 1.0,
    seq_len: SeqLen = None,
    global_batch: GlobalBatch = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help=OUT_HELP)] = None,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Simulate a job at scale: step times, failures, checkpoints, restarts, spares. Starts nothing and needs no GPU.

    Failures come as often as in the published Llama 3 run. The answer has the goodput, and what a spare node and
    another checkpoint interval are worth.

    \b
    trimaran simulate llama-3.1-405b --cluster 2048x8xH100 --seq-len 8192 --global-batch 2048
    trimaran simulate runs/stdlib-tiny --cluster 64x8xH100 --days 7 --json
    trimaran simulate plan.json --cluster 12500x8xH100 --pod 384 --oversubscription 7 --out timeline
    """
    from trimaran.app.plan.simulate_answer import read_simulate_request, show_simulation, simulation_as_dict
    from trimaran.app.show.clean_console import open_console, progress_bar
    from trimaran.core import UserError
    from trimaran.cost import Fabric, Scenario, with_worth
    from trimaran.cost import simulate as simulate_plan

    shortcuts = {"cluster": cluster, "data.seq_len": seq_len, "train.global_batch": global_batch}
    request = read_simulate_request(what, shortcuts, settings or [])
    failures = 24 * days * request.plan.mesh.world_size / mtbf if mtbf is not None else 0.0
    if mtbf is not None and failures > MAX_FAILURES:  # the job would not make progress
        least = mtbf * failures / MAX_FAILURES
        raise UserError("P084.failures-days-too", where="--mtbf", failures=failures, days=days, least=least)
    scenario = Scenario(
        days=days, seed=seed, runs=runs, spares=request.spares if spares is None else spares, interval=save_every,
        restart=restart, repair=repair * 3600, mtbf_hours=mtbf,
        fabric=Fabric(rails=rails, pod_nodes=pod, oversubscription=oversubscription),
    )  # fmt: skip
    with progress_bar(open_console(stderr=True)) as report:
        found = simulate_plan(request.question.job, request.cluster, request.plan, scenario, report)
        simulation = with_worth(found, report)
    answer = simulation_as_dict(request, simulation)
    if out is not None:
        from trimaran.cost.simulate.simulation import job_trace, step_trace
        from trimaran.runs.read.traces import write_merged

        files = [out / name for name in ("simulation.json", "step.trace.json.gz", "job.trace.json.gz")]
        try:
            out.mkdir(parents=True, exist_ok=True)
            files[0].write_text(json.dumps(answer, indent=2, allow_nan=False) + "\n", encoding="utf-8")
            write_merged(step_trace(simulation.step), files[1])
            write_merged(job_trace(simulation.histories[0]), files[2])
        except OSError as error:
            raise UserError("P083.folder-cannot-written", where=f"--out {out}", reason=error.strerror) from None
        answer["files"] = [str(each) for each in files]
    if as_json:
        typer.echo(json.dumps(answer, allow_nan=False))
    else:
        show_simulation(request, simulation, open_console())
        for file in answer.get("files", ()):
            typer.echo(f"wrote  {file}")
