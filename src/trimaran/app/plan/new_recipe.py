"""The recipe of `trimaran init`: its values, by what is known of the model and the data, and its text with comments."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from trimaran.app.recipe.facts import DataFacts, ModelFacts
from trimaran.core import Recipe, TextError, UserError, family_named, load_yaml
from trimaran.machine import Cluster
from trimaran.models import outline_if_known, spec_of
from trimaran.planner import choose

Method = Literal["full", "lora", "qlora"]
METHODS: tuple[Method, ...] = get_args(Method)
NOTHING_FITS = "P007"
HOST_OFFLOADS = ("optimizer", "parameters")
RANK, ALPHA = 16, 32  # as in the examples of PEFT; alpha = 2 * rank
MAX_SEQ_LEN = 8192  # of a new recipe: longer sequences cost much memory
MIN_SEQ_LEN = {"cuda": 2048, "cpu": 256}  # of packed rows: short rows leave a GPU idle
STEP_TOKENS = {"cuda": 2**15, "cpu": 2**11}  # of an optimizer step in fine-tuning
CORPUS_STEP_TOKENS = {"cuda": 2**18, "cpu": 2**12}  # in continued pretraining
FEW_SAMPLES = 20_000  # fewer are seen three times
COMMENT_COLUMN = 40
HEADER = "# Written by `trimaran init`. Every value can be changed; `trimaran train FILE --dry-run` checks it."


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The values of a new recipe. `num_steps` is an estimate: `epochs` ends the run."""

    method: Method
    seq_len: int
    global_batch: int
    epochs: int
    lr: float
    weight_decay: float
    warmup_steps: int
    num_steps: int
    cluster: str

    @property
    def evaluate_every(self) -> int:
        """Steps between evaluations: about five in a run; 0, only at the end, in a short one."""
        return self.num_steps // 5 if self.num_steps >= 50 else 0


