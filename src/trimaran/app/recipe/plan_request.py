"""Reads what `trimaran plan` is asked to plan: a recipe, or a bare model with defaults for the rest of the recipe."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import typer

from trimaran.app.recipe.recipe_files import with_local_model
from trimaran.app.recipe.request import read_question
from trimaran.core import ModelSection, Recipe, TextError, UserError, did_you_mean, expand_user, load_yaml
from trimaran.machine import detect
from trimaran.models import PRESETS, is_hub_name, outline_for, spec_of
from trimaran.planner import Question

DEFAULT_SEQ_LEN = 4096
REFERENCE_CLUSTER = "8xH100"
MIN_REFERENCE_PARAMETERS = 5 * 10**8  # a smaller model may be meant for this machine's CPU
DEFAULT_STEP_TOKENS = 2**20  # of a bare model without a batch: a common start of pretraining runs

ADAPTERS = {"lora": "kind: lora", "dora": "kind: dora", "qlora": "kind: lora, base: 4bit"}

OWN_FAMILIES = ("decoder", "vlm", "perception")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A question, and the command line arguments that repeat it: the recipe's file and the settings."""

    question: Question
    file: str | None
    settings: tuple[str, ...]
    is_reference: bool = False  # the cluster is `REFERENCE_CLUSTER`: none was named, and there is no GPU

    @property
    def arguments(self) -> list[str]:
        return [*([self.file] if self.file else []), *(word for pair in self.settings for word in ("--set", pair))]


