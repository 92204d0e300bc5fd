"""A plan's prediction as rows of a table."""

from collections.abc import Mapping
from dataclasses import dataclass

from trimaran.core import Plan

MEANING = {
    "weights": "weights on the rank",
    "gradients": "accumulated gradients",
    "optimizer": "AdamW's two moments",
    "masters": "fp32 copies of 16-bit weights, or their lower 16 bits",
    "update": "temporary copies for the optimizer update",
    "holes": "memory that the allocator reserves beyond its tensors",
    "activations": "saved by forward for backward",
    "logits": "the logits, and the loss computed from them",
    "casts": "16-bit copies of the weights",
    "gathered": "unsharded weights of the layers at work",
    "heap": "fragmentation of the process heap",
    "process": "the interpreter, torch and its kernels",
    "workspace": "workspace of the matmuls",
}
PHASE_MEANING = {
    "forward": "computing the loss",
    "backward": "computing the gradients, and recompute",
    "comm": "exposed communication, and waiting for the slowest rank",
    "bubble": "waiting while the pipeline fills and drains",
    "offload": "exposed copies to the host and back",
    "optimizer": "clipping and updating the weights",
    "allocator": "retries of the allocator on a nearly full device",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplanationRow:
    """One term of a prediction: bytes or seconds, its fraction of the total, and what it is."""

    term: str
    value: float
    fraction: float
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Where a plan's bytes and seconds go, largest first."""

    memory: tuple[ExplanationRow, ...] = ()
    time: tuple[ExplanationRow, ...] = ()


def explain(plan: Plan) -> Explanation:
    """Return the terms of the plan's prediction; nothing if there is none."""
    if plan.prediction is None:
        return Explanation()
    return Explanation(memory=_rows(plan.prediction.memory, MEANING), time=_rows(plan.prediction.time, PHASE_MEANING))


def _rows(terms: Mapping[str, float], meaning: Mapping[str, str]) -> tuple[ExplanationRow, ...]:
    total = sum(terms.values())
    ranked = sorted(terms.items(), key=lambda item: -item[1])
    return tuple(
        ExplanationRow(term=term, value=value, fraction=value / total, meaning=meaning.get(term, ""))
        for term, value in ranked
        if value
    )