def choose_values(
    model: ModelFacts, data: DataFacts, cluster: Cluster, *, method: Method | None, cluster_name: str
) -> Choices:
    """Return the values, with the first of full, lora and qlora that fits the cluster, unless `method` names one."""
    adapters: list[Method] = ["lora", "qlora"] if cluster.device.traits.has_kernels else ["lora"]
    tried: list[Method] = [method or "full", *(adapters if method is None and model.has_weights else [])]
    for each in tried:
        device = cluster.device.kind
        targets = STEP_TOKENS if data.is_samples else CORPUS_STEP_TOKENS
        one_a_row = data.is_samples and model.mixes_documents
        seq_len = _seq_len(model, data, MIN_SEQ_LEN["cpu" if one_a_row else device])
        world = cluster.world_size
        rows = data.num_samples if one_a_row else max(1, data.total_tokens // seq_len)
        batch = max(1, min(targets[device] // seq_len, rows // 10))  # of little data, ten steps an epoch
        batch = world * max(1, round(batch / world))
        epochs = 3 if data.is_samples and model.has_weights and data.num_samples < FEW_SAMPLES else 1
        steps = max(1, epochs * rows // batch)
        choices = Choices(
            method=each,
            seq_len=seq_len,
            global_batch=batch,
            epochs=epochs,
            lr=learning_rate(each, model.num_parameters or 10**9, has_weights=model.has_weights),
            weight_decay=0.0 if model.has_weights and data.is_samples else 0.1,
            warmup_steps=max(1, round(0.03 * steps)),
            num_steps=steps,
            cluster=cluster_name,
        )
        try:
            recipe = Recipe.model_validate(recipe_fields(model, data, choices, path=str(model.folder)))
            plan = choose(recipe, spec_of(recipe.model), cluster, outline_if_known(recipe.model, recipe.data))
        except UserError as error:
            if error.code != NOTHING_FITS or each == tried[-1]:
                raise
            continue
        # An adapter without weights or states in host memory is much faster than a plan that keeps them there.
        if plan.offload not in HOST_OFFLOADS or each == tried[-1]:
            return choices
    raise AssertionError("the last method either fits or raises")


def recipe_fields(model: ModelFacts, data: DataFacts, choices: Choices, *, path: str | None = None) -> dict[str, Any]:
    """Return the fields of the recipe; `path` replaces the name of a model on the Hub."""
    section: dict[str, Any] = {"family": model.family, "path": path or model.named}
    if choices.method != "full":
        base = {"base": "4bit"} if choices.method == "qlora" else {}
        section["adapter"] = {"kind": "lora", "rank": RANK, "alpha": ALPHA, **base}
    elif family_named(model.family).reads == "images":
        section["freeze"] = ["vision"]
    source: dict[str, Any] = {"source": data.source, "path": data.named}
    source |= {"text_field": data.text_field} if data.text_field != "text" else {}
    source |= {"split": data.split} if data.split != "train" else {}
    rows = {"samples": {"batching": "pad"}} if data.is_samples and model.mixes_documents else {}
    return {
        "name": run_name(model, choices.method),
        "model": section,
        "data": {**source, "seq_len": choices.seq_len, "epochs": choices.epochs, **rows},
        "train": {
            "global_batch": choices.global_batch,
            "lr": choices.lr,
            "schedule": {"kind": "cosine", "warmup_steps": choices.warmup_steps},
            "optimizer": {"weight_decay": choices.weight_decay},
            "evaluate": {"every": choices.evaluate_every},
        },
        "cluster": choices.cluster,
    }


def run_name(model: ModelFacts, method: Method) -> str:
    """Return a name for the run and its file: the model's, and the method."""
    slug = re.sub(r"[^a-z0-9._-]+", "-", model.name.lower()).strip("-._")[:50] or "model"
    return f"{slug}-{method if model.has_weights else 'scratch'}"


def learning_rate(method: Method, num_parameters: int, *, has_weights: bool) -> float:
    """Return a usual peak learning rate of AdamW: higher for adapters and for training from scratch, lower for size."""
    if not has_weights:
        return 1e-3 if num_parameters < 10**8 else 6e-4 if num_parameters < 10**9 else 3e-4
    if method != "full":
        return 2e-4 if num_parameters < 2 * 10**10 else 1e-4
    return 2e-5 if num_parameters < 3 * 10**9 else 1e-5 if num_parameters < 2 * 10**10 else 5e-6


def _seq_len(model: ModelFacts, data: DataFacts, least: int) -> int:
    """Return a power of two that holds the longest sample, or of a text enough sequences, within the limits."""
    limit = min(model.max_seq_len or MAX_SEQ_LEN, MAX_SEQ_LEN)
    if not data.is_samples and not model.takes_images:
        wanted = min(2 * least, max(32, data.total_tokens // 64))
        return min(limit, 1 << (wanted.bit_length() - 1))
    longest = max(least, data.longest_tokens + model.image_tokens)  # a row holds an image and the text about it
    return min(limit, 1 << (longest - 1).bit_length())


def recipe_text(model: ModelFacts, data: DataFacts, choices: Choices) -> str:
    """Return the recipe as YAML with comments."""
    fields = recipe_fields(model, data, choices)
    families = {"decoder": "Trimaran's own network, which supports every kind of parallelism",
                "vlm": "Trimaran's own vision-language network", "hf": "the network of transformers"}  # fmt: skip
    sources = {
        "chat": "conversations: only the answers are learnt from",
        "jsonl": "one document a line",
        "text": "one document a file",
        "webdataset": "images with text in tar files",
        "image-folder": "images with captions",
        "parquet": "rows with conversations or images",
        "datasets": "rows of a table, or a saved dataset",
        "megatron": "tokens of Megatron's tools",
        "nanogpt": "tokens in raw files",
        "shards": "text that was tokenized before",
    }
    rates = {"full": "usual for training all weights of a model of this size", "lora": "usual for LoRA: ten times "
             "that of full training", "qlora": "usual for QLoRA: ten times that of full training"}  # fmt: skip
    shorter = "are padded" if model.mixes_documents else "share a row"
    length = f"the longest sample read has {data.longest_tokens:,} tokens; shorter ones {shorter}"
    if not data.is_samples:
        length = "documents are joined and cut into sequences of this length"
    elif data.longest_tokens > choices.seq_len:
        length = f"longer samples (up to {data.longest_tokens:,} tokens) are cut at their end"
    comments = {
        "name": "runs/NAME holds the run",
        "model.family": families[model.family],
        "model.path": "shape, weights and tokenizer" if model.has_weights else "shape only: it has no weights",
        "model.adapter": "train small matrices beside the frozen weights",
        "model.adapter.rank": "more learns more and costs more memory",
        "model.adapter.alpha": "the adapter counts alpha / rank times",
        "model.adapter.base": "frozen weights in 4 bits (NF4)",
        "model.freeze": "the vision tower stays as it is",
        "data.source": sources[data.source],
        "data.text_field": "the field that holds the text",
        "data.split": "the split of the dataset",
        "data.seq_len": length,
        "data.epochs": f"passes over the data end the run: about {choices.num_steps:,} steps; 0: train.steps alone",
        "data.samples.batching": "one sample in each row: in this model, several would attend to each other",
        "train.global_batch": f"rows a step, {choices.global_batch * choices.seq_len:,} tokens, on any number of GPUs",
        "train.lr": rates[choices.method] if model.has_weights else "usual for training from scratch",
        "train.schedule.warmup_steps": "3 % of the steps",
        "train.optimizer.weight_decay": "none in fine-tuning" if choices.weight_decay == 0 else "usual for a corpus",
        "train.evaluate.every": f"steps{', on held-out data' if choices.evaluate_every else '; 0: only at the end'}",
        "cluster": "auto: this machine" if choices.cluster == "auto" else "where it runs",
    }
    lines = [HEADER, f"# model: {model.describe()}", f"# data:  {data.describe()}"]
    lines += _lines(fields, comments, "")
    return "\n".join(lines) + "\n"


def _lines(fields: dict[str, Any], comments: dict[str, str], prefix: str) -> Iterable[str]:
    depth = "  " * prefix.count(".")
    for name, value in fields.items():
        dotted = f"{prefix}{name}"
        comment = f"# {comments[dotted]}" if dotted in comments else ""
        text = f"{depth}{name}:" if isinstance(value, dict) else f"{depth}{name}: {_scalar(value)}"
        aligned = f"{text:<{COMMENT_COLUMN}}" if len(text) < COMMENT_COLUMN else f"{text}  "
        yield f"{aligned}{comment}".rstrip()
        if isinstance(value, dict):
            yield from _lines(value, comments, f"{dotted}.")


def _scalar(value: Any) -> str:
    """Return a value as YAML on one line: plain where YAML reads it as itself."""
    if isinstance(value, str):
        try:
            plain = load_yaml(value) == value and not set(value) & set("{}[],#\n") and ": " not in value
        except TextError:
            plain = False
        return value if plain else json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and 0 < value < 1e-2:
        return f"{value:.1e}"
    return f"[{', '.join(map(_scalar, value))}]" if isinstance(value, list) else json.dumps(value)
