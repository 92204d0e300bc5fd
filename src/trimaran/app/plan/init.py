"""`trimaran init`: looks at a model and data, and writes a recipe for them."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trimaran.app.recipe.options import Json, cluster_option, path_argument, program_name
from trimaran.core import DataSection, Recipe, UserError, did_you_mean, show_bytes, show_seconds

if TYPE_CHECKING:  # `--help` imports neither the planner nor the readers of data
    from trimaran.app.plan.new_recipe import Choices
    from trimaran.app.recipe.facts import DataFacts, ModelFacts

DataName = Annotated[str | None, typer.Option(metavar="PATH|NAME", help="A file, a folder, or a dataset on the Hub.")]
OUT_HELP = "A new file for the recipe. [default: MODEL-METHOD.yaml]"


def init(
    model: Annotated[str | None, typer.Option(metavar="DIR|NAME", help="A model folder, or a name on the Hub.")] = None,
    data: DataName = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help=OUT_HELP)] = None,
    method: Annotated[
        Literal["full", "lora", "qlora"] | None,
        typer.Option("--method", help="What is trained. [default: the first of these that fits the cluster]"),
    ] = None,
    cluster: Annotated[str, cluster_option("8xH100, 2xcpu, ...")] = "auto",
    split: Annotated[str, typer.Option(metavar="NAME", help="The split of a dataset on the Hub.")] = "train",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: take what is proposed.")] = False,
    as_json: Json = False,
) -> int:
    """Look at a model and data, and write a recipe for them, with a comment on every choice.

    The format of the data is found by its content: conversations, documents, images with text. The recipe is checked
    as `trimaran train FILE --dry-run` does before it is written. No file is overwritten.

    \b
    trimaran init --model ./Qwen2.5-0.5B --data chats.jsonl
    trimaran init --model Qwen/Qwen2.5-7B --data HuggingFaceH4/ultrachat_200k --split train_sft --method lora --yes
    trimaran init --model ./model --data corpus/ --cluster 8xH100 --out corpus.yaml --yes --json
    """
    from trimaran.app.plan.new_recipe import choose_values, recipe_text, run_name
    from trimaran.app.plan.plan import plan_as_dict
    from trimaran.app.recipe.facts import look_at_data, look_at_model
    from trimaran.app.recipe.recipe_files import with_local_files, with_model_tokenizer
    from trimaran.core import expand_user
    from trimaran.machine import parse_cluster
    from trimaran.models import is_hub_name

    asks = not yes
    model, data = _given("--model", model, asks=asks), _given("--data", data, asks=asks)
    if out is not None:
        _refuse_existing(out)
    if asks and not sys.stdin.isatty():
        raise UserError("A025.no-terminal-ask", where="`trimaran init`")
    devices = parse_cluster(cluster, visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"))
    found_model = look_at_model(model)
    _say(f"model  {found_model.describe()}")
    if is_hub_name(data):
        section = DataSection(source="datasets", path=data, split=split)
        folder = Path(str(with_local_files(Recipe(data=section), weights=False).data.path))
    else:
        folder = expand_user(data)
    found_data = look_at_data(data, folder, found_model.tokenizer, split=split)
    _say(f"data   {found_data.describe()}")
    if found_data.has_images and not found_model.takes_images:
        raise UserError("T051.samples-images-model", where=found_data.named)
    choices = choose_values(found_model, found_data, devices, method=method, cluster_name=cluster)
    if asks:
        choices = _ask(choices, found_model, found_data, asks_method=method is None)
    file = out or Path(f"{run_name(found_model, choices.method)}.yaml")
    if asks and out is None:
        file = Path(typer.prompt("write the recipe to", default=str(file), err=True))
    _refuse_existing(file)
    text = recipe_text(found_model, found_data, choices)
    from trimaran.app.recipe.prepare_data import check_all_data, check_ranks
    from trimaran.app.recipe.request import resolve

    # The checks of `train --dry-run` come first; the file is complete or absent.
    draft = file.with_name(f".{file.name}.{os.getpid()}.yaml")
    try:
        draft.write_text(text, encoding="utf-8")
        request = resolve(str(draft), [])
        if found_model.weight_bytes > 0:
            check_ranks(request)
        check_all_data(with_model_tokenizer(with_local_files(request.recipe, weights=False)), _say)
        os.link(draft, file)  # fails if the file exists by now
    except FileExistsError:
        _refuse_existing(file)
        raise
    finally:
        draft.unlink(missing_ok=True)
    command = [program_name(), "train", path_argument(file)]
    if as_json:
        facts = {"file": str(file), "method": choices.method, "steps": choices.num_steps, "next": command}
        found = {"model": found_model.as_dict(), "data": found_data.as_dict()}
        typer.echo(json.dumps(plan_as_dict(request) | facts | found))
        return 0
    typer.echo(f"wrote  {file}: {choices.method}, {choices.epochs} passes, about {choices.num_steps:,} steps")
    if prediction := request.plan.prediction:
        step, peak = prediction.step_seconds, show_bytes(prediction.peak_bytes)
        whole = show_seconds(step * choices.num_steps)
        typer.echo(f"plan   {request.plan}: {peak} a device, {show_seconds(step)} a step, about {whole} in all")
    typer.echo(f"next   {' '.join(command)}")
    return 0


def _given(option: str, value: str | None, *, asks: bool) -> str:
    """Return the value of an option that is needed; ask for it on a terminal."""
    if value is not None:
        return value
    if not asks or not sys.stdin.isatty():
        raise UserError("A025.missing-nothing-asked", where="`trimaran init`", option=option)
    what = {"--model": "model (a folder, or a name on the Hub)", "--data": "data (a file, a folder, or a dataset)"}
    return typer.prompt(what[option], err=True)


def _refuse_existing(file: Path) -> None:
    if file.exists() or file.is_symlink():
        raise UserError("A026.file-exists", where=str(file))
    if not file.parent.is_dir():
        raise UserError("A026.folder-file", where=str(file), parent=file.parent)


def _ask(choices: "Choices", model: "ModelFacts", data: "DataFacts", *, asks_method: bool) -> "Choices":
    """Ask for what the files do not say: what is trained, and for how long."""
    from trimaran.app.plan.new_recipe import METHODS, learning_rate

    if asks_method and model.has_weights:
        picked = typer.prompt(f"train ({', '.join(METHODS)})", default=choices.method, err=True).strip()
        if picked not in METHODS:
            raise UserError(
                "A001.no-method",
                where="`trimaran init`",
                picked=picked,
                guess=did_you_mean(picked, METHODS),
                methods=", ".join(METHODS),
            )
        rate = learning_rate(picked, model.num_parameters or 10**9, has_weights=True)
        choices = replace(choices, method=picked, lr=rate)
    epochs = typer.prompt(f"passes over the {data.num_samples:,} samples", default=choices.epochs, type=int, err=True)
    steps = max(1, choices.num_steps * max(1, epochs) // choices.epochs)
    return replace(choices, epochs=max(1, epochs), num_steps=steps, warmup_steps=max(1, round(0.03 * steps)))


def _say(text: str) -> None:
    typer.echo(text, err=True)
