"""What a person wants planned: a recipe, or a bare model that gets the rest of a recipe from us."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import yaml

from trimaran.app.request.request import ask
from trimaran.core import ModelSection, UserError, nearest
from trimaran.models import PRESETS, VLM_PRESETS, spec_of
from trimaran.planner import Question

USUAL_SEQ_LEN = 4096
USUAL_TOKENS = 2**20  # of a step, where a bare model says nothing about batches: what pretraining runs start from

Own = Literal["decoder", "vlm", "perception"]
OWN: tuple[Own, ...] = get_args(Own)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A question, and the words that ask it again: the recipe's file and the settings on top."""

    question: Question
    file: str | None
    settings: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        return [*([self.file] if self.file else []), *(word for pair in self.settings for word in ("--set", pair))]


def ask_about(what: str | None, shortcuts: Mapping[str, object], settings: Sequence[str]) -> Asked:
    """Return the question that `what` is: a recipe file, `-`, a preset, a config.json or a model's folder.

    `shortcuts` are recipe fields with values, None where a person gave none; `settings` come on top. A bare model that
    comes without them is asked about at the usual length and batch.
    """
    file, named = _file_or_model(what)
    given = [_setting(field, value) for field, value in shortcuts.items() if value is not None]
    told = [*named, *given, *settings]
    question = ask(file, told)
    if named:
        usual = _usual(question)
        told = [*named, *given, *usual, *settings]
        question = ask(file, told) if usual else question
    # Our trainer is not asked about a model that it does not have: any system may run the plan then.
    return Asked(question=replace(question, trains=question.spec is not None), file=file, settings=tuple(told))


def _file_or_model(what: str | None) -> tuple[str | None, list[str]]:
    """Return a recipe's file, or the settings that name a model."""
    if what is None or what == "-" or what.endswith((".yaml", ".yml")):
        return what, []
    if what in PRESETS:
        return None, [f"model.preset={what}"]
    if what in VLM_PRESETS:
        return None, ["model.family=vlm", f"model.preset={what}"]
    path = Path(what).expanduser()
    if path.is_dir() or path.name == "config.json":
        return None, _model_settings(what)
    if path.exists():
        return what, []
    near = nearest(what, [*PRESETS, *VLM_PRESETS, *(str(each) for each in path.parent.glob("*.y*ml"))])
    raise UserError("A012", f"'{what}' is no recipe, no preset and no model's folder{near}", where="WHAT",
                    fix="name a YAML file, a preset (see `trimaran presets`), a config.json or its folder")  # fmt: skip


def _model_settings(path: str) -> list[str]:
    """Return the settings for a model on disk: as one of our own where it can be, because that splits in every way."""
    # What is wrong with the file itself is said when `hf` reads it.
    family = next((each for each in OWN if _describes(each, path)), "hf")
    return [f"model.family={family}", _setting("model.path", path)]


def _describes(family: Own, path: str) -> bool:
    """Return whether the config.json of `path` is one of a network of this family of ours."""
    try:
        return spec_of(ModelSection(family=family, path=path)) is not None
    except UserError:
        return False


def _setting(field: str, value: object) -> str:
    """Return `value` as a setting, in quotes only where YAML would take it for something else."""
    plain = not isinstance(value, str) or yaml.safe_load(value) == value
    return f"{field}={value if plain else json.dumps(value)}"


def _usual(question: Question) -> list[str]:
    """Return the name, length and batch of a bare model, where nobody gave them: a multiple of the devices."""
    recipe, outline, devices = question.recipe, question.outline, question.cluster.world_size
    seq_len, settings = recipe.data.seq_len, []
    if outline and "name" not in recipe.model_fields_set:
        settings.append(
            _setting("name", re.sub(r"[^a-z0-9._-]+", "-", outline.name.lower()).strip("-._")[:63] or "run")
        )
    fixed = outline.main.positions if outline else 0
    if "seq_len" not in recipe.data.model_fields_set:
        longest = outline.max_seq_len if outline else 0
        seq_len = fixed or min(longest or USUAL_SEQ_LEN, USUAL_SEQ_LEN)
        settings.append(f"data.seq_len={seq_len}")
    seq_len = fixed or seq_len
    if "global_batch" not in recipe.train.model_fields_set:
        settings.append(f"train.global_batch={devices * max(1, USUAL_TOKENS // (seq_len * devices))}")
    return settings
