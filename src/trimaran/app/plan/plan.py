"""`trimaran plan`: the best parallel plan, its cost, and why other plans lost."""

import json
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimaran.app.recipe.options import (
    Json,
    Settings,
    argument,
    cluster_option,
    complete_adapter,
    complete_goal,
    complete_model_or_recipe,
    complete_tool,
)
from trimaran.runs import plan_tree

if TYPE_CHECKING:  # `--help` does not import the planner
    from trimaran.app.recipe.request import Request

MODEL_HELP = "A recipe (YAML, or - for standard input), a preset, a config.json or a model folder."
GOAL_HELP = "throughput, memory, cost, fewest-gpus or goodput."
TOOL_HELP = "Write config files of the best plan: accelerate, deepspeed, hf-trainer, torchtitan or megatron."
Output = Annotated[Path | None, typer.Option(metavar="DIR", help="Where --emit writes. [default: a folder named TOOL]")]
FROM_HELP = "Pin what accelerate's YAML or a ds_config.json says; see --set."
Tokens = Annotated[str | None, typer.Option(metavar="N", help="Show how long N tokens take: 300B, 1T.")]
Price = Annotated[float | None, typer.Option(metavar="AMOUNT", help="Price of a GPU hour: show what --tokens cost.")]
ADAPTER_HELP = "Train an adapter, not the whole model: lora, dora, or qlora (lora on a 4-bit base)."

PromptTokens = Annotated[int | None, typer.Option(metavar="N", help="Tokens of a prompt, with --serve. [default: 512]")]


