"""What a change of the recipe would bring, by the cost model, scaled to what was measured."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import yaml
from pydantic import ValidationError

from trimaran.core import Plan, Prediction, Recipe, UserError, dump_recipe, parse_recipe
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.step_breakdown import StepBreakdown, number
from trimaran.planner import Question, check_plan
from trimaran.planner.search import predicted

Patch = dict[str, Any]
ROOM = 0.92  # of a device's memory that a patched plan may need, by the prediction times how wrong it was so far
SLOWEST = 1000.0  # times slower than on paper: a link that carries less is no link
LEAST = 0.05  # of a step: what a patch must save to be worth a person's time


@dataclass(frozen=True, slots=True)
class PredictedGain:
    """A patch, and the share of a step that it should save."""

    patch: Patch
    gain: float

    @property
    def effect(self) -> str:
        return f"steps {self.gain:.0%} shorter"


def settings_of(patch: Patch) -> list[str]:
    """Return a patch as `--set` takes it: `field=value` each, where the value is YAML on one line."""
    return [f"{field}={_yaml(value)}" for field, value in patch.items()]


def patched(recipe: Recipe, patch: Patch) -> Recipe:
    """Return the recipe with the patch applied, as `trimaran train --set` would. Raises what is wrong with it."""
    return parse_recipe(dump_recipe(recipe), name="the run's recipe", overrides=settings_of(patch))


def best_of(
    evidence: Evidence, measured: StepBreakdown, patches: Iterable[Patch], *, least: float = LEAST
) -> PredictedGain | None:
    """Return the patch that should save most; None where none can run, or none saves at least `least` of a step."""
    remedies = [
        PredictedGain(patch, gain) for patch in patches if (gain := gain_of(evidence, measured, patch)) is not None
    ]
    best = max(remedies, key=lambda each: each.gain, default=None)
    return best if best and best.gain >= least else None


def gain_of(evidence: Evidence, measured: StepBreakdown, patch: Patch) -> float | None:
    """Return the share of a step that the patch should save; None where it cannot run, or nothing can be predicted.

    What the model says of computing is applied to the computing that was measured, and so with communication and the
    pipeline: a network that is slower than it should be makes saved bytes worth more.
    """
    question = evidence.ask()
    if question is None:
        return None
    try:
        recipe = patched(evidence.recipe, patch)
        plan = plan_with(evidence.plan, patch)
        check_plan(plan, recipe, question.spec, question.cluster, question.outline)
    except (UserError, ValidationError):
        return None
    question = fitted(question, evidence.plan, measured)
    now, then = forecast(question, evidence.plan), forecast(question, plan, recipe=recipe)
    if not then.fits or not _has_room(evidence, question, now, then):
        return None
    saved = sum(_saved(was, will, seconds) for was, will, seconds in _parts(now, then, measured))
    return saved / measured.step


def fitted(question: Question, plan: Plan, measured: StepBreakdown) -> Question:
    """Return the question for a cluster whose links are as slow as they turned out to be.

    Half as many bytes save much where they travel slowly. Links are never taken to be faster than they are, and those
    of a pipeline, whose waiting is not theirs alone, are left as they are.
    """
    talking = measured.comm
    if plan.mesh.world_size == 1 or plan.mesh.pp > 1 or forecast(question, plan).time["comm"] >= talking:
        return question
    low, high = 1.0, SLOWEST
    for _ in range(12):
        middle = math.sqrt(low * high)
        slower = forecast(_slower(question, middle), plan).time["comm"] < talking
        low, high = (middle, high) if slower else (low, middle)
    return _slower(question, low)


def _slower(question: Question, times: float) -> Question:
    """Return the question for links that carry so many times less."""
    links = tuple(
        replace(
            link, bandwidth=link.bandwidth / times, reached={name: rate / times for name, rate in link.reached.items()}
        )
        for link in question.cluster.levels
    )
    return replace(question, cluster=replace(question.cluster, links=links))


def forecast(question: Question, plan: Plan, *, recipe: Recipe | None = None) -> Prediction:
    """Return what the cost model says of a plan now; `recipe` in the place of the question's."""
    prediction = predicted(plan, replace(question, recipe=recipe or question.recipe)).prediction
    assert prediction is not None
    return prediction


def plan_with(plan: Plan, patch: Patch) -> Plan:
    """Return the plan with those fields of the patch that are its own."""
    tree = plan.model_dump()
    for field, value in patch.items():
        section, *path = field.split(".")
        if section != "plan":
            continue
        here = tree
        for key in path[:-1]:
            here = here[key]
        here[path[-1]] = value
    return Plan.model_validate(tree)


def larger_micro_batches(plan: Plan) -> Iterator[Patch]:
    """Yield patches that do the same global batch in fewer and larger pieces."""
    for times in range(2, plan.grad_accum + 1):
        if plan.grad_accum % times == 0:
            yield {"plan.micro_batch": plan.micro_batch * times, "plan.grad_accum": plan.grad_accum // times}


def _parts(now: Prediction, then: Prediction, measured: StepBreakdown) -> Iterator[tuple[float, float, float]]:
    """Yield what the model says of a part of the step now, and with the patch, and what that part took.

    A pipeline is one part: the model has the busiest rank's computing, and waiting is measured over all ranks.
    """
    talking = measured.comm + measured.straggler
    if "bubble" in now.time or "bubble" in then.time:
        yield now.step_seconds, then.step_seconds, measured.compute + measured.bubble + talking
        return
    yield now.time["comm"], then.time["comm"], talking
    yield now.step_seconds - now.time["comm"], then.step_seconds - then.time["comm"], measured.compute


def _saved(was: float, will: float, seconds: float) -> float:
    return seconds * (1 - will / was) if was else -will


def _has_room(evidence: Evidence, question: Question, now: Prediction, then: Prediction) -> bool:
    """Whether the patched plan fits, taking into account by how much the run needs more than was predicted for it."""
    device = question.cluster.device
    if device.kind == "cpu":
        return True
    peaks = [peak for each in evidence.steps if (peak := number(each, "peak_bytes"))]
    worse = max(1.0, max(peaks, default=0.0) / now.peak_bytes) if now.peak_bytes else 1.0
    return worse * then.device_bytes <= ROOM * device.memory_bytes


def _yaml(value: Any) -> str:
    """Return a value as YAML on one line."""
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
