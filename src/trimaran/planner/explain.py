"""A plan's prediction as rows, for whoever draws them."""

from collections.abc import Mapping
from dataclasses import dataclass

from trimaran.core import Plan

MEANING = {
    "weights": "weights that stay on the rank",
    "gradients": "gradients as they add up",
    "optimizer": "AdamW's two moments",
    "masters": "what 16-bit weights lack: fp32 copies, or their lower halves",
    "update": "copies of gradients that an update needs in passing",
    "holes": "what the allocator holds beside its tensors",
    "activations": "what forward keeps for backward",
    "logits": "the logits, and what the loss makes of them",
    "casts": "16-bit copies of the weights",
    "gathered": "weights that are whole while they are at work",
    "heap": "holes in the process's heap",
    "process": "the interpreter, torch and its kernels",
    "workspace": "scratch space of the matrix products",
}
PHASE_MEANING = {
    "forward": "computing the loss",
    "backward": "computing the gradients, and again what was not kept",
    "comm": "moving tensors between ranks where nothing hides it, and waiting for the slowest rank",
    "bubble": "waiting while the pipeline fills and drains",
    "offload": "moving tensors to the host and back where nothing hides it",
    "optimizer": "clipping, and moving the weights",
    "allocator": "freeing memory and asking for it again, on a device that is all but full",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplanationRow:
    """One term of a prediction: bytes or seconds, its share of the whole, and what it is."""

    term: str
    value: float
    share: float
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Where a plan's bytes and seconds go, largest first."""

    memory: tuple[ExplanationRow, ...] = ()
    time: tuple[ExplanationRow, ...] = ()


def explain(plan: Plan) -> Explanation:
    """Return the terms of the plan's prediction; nothing where nothing was predicted."""
    if plan.prediction is None:
        return Explanation()
    return Explanation(memory=_rows(plan.prediction.memory, MEANING), time=_rows(plan.prediction.time, PHASE_MEANING))


def _rows(terms: Mapping[str, float], meaning: Mapping[str, str]) -> tuple[ExplanationRow, ...]:
    total = sum(terms.values())
    ranked = sorted(terms.items(), key=lambda item: -item[1])
    return tuple(
        ExplanationRow(term=term, value=value, share=value / total, meaning=meaning.get(term, ""))
        for term, value in ranked
        if value
    )
