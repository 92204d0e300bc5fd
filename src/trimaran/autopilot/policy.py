"""Which change to try next: facts in, one decision or none out. A pure function.

Every proposal is priced: what it should gain over the steps that are left, times the chance that a trial can show it,
less what the trial costs. The best one is tried if it pays and if the budget for trials allows its worst case. Also
what a proposal is: a change, what it should gain, and what trying it costs.
"""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from statistics import NormalDist
from typing import Any, Protocol

from trimaran.autopilot.trial import LOOK_CONFIDENCE, MIN_HARM_STEPS, MIN_WINDOW_STEPS, max_trial_steps
from trimaran.autopilot.verdict import Baseline, smallest_gain_to_show, steps_to_show
from trimaran.core import KINDS, AutopilotSection, Decision, Plan, Recipe, UserError, load_plugin
from trimaran.core.autopilot_section import OTHER_CHANGEABLE_FIELDS
from trimaran.planner.change_plan import RESULT_FIELDS
from trimaran.runs import LEFT_OUT_FIELD, WARM_UP_STEPS

log = logging.getLogger(__name__)

Patch = dict[str, Any]  # recipe fields by dotted name, such as `plan.micro_batch`
CHECKPOINT_FIELDS = tuple(field for field in OTHER_CHANGEABLE_FIELDS if field.startswith("checkpoint."))


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """One change."""

    patch: Patch
    undo: Patch  # takes it back
    gain: float  # the fraction of a step that it should save
    uncertainty: float  # the standard deviation of that
    reason: str  # one sentence
    finding: str = ""  # the code of the finding that it is from
    peak_ratio: float = 1.0  # the predicted peak memory with it over that without it
    saves_memory: bool = False  # it is made to need less memory, whatever it costs in time
    is_in_place: bool = False  # ranks make it without building networks again
    first_step_seconds: float = 0.0  # what the first step takes longer: compilation
    is_measured: bool = False  # its gain follows from measured steps, so it may take back a change that was kept
    facts: Mapping[str, float] = field(default_factory=dict)  # further numbers to write down with the decision


def is_changeable(field: str) -> bool:
    """Return whether a running run can change the field at all."""
    return field.startswith("plan.") or field in OTHER_CHANGEABLE_FIELDS or field == LEFT_OUT_FIELD


def changes_course(patch: Iterable[str]) -> bool:
    """Return whether a patch changes the results of training, not only how they are computed."""
    names = [f"plan.{name}" for name in RESULT_FIELDS]
    return any(field == each or field.startswith(f"{each}.") for field in patch for each in names)


def is_pinned(field: str, pins: Iterable[str]) -> bool:
    """Return whether a pin such as `mesh`, `plan.mesh` or `plan.mesh.tp` covers the field."""
    # Micro-batch and accumulation change together, so a pin of one covers both.
    names = {field, field.replace("grad_accum", "micro_batch"), field.replace("micro_batch", "grad_accum")}
    full = [pin for each in pins for pin in (each, f"plan.{each}")]
    return any(
        name == pin or name.startswith(f"{pin}.") or pin.startswith(f"{name}.") for name in names for pin in full
    )


def settings_of(plan: Plan, recipe: Recipe) -> dict[str, Any]:
    """Return the present values of the fields that can change, by dotted name."""
    tree = recipe.model_dump(mode="json", include={"data", "checkpoint", "faults"})
    others = {field: reduce(lambda here, key: here[key], field.split("."), tree) for field in OTHER_CHANGEABLE_FIELDS}
    return dict(_leaves(plan.model_dump(mode="json"), "plan.")) | others


def undo_of(patch: Mapping[str, Any], settings: Mapping[str, Any]) -> Patch | None:
    """Return the patch that restores the present values; None if a field has none."""
    if any(field not in settings for field in patch):
        return None
    return {field: settings[field] for field in patch}


def describe(patch: Mapping[str, Any], undo: Mapping[str, Any]) -> str:
    """Return a patch as text, such as `micro_batch 1 -> 4, grad_accum 8 -> 2`."""
    return ", ".join(
        f"{name.removeprefix('plan.')} {undo.get(name)} -> {value}"
        for name, value in patch.items()
        if undo.get(name) != value
    )


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterable[tuple[str, Any]]:
    for name, value in tree.items():
        yield f"{prefix}{name}", value
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")


