"""An adapter as PEFT's LoraConfig, for tools whose models are Hugging Face's. Names are those of peft 0.21."""

from typing import Any

from trimaran.core import AdapterSection
from trimaran.planner.emit.emission import as_json, refusal
from trimaran.planner.question import Question

PEFT_FILE = "peft_config.json"


def refuse_adapter(tool: str, question: Question) -> None:
    """Raise if an adapter should be trained: the tool would silently train the whole model."""
    if question.recipe.model.adapter:
        raise refusal(tool, "an adapter", "it trains whole models", where="model.adapter",
                      fix="remove model.adapter")  # fmt: skip


def peft_files(tool: str, question: Question) -> dict[str, str]:
    """Return the file with the arguments of peft's LoraConfig; none without an adapter."""
    if (adapter := question.recipe.model.adapter) is None:
        return {}
    _refuse_inexpressible(tool, adapter)
    return {PEFT_FILE: as_json(peft_config(adapter))}


def peft_notes(question: Question) -> list[str]:
    """Return what a user's own script must do for an adapter."""
    if question.recipe.model.adapter is None:
        return []
    return [f"your script loads the model in the compute precision and trains get_peft_model(model, "
            f"LoraConfig(**json.load(open('{PEFT_FILE}')))); without that it would train the whole model"]  # fmt: skip


def peft_config(adapter: AdapterSection) -> dict[str, Any]:
    """Return the arguments of peft's LoraConfig."""
    fields: dict[str, Any] = {
        "task_type": "CAUSAL_LM",
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "use_rslora": adapter.rank_stabilised,
        "use_dora": adapter.kind == "dora",
        "target_modules": adapter.targets if adapter.targets == "all-linear" else list(adapter.targets),
    }
    return fields | ({"modules_to_save": list(adapter.train)} if adapter.train else {})


def _refuse_inexpressible(tool: str, adapter: AdapterSection) -> None:
    names = () if adapter.targets == "all-linear" else adapter.targets
    for field, holds, why, fix in (
        ("base", adapter.base != "auto", "the emitted files load 16-bit weights", "set it to auto"),
        ("path", adapter.path is not None, "the emitted files start a new one", "leave it out"),
        ("towers", bool(adapter.towers), "peft's targets do not know towers", "leave it out"),
        ("targets", any("*" in name for name in names), "peft's lists have no star", "name the linear layers"),
        ("train", any("*" in name for name in adapter.train), "peft's lists have no star", "name the modules"),
    ):
        if holds:
            raise refusal(tool, f"this {field} of an adapter", why, where=f"model.adapter.{field}", fix=fix)
