"""Parses a recipe; every mistake becomes one UserError that names the line.

Knows the names that other training programs use for its fields, and which fields may change at a resume.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from trimaran.core import templated
from trimaran.core.autopilot_section import section_of_mode
from trimaran.core.errors import UserError, closest, collected, raise_together
from trimaran.core.parse_text import TextError, load_yaml, load_yaml_nodes
from trimaran.core.plugins import UNCHECKED
from trimaran.core.recipe import Recipe

# The names of transformers and TRL, axolotl, LLaMA-Factory, torchtitan, Megatron-LM, nanoGPT and PEFT.
FIELD_ALIASES = {
    "train.lr": "learning_rate max_lr peak_lr base_lr lr_max",
    "train.steps": "max_steps num_steps train_steps total_steps training_steps num_training_steps train_iters "
    "max_iters num_iterations iterations",
    "train.global_batch": "batch_size train_batch_size global_batch_size total_batch_size effective_batch_size batch",
    "train.clip_norm": "max_grad_norm grad_clip gradient_clipping gradient_clip_val max_norm clip_grad",
    "train.seed": "random_seed data_seed",
    "train.schedule.kind": "lr_scheduler lr_scheduler_type scheduler lr_schedule lr_decay_style",
    "train.schedule.warmup_steps": "num_warmup_steps warmup_ratio warmup warmup_iters lr_warmup_iters",
    "train.schedule.floor": "min_lr lr_min min_lr_ratio",
    "train.optimizer.weight_decay": "decay wd",
    "train.optimizer.beta1": "adam_beta1",
    "train.optimizer.beta2": "adam_beta2",
    "train.optimizer.eps": "adam_epsilon adam_eps epsilon",
    "train.evaluate.every": "eval_steps eval_interval eval_every evals_per_epoch",
    "train.evaluate.batches": "eval_iters eval_batches",
    "data.epochs": "num_epochs num_train_epochs n_epochs max_epochs",
    "data.seq_len": "max_seq_length max_seq_len sequence_len sequence_length seq_length max_length block_size "
    "context_length cutoff_len max_position_embeddings",
    "data.path": "dataset dataset_name dataset_path data_files train_file data_path datasets",
    "data.tokenizer": "tokenizer_name tokenizer_path tokenizer_config tokenizer_name_or_path",
    "data.text_field": "dataset_text_field text_column",
    "data.holdout": "val_set_size val_size validation_split eval_split test_size",
    "data.workers": "num_workers dataloader_num_workers",
    "data.samples.batching": "packing sample_packing group_by_length",
    "data.samples.template": "chat_template prompt_template",
    "model.path": "model_name model_name_or_path base_model pretrained_model_name_or_path hf_model model_path",
    "model.adapter.rank": "lora_r lora_rank r",
    "model.adapter.alpha": "lora_alpha",
    "model.adapter.dropout": "lora_dropout",
    "model.adapter.targets": "lora_target_modules target_modules lora_target lora_target_linear",
    "model.adapter.train": "modules_to_save lora_modules_to_save",
    "model.adapter.rank_stabilised": "use_rslora peft_use_rslora rank_stabilized",
    "model.adapter.kind": "use_dora peft_use_dora adapter_type finetuning_type peft_type",
    "model.adapter.base": "load_in_4bit quantization quantization_bit",
    "model.adapter": "lora peft peft_config lora_config",
    "plan.micro_batch": "micro_batch_size per_device_train_batch_size local_batch_size mbs",
    "plan.grad_accum": "gradient_accumulation_steps grad_accumulation_steps accumulation_steps "
    "gradient_accumulation accumulate_grad_batches",
    "plan.precision": "bf16 fp16 dtype torch_dtype mixed_precision amp",
    "plan.recompute": "gradient_checkpointing activation_checkpointing activation_checkpoint",
    "plan.compile": "torch_compile",
    "plan.mesh.tp": "tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size tp_size",
    "plan.mesh.pp": "pipeline_parallel_size pipeline_parallel_degree pipeline_model_parallel_size pp_size",
    "plan.mesh.cp": "context_parallel_size context_parallel_degree cp_size",
    "plan.mesh.ep": "expert_parallel_size expert_parallel_degree expert_model_parallel_size ep_size",
    "plan.mesh.dp_shard": "data_parallel_shard_degree fsdp",
    "checkpoint.every": "save_steps save_interval save_freq checkpoint_interval checkpoint_every checkpointing_steps",
    "checkpoint.keep": "save_total_limit keep_latest_k",
    "telemetry.details_every": "logging_steps log_freq log_interval",
    "telemetry.wandb.project": "wandb_project",
    "telemetry.wandb.mode": "report_to",
    "telemetry.mlflow.uri": "mlflow_tracking_uri tracking_uri",
    "telemetry.mlflow.experiment": "mlflow_experiment_name",
    "name": "run_name experiment_name job_name",
    "cluster": "gpus devices num_gpus nproc_per_node accelerator",
}
FIELD_OF_ALIAS = {alias: field for field, aliases in FIELD_ALIASES.items() for alias in aliases.split()}
MAX_RECIPE_BYTES = 1 << 20
MAX_SHOWN = 80  # characters of a wrong value in an error

Path = tuple[str | int, ...]
CHANGEABLE_FIELDS = (
    "train.steps",
    "train.save",
    "train.evaluate",
    "train.sample",
    "data.workers",
    "data.epochs",
    "data.samples.balance",
    "data.samples.max_bad",
    "data.samples.cache_features",
    "data.timeout_seconds",
    "cluster",
    "plan",
    "checkpoint",
    "faults",
    "nodes",
    "telemetry",
    "autopilot",
)
"""How long, where and how to train. Any other field changes the model, the data or the optimizer: another run."""


def field_for(name: str, section: str = "") -> str:
    """Return the dotted field that a person meant by `name` in `section`; empty if there is no good guess.

    In this order: the name of another program for a field of the section, a small typo in one of these, the name of
    another program, a field of that exact name in another section, a larger typo.
    """
    plain = name.replace("-", "_").casefold()
    prefix = f"{section}." if section else ""
    siblings = [each.removeprefix(prefix) for each in all_fields() if each.rpartition(".")[0] == section]
    same = sorted((each for each in all_fields() if each.rpartition(".")[2] == plain), key=lambda each: each.count("."))
    small_typo, typo = (closest(plain, siblings, cutoff=cutoff) for cutoff in (0.8, 0.6))
    known = FIELD_OF_ALIAS.get(plain) or next(iter(same), "")
    if small_typo and known.rpartition(".")[0] != section:
        return f"{prefix}{small_typo}"
    return known or (f"{prefix}{typo}" if typo else "")


@cache
def all_fields() -> tuple[str, ...]:
    """Every field and section of a recipe, by dotted name."""
    return tuple(_fields(Recipe, ""))


def _fields(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        if not field.exclude:
            yield f"{prefix}{name}"
            if section := section_model(field.annotation):
                yield from _fields(section, f"{prefix}{name}.")


def section_model(annotation: Any) -> type[BaseModel] | None:
    """Return the model of a field that is a section, also if it may be `auto` or null; None for any other field."""
    options = [annotation, *get_args(annotation)]
    options += [inner for each in options[1:] for inner in get_args(each)]  # the forms of a tagged union
    return next((each for each in options if isinstance(each, type) and issubclass(each, BaseModel)), None)


def parse_recipe(text: str, *, name: str, overrides: Iterable[str] = (), any_plugin: bool = False) -> Recipe:
    """Return the recipe that `text` and the `--set` pairs describe. Errors call the text `name`.

    All mistakes are raised together, those of the text first and in the order of its lines. `any_plugin`: accept names
    of plug-ins that are not installed here.
    """
    if len(text) > MAX_RECIPE_BYTES:
        raise UserError("R002.recipe-too-large", where=name, num_text=len(text))
    mistakes: list[UserError] = []
    lines: dict[Path, int] = {}  # of every key
    try:
        tree = load_yaml_nodes(text, lambda root: _walk(root, (), lines, name, mistakes))
    except TextError as error:
        where = f"{name}, {error.place}" if error.place else name
        if error.is_refused:
            raise UserError("R003", error.what, where=where, fix="write the values out") from None
        fix = error.fix or "check indents, colons and quotes; values with ': ' need quotes"
        raise UserError("R001.not-yaml", where=where, fix=fix, error=error.what) from None
    tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        raise UserError("R001.recipe-mapping-sections", where=name)
    settings = []
    for pair in overrides:
        with collected(mistakes):
            settings.append(_override(tree, pair))
    recipe = None
    try:
        recipe = Recipe.model_validate(tree, context=UNCHECKED if any_plugin else None)
    except ValidationError as error:
        # One mistake for each wrong field, in the order of the text's lines; fields of `--set` come last.
        # pydantic reports every form that a value may have. Of the reports about a value and its parts only those
        # about the innermost parts count; several about one value are one mistake.
        places = Places(name=name, lines=lines, settings=settings)
        errors = error.errors(include_url=False)
        paths = [_real_path(each["loc"], tree) for each in errors]
        found: dict[Path, list[Any]] = {}
        for report, path in zip(errors, paths, strict=True):
            if not any(len(other) > len(path) and other[: len(path)] == path for other in paths):
                found.setdefault(path, []).append(report)
        ordered = sorted(found, key=lambda path: places.line_of(path) or MAX_RECIPE_BYTES)
        mistakes += [_mistake(found[path], path, places.describe(path)) for path in ordered]
    raise_together(mistakes)
    assert recipe is not None, "a recipe that is not valid has mistakes"
    return recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where the values of a recipe come from: lines of its text, and the fields of `--set`."""

    name: str
    lines: Mapping[Path, int]
    settings: Sequence[Path]

    def line_of(self, path: Path) -> int | None:
        """Return the line of the text that holds the value at `path`; None if `--set` or a default gave it."""
        if any(path[: len(setting)] == setting for setting in self.settings):
            return None
        return next((self.lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in self.lines), None)

    def describe(self, path: Path) -> str:
        dotted = ".".join(map(str, path)) or "recipe"
        if (line := self.line_of(path)) is not None:
            return templated("{dotted} ({name}, line {line})", dotted=dotted, name=self.name, line=line)
        is_set = any(path[: len(setting)] == setting[: len(path)] for setting in self.settings)
        return f"{dotted} (--set)" if is_set else f"{dotted} ({self.name})"


