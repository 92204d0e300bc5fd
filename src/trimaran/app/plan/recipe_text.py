"""Writes a recipe with a comment on every choice."""

import json
from collections.abc import Iterable
from typing import Any

from trimaran.app.plan.choices import Choices, recipe_fields
from trimaran.app.recipe.data_facts import DataFacts
from trimaran.app.recipe.model_facts import ModelFacts
from trimaran.core.parse_text import TextError, load_yaml

COMMENT_COLUMN = 40
HEADER = "# Written by `trimaran init`. Every value can be changed; `trimaran train FILE --dry-run` checks it."


def recipe_text(model: ModelFacts, data: DataFacts, choices: Choices) -> str:
    """Return the recipe as YAML with comments."""
    fields = recipe_fields(model, data, choices)
    comments = _comments(model, data, choices)
    lines = [HEADER, f"# model: {model.describe()}", f"# data:  {data.describe()}"]
    lines += _lines(fields, comments, "")
    return "\n".join(lines) + "\n"


def _comments(model: ModelFacts, data: DataFacts, choices: Choices) -> dict[str, str]:
    """Return the comment on each field, by dotted name."""
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
    return {
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
        "train.evaluate.every": "steps; 0: only at the end"
        if not choices.evaluate_every
        else "steps, on held-out data",
        "cluster": "auto: this machine" if choices.cluster == "auto" else "where it runs",
    }


def _lines(fields: dict[str, Any], comments: dict[str, str], prefix: str) -> Iterable[str]:
    depth = "  " * prefix.count(".")
    for name, value in fields.items():
        dotted = f"{prefix}{name}"
        comment = f"# {comments[dotted]}" if dotted in comments else ""
        if isinstance(value, dict):
            yield _joined(f"{depth}{name}:", comment)
            yield from _lines(value, comments, f"{dotted}.")
        else:
            yield _joined(f"{depth}{name}: {_scalar(value)}", comment)


def _joined(text: str, comment: str) -> str:
    return (
        f"{text:<{COMMENT_COLUMN}}{comment}".rstrip() if len(text) < COMMENT_COLUMN else f"{text}  {comment}".rstrip()
    )


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