def plan(
    what: Annotated[str | None, argument("MODEL|RECIPE", MODEL_HELP, complete_model_or_recipe)] = None,
    cluster: Annotated[str | None, cluster_option("8xH100, 4x8xA100-80GB, auto or a YAML file.")] = None,
    seq_len: Annotated[int | None, typer.Option(metavar="N", help="Tokens per sequence.")] = None,
    global_batch: Annotated[int | None, typer.Option(metavar="N", help="Sequences per optimizer step.")] = None,
    adapter: Annotated[
        str | None, typer.Option(metavar="KIND[:RANK]", help=ADAPTER_HELP, autocompletion=complete_adapter)
    ] = None,
    from_file: Annotated[Path | None, typer.Option("--from", metavar="FILE", help=FROM_HELP)] = None,
    goal: Annotated[str, typer.Option(metavar="NAME", help=GOAL_HELP, autocompletion=complete_goal)] = "throughput",
    top: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="How many plans to show.")] = 8,
    emit: Annotated[str | None, typer.Option(metavar="TOOL", help=TOOL_HELP, autocompletion=complete_tool)] = None,
    output: Output = None,
    force: Annotated[bool, typer.Option("--force", help="Let --emit overwrite files.")] = False,
    tokens: Tokens = None,
    price: Price = None,
    mtbf: Annotated[float | None, typer.Option(metavar="HOURS", help="Mean time between failures of one GPU.")] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Plan how to serve the model, not how to train it.")] = False,
    prompt_tokens: PromptTokens = None,
    output_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens of an answer, with --serve. [default: 256]")
    ] = None,
    max_running: Annotated[
        int | None,
        typer.Option(
            "--max-running", metavar="N", min=1, help="With --serve: requests computed together. [default: 64]"
        ),
    ] = None,
    weights: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="With --serve: bf16, fp16, fp32, fp8, int8 or int4 weights.")
    ] = None,
    tp: Annotated[int | None, typer.Option("--tp", metavar="N", help="With --serve: tensor-parallel ranks.")] = None,
    pp: Annotated[int | None, typer.Option("--pp", metavar="N", help="With --serve: pipeline stages.")] = None,
    settings: Settings = None,
    as_json: Json = False,
) -> int:
    """Find the best parallel plan, what it costs and why. Starts nothing and needs no GPU.

    Any field of the plan can be pinned with --set; the rest is searched.

    \b
    trimaran plan llama-3-8b --cluster 8xH100
    trimaran plan ./Qwen2.5-VL-7B --cluster 4x8xA100-80GB --tokens 1T --price 2.5 --mtbf 50000
    trimaran plan recipes/stdlib-tiny.yaml --set plan.mesh.tp=2 --json
    trimaran plan llama-3-70b --cluster 8x8xH100 --emit megatron --output conf
    trimaran plan llama-3.1-70b --cluster 4xA100-80GB --adapter lora:16
    trimaran plan llama-3.1-8b --cluster 8xH100 --from ds_config.json
    trimaran plan --serve llama-3-8b --cluster 8xH100 --prompt-tokens 1024 --output-tokens 256
    """
    from trimaran.app.plan.history import best_measured_plan
    from trimaran.app.plan.plan_answer import (
        as_dict,
        build_plan_report,
        read_cost_terms,
        with_files,
        with_goal,
        with_top,
    )
    from trimaran.app.recipe.plan_request import adapter_setting, read_plan_request, say_reference
    from trimaran.core import EXIT_DONE, EXIT_USER, UserError, expand_user
    from trimaran.planner.search.goals import no_fit_error

    serving = {"--prompt-tokens": prompt_tokens, "--output-tokens": output_tokens, "--max-running": max_running,
               "--weights": weights, "--tp": tp, "--pp": pp}  # fmt: skip
    if serve:
        unused = {"--seq-len": seq_len, "--global-batch": global_batch, "--adapter": adapter, "--from": from_file,
                  "--emit": emit, "--output": output, "--tokens": tokens, "--mtbf": mtbf}  # fmt: skip
        from trimaran.app.main import open_leaf

        asked = {"cluster": cluster, "goal": goal, "price": price}
        asked |= {name[2:].replace("-", "_"): each for name, each in serving.items()}
        return open_leaf("plan --serve")(what, asked, unused, settings or [], as_json=as_json)
    if named := [name for name, value in serving.items() if value is not None]:
        raise UserError("A013.says-how-model", where=named[0], named=named[0])
    if output is not None and emit is None:
        raise UserError("A013.output-folder-tool", where="--output")
    terms = read_cost_terms(tokens=tokens, price=price, mtbf=mtbf)
    shortcuts = {"cluster": cluster, "data.seq_len": seq_len, "train.global_batch": global_batch}
    settings = [*([adapter_setting(adapter)] if adapter else []), *(settings or [])]
    tool_file = None
    if from_file is None:
        pinned = read_plan_request(what, shortcuts, settings)
    else:
        from trimaran.app.plan.other_tools import ToolFile, with_pins
        from trimaran.planner import read_pins

        path = expand_user(str(from_file))
        tool_file = ToolFile(path=path, found=read_pins(path))
        pinned = with_pins(tool_file, what, shortcuts, settings)
    request = with_top(with_goal(pinned, goal), top)
    say_reference(pinned)
    if tool_file and not as_json:
        from trimaran.app.plan.other_tools import show_tool_file

        show_tool_file(tool_file, request.question.cluster, request.question.recipe)
    searching: AbstractContextManager[object] = nullcontext()
    if not as_json:
        from trimaran.app.show.clean_console import open_console

        if sys.stderr.isatty():  # thousands of GPUs take a moment
            searching = open_console(stderr=True).status("searching plans")
    with searching:
        report = build_plan_report(request, terms, tool=emit)
    report = with_files(report, output, force=force)
    report = replace(report, measured=best_measured_plan(report.request.question, os.environ))
    if as_json:
        translated = {"from": tool_file.as_dict(report.request.question.cluster)} if tool_file else {}
        typer.echo(json.dumps(as_dict(report, top=top) | translated))
        return EXIT_DONE if report.best else EXIT_USER
    from trimaran.app.plan.plan_view import show_report
    from trimaran.app.show.clean_console import open_console

    show_report(report, open_console(), top=top)
    if report.best is None:
        raise no_fit_error(report.answer)
    if report.caution:
        typer.echo(f"\n{report.caution}")
    if report.measured_command:
        typer.echo(f"\nmeasured  {report.measured_command}")
    typer.echo(f"\nnext  {report.next_command}")
    if report.trainer:
        typer.echo(f"or    {report.trainer}")
    return EXIT_DONE


def plan_as_dict(request: "Request") -> dict[str, object]:
    """Return what `train --dry-run --json` prints: the plan, and the prediction term by term."""
    return {"name": request.recipe.name, "cluster": request.recipe.cluster} | plan_tree(request.plan)
