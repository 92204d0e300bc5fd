"""Predicts what a change of the recipe gains: the cost model's prediction, scaled to the measured step."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import yaml
from pydantic import ValidationError

from trimaran.core import Plan, Prediction, Recipe, UserError, dump_recipe, parse_recipe
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.step_breakdown import StepBreakdown, get_numbers
from trimaran.planner import MAX_MEMORY_FRACTION, Patch, Question, check_plan, plan_with, predicted

MAX_LINK_SLOWDOWN = 1000.0  # of a link, against the catalogue
MIN_GAIN_FRACTION = 0.05  # of a step that a patch must save to be worth a finding


@dataclass(frozen=True, slots=True)
class Remedy:
    """A patch and its effect."""

    patch: Patch
    gain: float  # the fraction of a step that it should save; negative: steps get longer
    effect: str  # as text
    caution: str = ""  # what else it changes: the trained result, if it adds an adapter
    peak_ratio: float = 1.0  # of the memory that it needs, to what is needed now


def remedy_fields(remedy: Remedy | None) -> dict[str, Any]:
    """Return the patch of a finding, its effect and its gain; nothing without a remedy."""
    return {"patch": remedy.patch, "expected_effect": remedy.effect, "gain": remedy.gain} if remedy else {}


def patch_settings(patch: Patch) -> list[str]:
    """Return a patch as arguments of `--set`: `field=value`, with the value as one line of YAML."""
    return [f"{field}={_yaml(value)}" for field, value in patch.items()]


def apply_patch(recipe: Recipe, patch: Patch) -> Recipe:
    """Return the recipe with the patch applied, as `trimaran train --set` does. Raises UserError if it is invalid."""
    return parse_recipe(dump_recipe(recipe), name="the run's recipe", overrides=patch_settings(patch))


def best_patch(
    evidence: Evidence, measured: StepBreakdown, patches: Iterable[Patch], *, min_gain: float = MIN_GAIN_FRACTION
) -> Remedy | None:
    """Return the patch that should save most; None if none can run, or none saves at least `min_gain` of a step."""
    candidates = [
        Remedy(patch, gain, f"steps {gain:.0%} shorter")
        for patch in patches
        if (gain := predicted_gain(evidence, measured, patch)) is not None
    ]
    best = max(candidates, key=lambda each: each.gain, default=None)
    return best if best and best.gain >= min_gain else None


def predicted_gain(evidence: Evidence, measured: StepBreakdown, patch: Patch) -> float | None:
    """Return the fraction of a step that the patch should save; None if it cannot run or cannot be predicted."""
    # The model's relative change of compute, communication and bubble is applied to the measured time of each part. On
    # a network slower than predicted, saved bytes are worth more.
    question = evidence.planner_inputs()
    if question is None:
        return None
    try:
        recipe = apply_patch(evidence.recipe, patch)
        plan = plan_with(evidence.plan, patch)
        check_plan(plan, recipe, question.spec, question.cluster, question.outline, question.facts)
    except (UserError, ValidationError):
        return None
    question = with_measured_links(question, evidence.plan, measured)
    now, then = forecast(question, evidence.plan), forecast(question, plan, recipe=recipe)
    if not then.fits:
        return None
    device = question.cluster.device
    if device.traits.has_own_memory:  # scaled by how much the run exceeded its own prediction
        peak = max(get_numbers(evidence.steps, "peak_bytes"), default=0.0)
        excess = max(1.0, peak / now.peak_bytes) if now.peak_bytes else 1.0
        if excess * then.device_bytes > MAX_MEMORY_FRACTION * device.memory_bytes:
            return None
    # Of each part of the step: seconds that are predicted now, predicted with the patch, and measured. A pipelined step
    # is one part: the model predicts the busiest rank, but waits are measured over all ranks.
    comm = measured.comm + measured.straggler
    if "bubble" in now.time or "bubble" in then.time:
        parts = [(now.step_seconds, then.step_seconds, measured.compute + measured.bubble + comm)]
    else:
        parts = [
            (now.time["comm"], then.time["comm"], comm),
            (now.step_seconds - now.time["comm"], then.step_seconds - then.time["comm"], measured.compute),
        ]
    return sum(seconds * (1 - will / was) if was else -will for was, will, seconds in parts) / measured.step


def with_measured_links(question: Question, plan: Plan, measured: StepBreakdown) -> Question:
    """Return the inputs with links slowed down until the predicted communication equals the measured one."""
    # Between nodes the network is slowed down alone, if that explains what was measured. Links are never made faster
    # than the catalogue says. With a pipeline they stay as they are, because its waits have other causes too.
    if not can_measure_links(plan) or forecast(question, plan).time["comm"] >= measured.comm:
        return question
    only_network = question.cluster.num_nodes > 1

    def seconds(times: float) -> float:
        return forecast(_slower(question, times, only_network=only_network), plan).time["comm"]

    if only_network and seconds(MAX_LINK_SLOWDOWN) < measured.comm:
        only_network = False
    low, high = 1.0, MAX_LINK_SLOWDOWN
    for _ in range(12):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if seconds(middle) < measured.comm else (low, middle)
    return _slower(question, low, only_network=only_network)


def can_measure_links(plan: Plan) -> bool:
    """Return whether the exposed communication of a plan says how fast the links are."""
    return plan.mesh.world_size > 1 and plan.mesh.pp == 1


def _slower(question: Question, times: float, *, only_network: bool) -> Question:
    """Return the inputs with the bandwidth of links divided by `times`: of all, or of the one between nodes."""
    levels = question.cluster.levels
    links = tuple(
        replace(
            link, bandwidth=link.bandwidth / times, reached={name: rate / times for name, rate in link.reached.items()}
        )
        if not only_network or number == len(levels) - 1
        else link
        for number, link in enumerate(levels)
    )
    return replace(question, cluster=replace(question.cluster, links=links))


def forecast(question: Question, plan: Plan, *, recipe: Recipe | None = None) -> Prediction:
    """Return the cost model's prediction of a plan; `recipe` replaces the one of the inputs."""
    prediction = predicted(plan, replace(question, recipe=recipe or question.recipe)).prediction
    assert prediction is not None
    return prediction


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