def dump_recipe(recipe: Recipe) -> str:
    """Return `recipe` as YAML with every default written out; the plan has only the pinned fields."""
    tree = recipe.model_dump(mode="json", exclude={"plan"})
    tree["plan"] = "auto" if recipe.plan == "auto" else recipe.plan.model_dump(mode="json", exclude_unset=True)
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def _walk(node: yaml.Node, path: Path, lines: dict[Path, int], name: str, mistakes: list[UserError]) -> None:
    """Record the line of every key, and a mistake for every key that its mapping has already."""
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*path, str(key.value))
            if here in lines:
                where = templated("{name}, line {line}", name=name, line=key.start_mark.line + 1)
                mistakes.append(UserError("R004.set-twice", where=where, key=key.value, lines=lines[here]))
                continue
            lines[here] = key.start_mark.line + 1
            _walk(value, here, lines, name, mistakes)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _walk(value, (*path, index), lines, name, mistakes)


def _override(tree: dict[str, Any], pair: str) -> Path:
    """Set the field of a `--set` pair in the tree, and return its path."""
    path, separator, raw = pair.partition("=")
    keys = path.strip().split(".")
    if not separator or not all(keys):
        raise UserError("R010.not-setting-write", where="--set", shortened=_shortened(pair))
    try:
        value = load_yaml(raw)
    except TextError as error:
        raise UserError(
            "R010.value-not-yaml-quote", where=f"--set {path}", shortened=_shortened(raw), error=error.what
        ) from None
    here = tree
    for key in keys[:-1]:
        below = here.get(key)
        if below is None or below == "auto":
            below = {}
        if here is tree and key == "autopilot":
            below = section_of_mode(below)
        if not isinstance(below, dict):
            raise UserError("R010.no-fields", where=f"--set {path}", key=key, shortened=_shortened(repr(below)))
        here[key] = here = dict(below)
    here[keys[-1]] = value
    return tuple(keys)


