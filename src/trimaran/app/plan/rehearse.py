"""`trimaran rehearse`: single ranks of a plan, run for real on the one device at hand, and measured."""

import json
import os
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
    words_of,
)

MODEL_HELP = "A recipe, or a model, which is planned with defaults. [default: a small built-in recipe]"
CLUSTER_HELP = "The cluster of the plan: 8x8xH100, or a YAML file. [default: the recipe's]"
Ranks = Annotated[
    str | None,
    typer.Option(metavar="LIST", help="first, last, stages (one rank of each pipeline stage), or numbers, with commas. "
                 "[default: first, and last in a pipeline]",
                 autocompletion=words_of("first", "first,last", "last", "stages")),
]  # fmt: skip
Layers = Annotated[
    int,
    typer.Option(metavar="N", min=0, max=4096, show_default=False,
                 help="Rehearse stages of N and of 2N layers, and extrapolate. [default: all layers]"),
]  # fmt: skip
NOT_MEASURED = 1  # the exit code if a rank ran out of memory or failed


def rehearse(
    what: Annotated[str | None, argument("MODEL|RECIPE", MODEL_HELP, complete_model_or_recipe)] = None,
    cluster: Annotated[str | None, cluster_option(CLUSTER_HELP)] = None,
    ranks: Ranks = None,
    steps: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="Measured steps, after a warm-up.")] = 5,
    layers: Layers = 0,
    seq_len: SeqLen = None,
    global_batch: GlobalBatch = None,
    settings: Settings = None,
    as_json: Json = False,
) -> int:
    """Run single ranks of a plan for real on this machine's first device, and measure their memory and compute.

    A rank has its share of weights, optimizer states and micro-batches, as on the cluster. Collectives return at once,
    and pipeline neighbours are replayed. The answer stands beside the prediction; communication is simulated.

    \b
    trimaran rehearse recipes/stdlib-tiny.yaml --cluster 4xcpu
    trimaran rehearse llama-3.1-8b --cluster 8x8xH100 --ranks first,last --json
    trimaran rehearse llama-3.1-70b --cluster 8x8xH100 --layers 2
    """
    from trimaran.app.plan.rehearse_answer import read_rehearse_request, rehearsal_as_dict, show_rehearsal
    from trimaran.app.show.clean_console import open_console, progress_bar
    from trimaran.data import cache_folder
    from trimaran.planner.measure.rehearsal import rehearse_plan

    shortcuts = {"cluster": cluster, "data.seq_len": seq_len, "train.global_batch": global_batch}
    request = read_rehearse_request(what, shortcuts, settings or [], ranks=ranks, steps=steps, layers=layers)
    with progress_bar(open_console(stderr=True)) as report:
        rehearsal = rehearse_plan(request, os.environ, cache_folder(os.environ), report)
    if as_json:
        typer.echo(json.dumps(rehearsal_as_dict(rehearsal), allow_nan=False))
    else:
        show_rehearsal(rehearsal, open_console())
    return 0 if all(each.measured for each in rehearsal.ranks) else NOT_MEASURED