NORMAL = NormalDist()
MIN_GAIN = 0.01  # of a step, below which nothing is tried
MAX_MEMORY_FRACTION = 0.92  # of a device that a changed plan may need, by its measured peak
TIGHT_MEMORY_FRACTION = 0.95  # of a device: a growing peak may run out of memory at any step
GROWING_MEMORY_FRACTION = 0.85  # of a device: a peak that will reach the limit at its present growth is acted on
GROWTH_HORIZON_STEPS = 500
MAX_LOSS_FRACTION = 0.5  # of a step, that a change for the worse costs while it is noticed
PAUSE_SECONDS = {True: 0.3, False: 2.0}  # of a change in place, and of one that rebuilds; until some were measured
MIN_CHANGED_FRACTION = 0.03  # of a step, by which it is longer now than it was with a change that was rolled back
WINDOWS_OF_A_TRIAL = 3  # with the change, without it, and with it again
MIN_CLEAR_LOSS = 0.05  # of a step: a change that cost this much is not tried under another plan either
MAX_TRIES = 2  # of one change, under different plans
MIN_DRIFT_TO_RETURN = 0.15  # of a step by which it changed since a decision, to reconsider what that decision left
MAX_MEASURED_RETURNS = 3  # to an earlier value of a field, in one run
MIN_ADVISED_GAIN = 0.05
MAX_ADVISED = 5  # decisions that wait for a person


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTrend:
    """The peak memory of the recent steps, its growth per step, and the memory of the device; all in bytes."""

    peak: float
    growth: float
    limit: float

    @property
    def is_running_out(self) -> bool:
        later = self.peak + GROWTH_HORIZON_STEPS * self.growth
        is_near = self.peak > TIGHT_MEMORY_FRACTION * self.limit
        return self.growth > 0 and (
            is_near or (self.peak > GROWING_MEMORY_FRACTION * self.limit and later > self.limit)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What the policy knows about a run at one step."""

    step: int
    steps_left: int
    baseline: Baseline
    settings: Mapping[str, Any]  # the present values of the fields that can change
    proposals: Sequence[Proposal]
    budget_seconds: float  # what all trials of the run may cost together
    decisions: Sequence[Decision] = ()  # so far, in order
    pins: Sequence[str] = ()  # fields that must stay
    may_change_course: bool = False
    memory: MemoryTrend | None = None
    pause_seconds: Mapping[bool, float] = field(default_factory=dict)  # measured, by whether changes are in place
    # since then steps take longer or shorter, without a change: what helped before it, or not, is open again
    shifted_at: int = 0

    @property
    def spent_seconds(self) -> float:
        return sum(each.trial_seconds for each in self.decisions)


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedProposal:
    """A proposal with the seconds that it should save over the rest of the run, less what trying it costs."""

    proposal: Proposal
    value: float
    worst_cost: float


def decide(situation: Situation) -> Proposal | None:
    """Return the change to try now; None if none is worth it."""
    # A run that is about to run out of memory gets the cheapest change that saves some, whatever it costs in time.
    allowed = [each for each in situation.proposals if why_not(each, situation) is None]
    saving = [each for each in allowed if each.saves_memory]
    if situation.memory is not None and situation.memory.is_running_out and saving:
        return max(saving, key=lambda each: each.gain)
    left = situation.budget_seconds - situation.spent_seconds
    priced = [price(each, situation) for each in allowed if not each.saves_memory]
    paying = [each for each in priced if each.value > 0 and each.worst_cost <= left]
    best = max(paying, key=lambda each: each.value, default=None)
    return best.proposal if best else None


def advise(situation: Situation) -> Proposal | None:
    """Return the change to advise a person to make; None if none is predicted to gain enough, or was advised before."""
    # Unlike `decide` it does not explore: nobody measures what was only advised.
    waiting = [each for each in situation.decisions if each.outcome == "advised"]
    known = {kind_of(each.patch) for each in waiting}
    allowed = [
        each
        for each in situation.proposals
        if (each.saves_memory or each.gain >= MIN_ADVISED_GAIN)
        and kind_of(each.patch) not in known
        and why_not(each, situation) is None
    ]
    is_running_out = situation.memory is not None and situation.memory.is_running_out
    if len(waiting) >= MAX_ADVISED:
        return None
    chosen = [each for each in allowed if each.saves_memory == is_running_out]
    return max(chosen, key=lambda each: each.gain, default=None)


def price(proposal: Proposal, situation: Situation) -> PricedProposal:
    """Return what a trial of the proposal should bring, in seconds."""
    # The gain is taken as normally distributed. Only gains that a trial can show are kept, so only those count.
    proposal = replace(proposal, uncertainty=max(proposal.uncertainty, seen_error(proposal, situation.decisions)))
    before, seconds = situation.baseline, situation.baseline.step_seconds
    most = max_trial_steps(situation.steps_left)
    # More steps before the change can be measured first, at no cost.
    measured = replace(before, steps=max(before.steps, most))
    shown = max(MIN_GAIN, smallest_gain_to_show(measured, most, confidence=LOOK_CONFIDENCE))
    deviation = max(1e-6, proposal.uncertainty)
    kept_gain, kept_chance = _part_above(shown, proposal.gain, deviation)
    if_kept = max(proposal.gain, shown, kept_gain / max(kept_chance, 1e-6))
    needed = steps_to_show(if_kept, measured, confidence=LOOK_CONFIDENCE)
    window = max(MIN_WINDOW_STEPS, min(most, needed))
    pause = situation.pause_seconds.get(proposal.is_in_place, PAUSE_SECONDS[proposal.is_in_place])
    settle = WARM_UP_STEPS
    worse, _ = _part_above(0.0, -proposal.gain, deviation)  # of a step, while a change for the worse is tried
    noticed = steps_to_show(max(worse, shown), measured, confidence=LOOK_CONFIDENCE)  # then the trial is over
    loss = worse * (max(MIN_HARM_STEPS, min(window, noticed)) + settle) * seconds
    cost = pause * (2 - kept_chance) + loss + proposal.first_step_seconds
    rest = situation.steps_left - WINDOWS_OF_A_TRIAL * (window + settle)  # one that is too late cannot pay
    saved = kept_gain * seconds * max(0.0, rest)
    worst = 2 * pause + MAX_LOSS_FRACTION * (MIN_HARM_STEPS + settle) * seconds + proposal.first_step_seconds
    return PricedProposal(proposal=proposal, value=saved - cost, worst_cost=worst)


def baseline_steps_needed(proposal: Proposal, situation: Situation) -> int:
    """Return how many steps before the change a trial of it needs, as many as with it; at most a trial's maximum."""
    most, endless = max_trial_steps(situation.steps_left), replace(situation.baseline, steps=10**9)
    alone = steps_to_show(max(proposal.gain, 2 * MIN_GAIN), endless, confidence=LOOK_CONFIDENCE)
    return math.ceil(min(2 * alone, most))


def seen_error(proposal: Proposal, decisions: Sequence[Decision]) -> float:
    """Return by how much the gain of earlier changes of the same fields differed from the predicted one, at most."""
    # Where the cost model was wrong about a field, its other values may be better than it says, and are worth a trial.
    kind = kind_of(proposal.patch)
    if proposal.is_measured:
        return 0.0
    gains = [(each.expected, each.measured or {}) for each in decisions if kind_of(each.patch) == kind]
    known = [(then, now) for then, now in gains if "gain" in then and "gain" in now]
    return max((abs(now["gain"] - then["gain"]) for then, now in known), default=0.0)


def _part_above(least: float, mean: float, deviation: float) -> tuple[float, float]:
    """Return the expectation of a normal value of which only what is above `least` counts, and its probability."""
    scaled = (mean - least) / deviation
    chance = NORMAL.cdf(scaled)
    return max(0.0, mean * chance + deviation * NORMAL.pdf(scaled)), chance


def fits(proposal: Proposal, peak: float, limit: float) -> bool:
    """Return whether the changed plan fits into `limit` bytes, or needs no more memory than the present one."""
    return proposal.peak_ratio <= 1 or peak * proposal.peak_ratio <= MAX_MEMORY_FRACTION * limit


def why_not(proposal: Proposal, situation: Situation) -> str | None:
    """Return why a proposal must not be tried; None if it may be."""
    fields = [each for each in proposal.patch if situation.settings.get(each) != proposal.patch[each]]
    if not fields:
        return "nothing would change"
    if not all(map(is_changeable, proposal.patch)):
        return "a running run cannot change this"
    if any(is_pinned(each, situation.pins) for each in fields):
        return "a field is pinned"
    if changes_course(fields) and not situation.may_change_course:
        return "it would change the results of training"
    if situation.memory is not None and not fits(proposal, situation.memory.peak, situation.memory.limit):
        return "it would not fit"
    # Do the decisions so far forbid it?
    tries = [
        each
        for each in situation.decisions
        if each.outcome == "rolled-back"
        and each.step >= situation.shifted_at
        and _key(each.patch) == _key(proposal.patch)
    ]
    if len(tries) >= MAX_TRIES:  # under other plans or without an answer
        return "it did not help before"
    for index, old in enumerate(situation.decisions):
        is_same_plan = not any(each.outcome in ("kept", "undone") for each in situation.decisions[index + 1 :])
        if why := _why_not_after(old, proposal, situation, is_same_plan=is_same_plan):
            return why
    return None


def _why_not_after(old: Decision, proposal: Proposal, situation: Situation, *, is_same_plan: bool) -> str | None:
    """Return why one earlier decision forbids the proposal; `is_same_plan`: the plan has not changed since."""
    same, now = _key(old.patch) == _key(proposal.patch), situation.baseline.step_seconds
    further = is_same_plan and _goes_further(proposal, old, situation)
    if old.outcome in ("failed", "refused"):
        contains = all(proposal.patch.get(name, _MISSING) == value for name, value in old.patch.items())
        return "it failed before" if further or contains else None
    if old.outcome in ("rolled-back", "kept") and old.step < situation.shifted_at:
        return None
    if old.outcome == "rolled-back" and old.measured:
        # If steps were clearly shorter with it than they are without it now, the machine became slower during the
        # trial, and the change was blamed for it.
        if now > (1 + MIN_CHANGED_FRACTION) * old.measured.get("step_seconds", math.inf):
            return None
        further |= same and old.measured.get("gain", 0.0) < -MIN_CLEAR_LOSS
        return "it did not help before" if further or (same and is_same_plan) else None
    goes_back = any(old.undo.get(each, _MISSING) == value and old.patch.get(each) != value
                    for each, value in proposal.patch.items())  # fmt: skip
    if old.outcome == "kept" and not proposal.saves_memory and goes_back:
        kept = [each for each in situation.decisions if each.outcome == "kept"]
        num_returns = sum(
            any(
                name in proposal.patch and earlier.undo.get(name, _MISSING) == value
                for name, value in later.patch.items()
            )
            for index, later in enumerate(kept)
            for earlier in kept[:index]
        )
        may_return = num_returns < MAX_MEASURED_RETURNS if proposal.is_measured else not num_returns
        # If steps have become clearly longer since it was kept, its reasons may be gone.
        after = (old.measured or {}).get("step_seconds", 0.0)
        may_return &= proposal.is_measured or (bool(after) and now > (1 + MIN_DRIFT_TO_RETURN) * after)
        return None if may_return else "it would take back a change that was kept"
    forbidden = {"undone": "a person took it back", "advised": "it was advised before"}
    return forbidden.get(old.outcome) if same else None


def _goes_further(proposal: Proposal, old: Decision, situation: Situation) -> bool:
    """Return whether the proposal moves one number further in the direction in which a decision failed."""
    for name, value in old.patch.items():
        now, new = situation.settings.get(name), proposal.patch.get(name)
        are_numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (value, now, new))
        if name != "plan.grad_accum" and are_numbers and (now < value <= new or new <= value < now):
            return True
    return False