def read_plan_request(what: str | None, shortcuts: Mapping[str, object], settings: Sequence[str]) -> PlanRequest:
    """Return the request for `what`: a recipe file, `-`, a preset, a config.json or a model folder.

    `shortcuts` are recipe fields with values, or None if not given; `settings` override them. A bare model gets a
    default name, length and batch for those that are not given, and on a machine without a GPU, where a large model is
    hardly to be trained, the cluster `REFERENCE_CLUSTER`.
    """
    file, model = _file_or_model(what)
    given = [_setting(field, value) for field, value in shortcuts.items() if value is not None]
    arguments = [*model, *given, *settings]
    reference = f"cluster={REFERENCE_CLUSTER}"
    is_reference = (
        bool(model)
        and not _names_cluster(arguments)
        and detect(visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES")).device.traits.shares_cores
        and _is_large(read_question(None, [*arguments, reference]))
    )
    arguments += [reference] if is_reference else []
    question = read_question(file, arguments)
    if model:
        # Name, length and batch, unless the user set them; the batch is a multiple of devices.
        recipe, outline, world_size = question.recipe, question.outline, question.cluster.world_size
        length = recipe.data.seq_len
        defaults: dict[str, Any] = {}
        if outline and "name" not in recipe.model_fields_set:
            defaults["name"] = re.sub(r"[^a-z0-9._-]+", "-", outline.name.lower()).strip("-._")[:63] or "run"
        fixed = outline.main.positions if outline else 0
        if "seq_len" not in recipe.data.model_fields_set:
            longest = outline.max_seq_len if outline else 0
            length = fixed or min(longest or DEFAULT_SEQ_LEN, DEFAULT_SEQ_LEN)
            defaults["data.seq_len"] = length
        length = fixed or length
        if "global_batch" not in recipe.train.model_fields_set:
            defaults["train.global_batch"] = world_size * max(1, DEFAULT_STEP_TOKENS // (length * world_size))
        arguments += [_setting(field, value) for field, value in defaults.items()]
        for field, value in defaults.items():
            section, _, name = field.rpartition(".")
            update = {section: getattr(recipe, section).model_copy(update={name: value})} if section else {name: value}
            recipe = recipe.model_copy(update=update)
        question = replace(question, recipe=recipe, outline=outline_for(recipe.model, recipe.data))
    # The limits of our trainer do not apply to a model that it does not have: any framework may run the plan.
    is_ours = question.spec is not None or question.recipe.model.kind.is_plugin
    question = replace(question, for_trainer=is_ours)
    return PlanRequest(question=question, file=file, settings=tuple(arguments), is_reference=is_reference)


def _names_cluster(settings: Sequence[str]) -> bool:
    return any(each.partition("=")[0].strip() == "cluster" for each in settings)


def _is_large(question: Question) -> bool:
    return question.outline is not None and question.outline.num_parameters >= MIN_REFERENCE_PARAMETERS


def say_reference(request: PlanRequest) -> None:
    """Print on standard error for which cluster a model is planned, if none was named and it is large for a CPU."""
    question = request.question
    if request.is_reference:
        typer.echo(f"no cluster is named and this machine has no GPU: planned for {REFERENCE_CLUSTER}; name yours, "
                   "such as --cluster 4xA100-80GB, or --cluster auto for this machine", err=True)  # fmt: skip
    elif (
        question.recipe.cluster == "auto"
        and not _names_cluster(request.settings)
        and question.cluster.device.traits.shares_cores
        and _is_large(question)
    ):
        typer.echo("planned for this machine, as the recipe's cluster is auto, and it has no GPU; for another, "
                   f"name it, such as --cluster {REFERENCE_CLUSTER}", err=True)  # fmt: skip


def adapter_setting(text: str) -> str:
    """Return `lora`, `lora:16` and the like as a setting of the recipe's `model.adapter`."""
    kind, separator, rank = text.partition(":")
    if kind not in ADAPTERS:
        raise UserError(
            "A013.no-adapter",
            where="--adapter",
            kind=kind,
            guess=did_you_mean(kind, ADAPTERS),
            adapters=", ".join(ADAPTERS),
        )
    if separator and not (rank.isascii() and rank.isdigit() and 0 < len(rank) <= 6 and int(rank)):
        raise UserError("A013.not-rank", where="--adapter", rank=rank, kind=kind)
    return f"model.adapter={{{ADAPTERS[kind]}{f', rank: {rank}' if separator else ''}}}"


def _file_or_model(what: str | None) -> tuple[str | None, list[str]]:
    """Return a recipe's file, or the settings that name a model."""
    if what is None or what == "-" or what.endswith((".yaml", ".yml")):
        return what, []
    if what in PRESETS:
        return None, [f"model.preset={what}"]
    from trimaran.models import VLM_PRESETS

    if what in VLM_PRESETS:
        return None, ["model.family=vlm", f"model.preset={what}"]
    path = expand_user(what)
    if path.is_dir() or path.name == "config.json":
        return None, _model_settings(what)
    if path.exists():
        return what, []
    if is_hub_name(what):
        recipe = with_local_model(Recipe(model=ModelSection(family="hf", path=what)), only_config=True)
        family = _model_settings(str(recipe.model.path))[0]
        return None, [family, _setting("model.path", what)]
    near = did_you_mean(what, [*PRESETS, *VLM_PRESETS, *(str(each) for each in path.parent.glob("*.y*ml"))])
    raise UserError("A012.not-recipe-preset", where="MODEL|RECIPE", text=what, near=near)


def _model_settings(path: str) -> list[str]:
    """Return the settings for a model on disk: one of our families if possible, because those support every axis."""
    return [f"model.family={family_of(path, OWN_FAMILIES)}", _setting("model.path", path)]


def family_of(path: str, families: Sequence[str]) -> str:
    """Return the first family whose network the config.json of `path` describes; else `hf`, which tells its errors."""
    for family in families:
        with suppress(UserError):
            if spec_of(ModelSection(family=family, path=path)) is not None:
                return family
    return "hf"


def _setting(field: str, value: object) -> str:
    """Return `value` as a `--set` argument, quoted only if YAML would read it as another type."""
    is_plain = not isinstance(value, bool)
    if isinstance(value, str):
        try:
            is_plain = load_yaml(value) == value
        except TextError:
            is_plain = False
    return f"{field}={value if is_plain else json.dumps(value, ensure_ascii=False)}"