def _mistake(reports: Sequence[Any], path: Path, where: str) -> UserError:
    dotted, first = ".".join(map(str, path)) or "recipe", reports[0]
    if not any(each["type"] == "extra_forbidden" for each in reports):
        code = "R012" if "type" in first["type"] or "parsing" in first["type"] else "R013"
        messages = (str(each["msg"]).removeprefix("Value error, ").removeprefix("Input ") for each in reports)
        forms = ", or ".join(dict.fromkeys(message.rstrip(".") for message in messages))
        what = templated(
            "{dotted} is {shortened}: {forms}",
            dotted=dotted,
            shortened=_shortened(repr(first.get("input"))),
            forms=forms,
        )
        fix = (
            _fix(first, dotted)
            if len(reports) == 1
            else templated("give {dotted} a value of one of these forms", dotted=dotted)
        )
        return UserError(code, what, where=where, fix=fix)
    section = ".".join(str(part) for part in path[:-1] if isinstance(part, str))
    names, meant = _fields_at(path[:-1]), field_for(str(path[-1]), section)
    inside = meant.rpartition(".")[0] == section
    near = templated(" (did you mean '{meant}'?)", meant=meant.rpartition(".")[2] if inside else meant) if meant else ""
    listed = templated("the fields here are {names}", names=", ".join(names))
    fix = listed if inside or not meant else templated("set {meant} instead; {listed}", meant=meant, listed=listed)
    return UserError("R011.no-field", where=where, fix=fix, path=path[-1], near=near)


