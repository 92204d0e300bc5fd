"""`trimaran plan`: which way to split the work is best, what it would cost, and why the others lost."""

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimaran.app.request.options import Json, Settings, complete_cluster, complete_goal, complete_tool, complete_what

if TYPE_CHECKING:  # help is shown without the planner
    from trimaran.app.request.request import Request

What = Annotated[
    str | None,
    typer.Argument(
        metavar="WHAT",
        show_default=False,
        help="A recipe (YAML, or - for standard input), a preset, a config.json or a model's folder.",
        autocompletion=complete_what,
    ),
]
ClusterName = Annotated[
    str | None,
    typer.Option(metavar="C", help="8xH100, 4x8xA100-80GB, auto or a YAML file.", autocompletion=complete_cluster),
]
Length = Annotated[int | None, typer.Option(metavar="N", help="Tokens of a sequence.")]
Batch = Annotated[int | None, typer.Option(metavar="N", help="Sequences of an optimizer step.")]
GoalName = Annotated[
    str, typer.Option(metavar="GOAL", help="throughput, memory, cost or fewest-gpus.", autocompletion=complete_goal)
]
Top = Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="How many plans to show.")]
Tool = Annotated[
    str | None,
    typer.Option(
        metavar="TOOL",
        help="Write the best plan for accelerate, deepspeed, hf-trainer, torchtitan or megatron.",
        autocompletion=complete_tool,
    ),
]
Output = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Where --emit writes. [default: a folder called TOOL]")
]
Force = Annotated[bool, typer.Option("--force", help="Let --emit write over files.")]
Tokens = Annotated[str | None, typer.Option(metavar="N", help="Say how long N tokens take: 300B, 1T.")]
Price = Annotated[float | None, typer.Option(metavar="PRICE", help="Of a GPU hour: say what those tokens cost.")]
Mtbf = Annotated[float | None, typer.Option(metavar="HOURS", help="Between failures of one GPU: say what they cost.")]


def plan(  # noqa: PLR0913  (the options of a verb)
    what: What = None,
    cluster: ClusterName = None,
    seq_len: Length = None,
    global_batch: Batch = None,
    goal: GoalName = "throughput",
    top: Top = 8,
    emit: Tool = None,
    output: Output = None,
    force: Force = False,
    tokens: Tokens = None,
    price: Price = None,
    mtbf: Mtbf = None,
    settings: Settings = None,
    as_json: Json = False,
) -> int:
    """Find the best way to split the work, and say what it costs and why. Starts nothing and needs no GPU.

    Any field of the plan can be pinned with --set; the rest is searched.

    \b
    trimaran plan llama-3-8b --cluster 8xH100
    trimaran plan ./Qwen2.5-VL-7B --cluster 4x8xA100-80GB --tokens 1T --price 2.5 --mtbf 50000
    trimaran plan recipes/stdlib-tiny.yaml --set plan.mesh.tp=2 --json
    trimaran plan llama-3-70b --cluster 8x8xH100 --emit megatron --output conf
    """
    from trimaran.app.request.plan_answer import as_dict, report_on, with_files, with_goal, with_top
    from trimaran.app.request.plan_request import ask_about
    from trimaran.app.request.run_cost import read_terms
    from trimaran.core import EXIT_DONE, EXIT_USER, UserError
    from trimaran.planner.choose import refusal

    if output is not None and emit is None:
        raise UserError("A013", "--output is the folder for a tool's files, and no tool is named", where="--output",
                        fix="add --emit TOOL, or redirect --json to a file")  # fmt: skip
    terms = read_terms(tokens=tokens, price=price, mtbf=mtbf)
    shortcuts = {"cluster": cluster, "data.seq_len": seq_len, "train.global_batch": global_batch}
    asked = with_top(with_goal(ask_about(what, shortcuts, settings or []), goal), top)
    with _waiting(quiet=as_json):
        report = report_on(asked, terms, tool=emit)
    report = with_files(report, output, force=force)
    if as_json:
        typer.echo(json.dumps(as_dict(report, top=top)))
        return EXIT_DONE if report.best else EXIT_USER
    from rich.console import Console

    from trimaran.app.views.plan_answer_view import show_report

    show_report(report, Console(highlight=False), top=top)
    if report.best is None:
        raise refusal(report.answer)
    if report.caution:
        typer.echo(f"\n{report.caution}")
    typer.echo(f"\nnext  {report.next_command}")
    return EXIT_DONE


def _waiting(*, quiet: bool) -> AbstractContextManager[object]:
    """Return what turns on a terminal while plans are searched: thousands of GPUs take a moment."""
    if quiet or not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status("searching the plans")


def answer(request: "Request") -> dict[str, object]:
    """Return what a dry run of `train` prints with `--json`: the plan, and the prediction term by term."""
    prediction = request.plan.prediction
    return {
        "name": request.recipe.name,
        "cluster": request.recipe.cluster,
        "plan": request.plan.model_dump(mode="json"),
        "prediction": prediction.model_dump(mode="json") if prediction else None,
    }