def _key(patch: Mapping[str, Any]) -> str:
    return repr(sorted(patch.items()))


def kind_of(patch: Iterable[str]) -> str:
    """Return the fields of a patch as one word for what it is about, such as `plan.recompute`."""
    return "+".join(sorted(each for each in patch if each != "plan.grad_accum"))


_MISSING = object()


class AutopilotPolicy(Protocol):
    """The contract of an autopilot policy, version 1."""

    contract: int

    def choose(self, situation: Situation) -> Proposal | None:
        """Return the change to make, one of `situation.proposals` or another; None to leave the run as it is."""


def choose_change(section: AutopilotSection, situation: Situation) -> Proposal | None:
    """Return the change that the recipe's policy wants to try, or to advise; None if it wants none, or may not."""
    acts = section.mode == "act"
    if section.policy in KINDS["autopilot policy"].reserved:
        return decide(situation) if acts else advise(situation)
    try:
        chosen = load_plugin("autopilot policy", section.policy).choose(situation)
    except UserError as error:
        log.warning("the autopilot does nothing: %s", error.what)
        return None
    except Exception as error:  # a plug-in may raise anything
        log.warning("the policy %s failed: %s: %s", section.policy, type(error).__name__, error)
        return None
    if chosen is None:
        return None
    undo = undo_of(chosen.patch, situation.settings) if isinstance(chosen, Proposal) else None
    if undo is None or (why := _refusal(chosen, situation, acts=acts)) is not None:
        reason = why if undo is not None else "it is no Proposal, or its patch names a field that a run does not have"
        log.warning("the change that the policy %s chose is not made: %s", section.policy, reason)
        return None
    return replace(chosen, undo=undo, reason=f"policy {section.policy}: {chosen.reason}")


def _refusal(chosen: Proposal, situation: Situation, *, acts: bool) -> str | None:
    """Return which limit of the recipe forbids the change: a pinned field, memory, the course, the budget."""
    if (why := why_not(chosen, situation)) is not None:
        return why
    left = situation.budget_seconds - situation.spent_seconds
    if acts and not chosen.saves_memory and price(chosen, situation).worst_cost > left:
        return "a trial of it would exceed the budget"
    if not acts and sum(each.outcome == "advised" for each in situation.decisions) >= MAX_ADVISED:
        return "enough advice waits for a person"
    return None