def _real_path(location: Path, tree: dict[str, Any]) -> Path:
    """Return `location` without the names of the union branches that pydantic tried, and without missing fields."""
    path: list[str | int] = []
    here: Any = tree
    for part in location:
        in_list = isinstance(here, list) and isinstance(part, int) and part < len(here)
        if in_list or (isinstance(here, dict) and part in here):
            here = here[part]
            path.append(part)
    return tuple(path) or location[:1]


def _fields_at(path: Path) -> list[str]:
    """Return the fields of the section at `path`; numbers in it are places in a list, and keys of a mapping names."""
    model, is_key = Recipe, False
    for part in path:
        if isinstance(part, int) or is_key:
            is_key = False
            continue
        annotation: Any = model.model_fields[part].annotation
        is_key = get_origin(annotation) is dict
        inner = [annotation, *(each for member in get_args(annotation) for each in (member, *get_args(member)))]
        model = next(each for each in map(section_model, inner) if each)
    return [field for field in model.model_fields if field != "prediction"]


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text):,} characters)"


def _fix(mistake: Mapping[str, Any], dotted: str) -> str:
    context = mistake.get("ctx", {})
    if "expected" in context:
        return templated("use one of {expected}", expected=context["expected"])
    for bound, phrase in (("ge", "at least"), ("gt", "more than"), ("le", "at most"), ("lt", "less than")):
        if bound in context:
            return templated("use a value of {phrase} {bound}", phrase=phrase, bound=context[bound])
    if "pattern" in context:
        return "use lower-case letters, digits, dots, dashes and underscores, at most 63 of them"
    if mistake["type"] == "value_error":  # the message says what is wrong with it
        return templated("change {dotted}; `trimaran schema` lists all fields", dotted=dotted)
    return templated("give {dotted} a value of the right type; `trimaran schema` lists all fields", dotted=dotted)


def fixed_field_changes(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """Return the fields that must not change but differ, by dotted name: the old and the new value."""
    before, after = (dict(_leaves(recipe.model_dump(mode="json"))) for recipe in (old, new))
    names = sorted(
        name
        for name in {**before, **after}
        if not any(name == each or name.startswith(f"{each}.") for each in CHANGEABLE_FIELDS)
    )
    return {name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)}


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value and name != "shape":
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
