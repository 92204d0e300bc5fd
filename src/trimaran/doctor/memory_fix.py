"""The cheapest way to need less memory, by the cost model."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from pydantic import ValidationError

from trimaran.core import Plan, Prediction, UserError, show_bytes
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.evidence_queries import sound
from trimaran.doctor.predicted_gain import ROOM, Patch, forecast, plan_with
from trimaran.doctor.step_breakdown import number
from trimaran.planner import Question, check_plan

FIXED = ("process",)  # terms of a prediction that no plan changes


@dataclass(frozen=True, slots=True)
class MemoryFix:
    """A patch, what it needs of a device and what a step takes then, beside what both are now."""

    patch: Patch
    now: Prediction
    then: Prediction

    @property
    def gain(self) -> float:
        """The share of a step that it saves; below 0 it costs."""
        return 1 - self.then.step_seconds / self.now.step_seconds

    @property
    def effect(self) -> str:
        pace = f"{abs(self.gain):.0%} {'shorter' if self.gain > 0 else 'longer'}"
        size = f"{show_bytes(_size(self.then))} instead of {show_bytes(_size(self.now))}"
        return f"{size} on each device, and steps {pace} by the cost model"


def cheapest_memory_fix(evidence: Evidence, *, ran_out: bool) -> MemoryFix | None:
    """Return the patch that costs least time of those that fit; None where none does, or nothing can be predicted.

    The prediction is taken to be as wrong for the others as it is for the present plan: if memory `ran_out`, that needs
    more than there is, whatever was predicted.
    """
    question = evidence.ask()
    if question is None:
        return None
    now, total = forecast(question, evidence.plan), capacity(evidence, question)
    peak = max((number(each, "peak_bytes") or 0.0 for each in evidence.steps), default=0.0)
    held = _size(now)
    real = max(held, peak if question.cluster.device.kind != "cpu" else 0.0, total if ran_out else 0.0)
    ways = [MemoryFix(patch, now, then) for patch in _candidates(evidence.plan) if (then := _weighed(evidence, patch))]
    fits = [each for each in ways if _size(each.then) * real / held <= ROOM * total]
    best = sorted(fits, key=lambda each: (each.then.step_seconds, each.then.peak_bytes, len(each.patch)))
    return next((each for each in best if sound(evidence.recipe, each.patch)), None)


def capacity(evidence: Evidence, question: Question) -> float:
    """Return the bytes of one device, as the run has seen them or as the cluster has them."""
    if question.cluster.device.kind == "cpu":
        return float(question.cluster.device.memory_bytes)
    totals = [total for each in evidence.steps[-1:] if (total := number(each, "memory", "total"))]
    return totals[-1] if totals else float(question.cluster.device.memory_bytes)


def _size(prediction: Prediction) -> float:
    fixed = sum(prediction.memory.get(term, 0) for term in FIXED)
    return (prediction.device_bytes or prediction.peak_bytes) - fixed


def _weighed(evidence: Evidence, patch: Patch) -> Prediction | None:
    """Return what the patched plan needs; None where it cannot run. It has fields of the plan alone."""
    question = evidence.ask()
    assert question is not None
    try:
        plan = plan_with(evidence.plan, patch)
        check_plan(plan, evidence.recipe, question.spec, question.cluster, question.outline)
        return forecast(question, plan)
    except (UserError, ValidationError):
        return None


def _candidates(plan: Plan) -> Iterator[Patch]:
    """Yield what takes less memory: one change, or one of each kind. What training computes stays the same."""
    kinds = (list(_micro(plan)), list(_recompute(plan)), list(_sharding(plan)), list(_rest(plan)))
    for chosen in product(*([{}, *kind] for kind in kinds)):
        if patch := {field: value for each in chosen for field, value in each.items()}:
            yield patch


def _micro(plan: Plan) -> Iterator[Patch]:
    for part in range(2, plan.micro_batch + 1):
        if plan.micro_batch % part == 0:
            yield {"plan.micro_batch": plan.micro_batch // part, "plan.grad_accum": plan.grad_accum * part}


def _recompute(plan: Plan) -> Iterator[Patch]:
    if plan.recompute == "none":
        yield {"plan.recompute": "selective"}
    if plan.recompute != "full":
        yield {"plan.recompute": "full"}


def _sharding(plan: Plan) -> Iterator[Patch]:
    if plan.mesh.dp > 1 and plan.sharding != "parameters" and plan.engine == "torch":
        yield {"plan.mesh.dp_replicate": 1, "plan.mesh.dp_shard": plan.mesh.dp, "plan.sharding": "parameters"}


def _rest(plan: Plan) -> Iterator[Patch]:
    if plan.loss == "logits":
        yield {"plan.loss": "chunked"}
    if plan.offload == "none":
        yield {"plan.offload": "activations"}
        yield {"plan.offload": "optimizer"}
