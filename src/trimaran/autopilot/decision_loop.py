"""Decides, tries and judges one change after the other. It does no I/O: the controller and the simulator drive it."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from trimaran.autopilot.policy import (
    CHECKPOINT_FIELDS,
    MemoryTrend,
    Patch,
    Proposal,
    Situation,
    baseline_steps_needed,
    choose_change,
    describe,
)
from trimaran.autopilot.trial import (
    MAX_BASELINE_STEPS,
    AppliedChange,
    StepShift,
    TimedStep,
    TrialRecord,
    find_shift,
    max_trial_steps,
    next_move,
)
from trimaran.autopilot.verdict import Baseline, baseline_of, compare
from trimaran.core import AutopilotSection, Decision, DecisionOutcome
from trimaran.runs import WARM_UP_STEPS, SteadyMarks

MIN_BASELINE_STEPS = 24  # under the present plan, before anything is decided
MAX_KEPT_STEPS = 1200
FIRST_RECHECK_STEPS, MAX_RECHECK_STEPS = 100, 1600  # from one look without a decision to the next; doubled each time
MAX_SHIFTS = 6  # sudden changes of the speed in a run after which it starts anew: a speed that flaps is left alone
MIN_RECOVERY = 0.15  # of a step that is saved since a change was kept, to look at the plan before it again
USUAL_SECONDS = "usual_seconds"  # of a decision's baseline: a step before it suddenly became longer


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeAnswer:
    """The ranks' answer to a change request: a `change` event. `step` is the last step before the change."""

    id: int
    step: int
    status: Literal["applied", "refused", "failed"]
    patch: Patch
    by: Literal["autopilot", "user"] = "autopilot"
    in_place: bool = False
    pause_seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingRequest:
    """A request that the ranks have not answered. With `outcome`, the trial ends with it."""

    id: int
    patch: Patch
    reason: str
    outcome: DecisionOutcome | None = None


@dataclass(slots=True, kw_only=True)
class Output:
    """What is to be written: states of decisions, in order, and at most one new request."""

    decisions: list[Decision] = field(default_factory=list)
    request: PendingRequest | None = None


@dataclass(slots=True, kw_only=True)
class RunSettings:
    """What the loop must know about a run when it decides. `settings` are the present values of changeable fields."""

    total_steps: int
    settings: Mapping[str, Any]
    memory_limit: float | None = None


class DecisionLoop:
    """One change at a time: a decision, its trial, its verdict.

    Feed it every step and every answer of the ranks, in the order in which they are read, then call `poll`. Steps are
    assigned to plans by their numbers, so a line that is read late does no harm.
    """

    def __init__(self, section: AutopilotSection, decisions: Iterable[Decision] = ()) -> None:
        self.section = section
        self.decisions = {each.id: each for each in decisions}
        self.pins: list[str] = list(section.keep)
        self.pending: PendingRequest | None = None
        self.last_request = max((each.request for each in self.decisions.values()), default=0)
        self._samples: list[TimedStep] = []
        self.marks = SteadyMarks()  # tell them the events, except changes
        self._changes: list[AppliedChange] = []  # of the trial
        self._since = 0  # the first step that counts for the present plan's baseline
        self._pauses: dict[bool, list[float]] = {True: [], False: []}
        self.due, self._recheck = 0, FIRST_RECHECK_STEPS
        self._output = Output()
        self.shift: StepShift | None = None  # the last sudden change of the speed
        self._num_shifts = 0
        self._known: Baseline | None = None  # a step under the present plan, as the last trial measured it

    @property
    def trial(self) -> Decision | None:
        return next((each for each in self.decisions.values() if each.outcome == "trying"), None)

    @property
    def step(self) -> int:
        return self._samples[-1].step if self._samples else 0

    @property
    def spent_seconds(self) -> float:
        return sum(each.trial_seconds for each in self.decisions.values())

    # What happened

    def add_step(self, sample: TimedStep) -> None:
        """Add a finished step. A step that was trained again replaces the earlier one and all after it."""
        while self._samples and self._samples[-1].step >= sample.step:
            self._samples.pop()
        self._samples.append(sample)
        del self._samples[:-MAX_KEPT_STEPS]

    def find_shift(self) -> StepShift | None:
        """Return a sudden change of the speed under the present plan, once; then measure and decide anew from there."""
        # Nothing is looked for during a trial: its verdict compares the steps anyway.
        if self.trial is not None or self._num_shifts >= MAX_SHIFTS:
            return None
        shift = find_shift(self.baseline_steps(), self._known)
        if shift is not None:
            self.shift, self._since, self.due, self._known = shift, shift.step, 0, None
            self._num_shifts, self._recheck = self._num_shifts + 1, FIRST_RECHECK_STEPS
        return shift

    def restarted(self, step: int) -> None:
        """The ranks start again after `step`. A change that was being tried may be the cause: it is taken back."""
        self.marks.leave_out_after(step)
        trial = self.trial
        if trial is not None and self._changes and self._changes[-1].is_after and self.pending is None:
            self._request(trial, trial.undo, "failed", "take back: the ranks were started again during its trial")

    def add_answer(self, answer: ChangeAnswer) -> None:
        """Add an answer of the ranks to a request, of the autopilot or of a user."""
        # A person's change wins: it ends the trial as it stands, and its fields stay as the person set them.
        self.last_request = max(self.last_request, answer.id)
        trial, pending = self.trial, self.pending
        if answer.by == "user":
            if answer.status == "applied":
                self.pins += [each for each in answer.patch if each not in self.pins]
                for each in reversed(self.decisions.values()):
                    restored = each.undo and all(answer.patch.get(name) == value for name, value in each.undo.items())
                    if each.outcome == "kept" and restored and answer.step >= each.step:
                        self._write(replace(each, outcome="undone", by="user"))
                        break
                if trial is not None and answer.step >= trial.step:
                    is_after = bool(self._changes) and self._changes[-1].is_after
                    why = f"{trial.reason}; not measured to the end: a person changed the run"
                    self._write(
                        replace(trial, outcome="kept" if is_after else "rolled-back", reason=why, measured=None)
                    )
                    self.pending = None
                if self.trial is None:
                    self._forget_trial(answer.step)
        elif trial is None or answer.step < trial.step or answer.patch not in (trial.patch, trial.undo):
            if answer.status == "applied":  # of an earlier trial, read again after a restart of the controller
                self._since = max(self._since, answer.step + WARM_UP_STEPS + 1)
        else:
            self.pending = None
            pause, in_place = answer.pause_seconds, answer.in_place
            if answer.status == "applied":
                is_after = answer.patch == trial.patch
                self._pauses[in_place].append(pause)
                change = AppliedChange(step=answer.step, is_after=is_after, pause_seconds=pause, in_place=in_place)
                self._changes.append(change)
                ends_with = pending.outcome if pending else "rolled-back" if trial.measured else None
                if not is_after and ends_with:
                    self._end(trial, ends_with)
            elif self._changes:
                # If the old plan cannot be restored, what was tried goes on, and is measured no further.
                self._end(trial, "kept" if self._changes[-1].is_after else "rolled-back")
            else:  # the ranks are back on the plan that they had
                if answer.status == "failed":
                    self._pauses[in_place].append(pause)
                why = f"{trial.reason}; {answer.status}: {answer.error}" if answer.error else trial.reason
                measured = {"pause_seconds": pause} if pause else None
                outcome: DecisionOutcome = "refused" if answer.status == "refused" else "failed"
                self._write(replace(trial, outcome=outcome, reason=why, measured=measured))
                self._forget_trial(answer.step)

    def resume_trial(self, pending: PendingRequest | None) -> None:
        """Go on with the trial that an earlier controller left; `pending` is its request if it is not answered yet."""
        trial = self.trial
        if trial is None:
            return
        if pending is not None:
            outcome: DecisionOutcome | None = "rolled-back" if pending.patch == trial.undo else None
            self.pending = replace(pending, outcome=outcome)
        elif not self._changes or trial.measured is not None:
            self.abandon_request("the autopilot was started again before the ranks had answered")

    def abandon_request(self, why: str) -> None:
        """The ranks will not answer the request: it was replaced or lost. The trial ends as it stands."""
        trial, self.pending = self.trial, None
        if trial is None:
            return
        if self._changes and self._changes[-1].is_after:
            self._request(trial, trial.undo, "rolled-back", f"take back: {why}")
            return
        self._write(replace(trial, outcome="rolled-back", reason=f"{trial.reason}; {why}"))
        self._forget_trial(self.step)

    # What to do

    def poll(self, facts: RunSettings, *, now: float, propose: Callable[[], Sequence[Proposal]]) -> Output:
        """Return what is to be written now. `propose` is called only if a decision is due, because it is expensive."""
        if self.trial is not None:
            if self.pending is None:
                trial = self.trial
                record = self._record(trial, facts)
                move = next_move(record) if record.before or not self._changes else "roll back"
                if move == "apply" and not self._changes and facts.total_steps - self.step < 2 * WARM_UP_STEPS:
                    self._write(replace(trial, outcome="rolled-back", reason=f"{trial.reason}; the run ends too soon"))
                    self._forget_trial(self.step)
                elif move == "apply":
                    self._request(trial, trial.patch, None, f"measure again: {trial.reason}")
                elif move == "undo":
                    self._request(trial, trial.undo, None, f"measure the steps before again: {trial.reason}")
                elif move == "keep":
                    self._end(trial, "kept")
                elif move == "roll back":
                    comparison, why = compare(record.windows) if record.before else None, "it cost too much"
                    if comparison is not None:
                        why = f"{comparison.gain:.1%} shorter steps are not shown to be more than noise"
                        if comparison.gain < 0:
                            why = f"steps are {-comparison.gain:.1%} longer with it"
                    self._request(trial, trial.undo, "rolled-back", f"take back: {why}")
        elif self.section.mode != "off" and self.is_due():
            self._decide(facts, now, propose)
        return self.take_output()

    def take_output(self) -> Output:
        """Return what is to be written now, without deciding anything new."""
        output, self._output = self._output, Output()
        return output

    def take_back_trial(self, why: str) -> None:
        """End the trial now, for example because the autopilot was switched off."""
        trial = self.trial
        if trial is not None and self.pending is None:
            if self._changes and self._changes[-1].is_after:
                self._request(trial, trial.undo, "rolled-back", f"take back: {why}")
            else:
                self._end(trial, "rolled-back")

    def is_due(self) -> bool:
        """Whether the next `poll` may decide something."""
        has_steps = len(self._samples) >= MIN_BASELINE_STEPS and self.step >= self._since + MIN_BASELINE_STEPS - 1
        return self.trial is None and self.step >= self.due and has_steps

    def _decide(self, facts: RunSettings, now: float, propose: Callable[[], Sequence[Proposal]]) -> None:
        steps = self.baseline_steps()
        if len(steps) < MIN_BASELINE_STEPS:
            return
        baseline = baseline_of(tuple(each.seconds for each in steps))
        half, memory = len(steps) // 2, None
        if facts.memory_limit and steps:
            parts = (steps[:half], steps[half:])
            earlier, later = (max((each.peak_bytes for each in part), default=0.0) for part in parts)
            growth = max(0.0, later - earlier) / max(1, half)
            memory = MemoryTrend(peak=max(earlier, later), growth=growth, limit=facts.memory_limit)
        situation = Situation(
            step=self.step,
            steps_left=facts.total_steps - self.step,
            baseline=baseline,
            settings=facts.settings,
            proposals=[*self._returns(baseline, facts.settings)] or propose(),
            budget_seconds=self.section.budget * facts.total_steps * baseline.step_seconds,
            decisions=list(self.decisions.values()),
            pins=self.pins,
            may_change_course=self.section.may_change_course,
            memory=memory,
            pause_seconds={kind: sum(pauses) / len(pauses) for kind, pauses in self._pauses.items() if pauses},
            shifted_at=self.shift.step if self.shift else 0,
        )
        acts = self.section.mode == "act"
        chosen = choose_change(self.section, situation)
        if chosen is None:
            self.due, self._recheck = self.step + self._recheck, min(2 * self._recheck, MAX_RECHECK_STEPS)
            if any(each.outcome == "kept" and USUAL_SECONDS in each.baseline for each in self.decisions.values()):
                self.due = min(self.due, self.step + MIN_BASELINE_STEPS)  # what made it pay may be over at any time
            return
        if acts and not chosen.saves_memory and (more := baseline_steps_needed(chosen, situation) - len(steps)) > 0:
            self.due = self.step + more
            return
        shift = self.shift if self.shift and self.shift.step >= self._since else None
        expected_seconds = baseline.step_seconds * (1 - chosen.gain)
        expected = {"gain": chosen.gain, "uncertainty": chosen.uncertainty, "step_seconds": expected_seconds}
        if chosen.saves_memory and memory:
            expected["peak_bytes"] = memory.peak * chosen.peak_ratio
        measured = {"step_seconds": baseline.step_seconds, "spread": baseline.spread, "steps": baseline.steps}
        usual = {USUAL_SECONDS: shift.before} if shift is not None and shift.is_slower else {}
        decision = Decision(
            id=max(self.decisions, default=0) + 1,
            time=now,
            step=self.step,
            finding=chosen.finding,
            reason=f"{shift}; {chosen.reason}" if shift else chosen.reason,
            patch=chosen.patch,
            undo=chosen.undo,
            expected=expected,
            baseline={**measured, **chosen.facts, **usual},
            outcome="trying" if acts else "advised",
        )
        if acts:
            self._changes, self._recheck = [], FIRST_RECHECK_STEPS
            self._request(decision, decision.patch, None, decision.reason)
        else:
            self._write(decision)

    def _returns(self, baseline: Baseline, settings: Mapping[str, Any]) -> Iterable[Proposal]:
        """Yield the patch that restores the plan before the steps became longer, if they are clearly shorter again."""
        # What a step took then is known: no cost model is needed.
        for old in self.decisions.values():
            usual, after = old.baseline.get(USUAL_SECONDS, 0.0), (old.measured or {}).get("step_seconds", 0.0)
            is_present = all(settings.get(name) == value for name, value in old.patch.items())
            now = baseline.step_seconds
            if old.outcome == "kept" and usual and is_present and usual < now < (1 - MIN_RECOVERY) * after:
                gain = 1 - usual / now
                yield Proposal(
                    patch=old.undo,
                    undo=old.patch,
                    gain=gain,
                    uncertainty=gain / 2,
                    is_measured=True,
                    reason=f"{describe(old.undo, old.patch)}: a step took {usual:.3g} s before decision {old.id}",
                )

    def _record(self, trial: Decision, facts: RunSettings | None = None) -> TrialRecord:
        steps = facts.total_steps if facts else self.step
        left = self.section.budget * steps * trial.baseline.get("step_seconds", 0.0) - self.spent_seconds
        counts_checkpoints = any(each in CHECKPOINT_FIELDS for each in trial.patch)
        present = [each for each in self._samples if each.step >= self._since]
        warm = [each for each in present if self.marks.is_warm(each.step)]
        samples = warm if counts_checkpoints else self.marks.steady(warm, TimedStep.place)
        compared = {each.step for each in samples}
        return TrialRecord(
            samples=samples,
            left_out=[each for each in present if each.step not in compared],
            changes=self._changes,
            expected_gain=trial.expected.get("gain", 0.0),
            max_steps=max_trial_steps(steps - trial.step),
            allowance=max(0.0, left) / 2 if facts else math.inf,  # going back costs as much again
            saves_memory="peak_bytes" in trial.expected,
            counts_checkpoints=counts_checkpoints,
        )

    def _end(self, trial: Decision, outcome: DecisionOutcome) -> None:
        known, record = None, self._record(trial)
        if record.before and self._changes:  # a step under the plan that the run goes on with, as it was measured
            after = [each for window in record.windows if window.is_after for each in window.seconds]
            known = (baseline_of(tuple(after)) if after else None) if outcome == "kept" else record.baseline
        self._write(replace(self.decisions[trial.id], outcome=outcome, measured=self._measured(trial)))
        self._forget_trial(self._changes[-1].step if self._changes else self.step)
        self._known = known

    def _measured(self, trial: Decision) -> dict[str, float] | None:
        record = self._record(trial)
        if not record.before or not self._changes:
            return trial.measured
        comparison = compare(record.windows)
        if comparison is None:
            return {"pause_seconds": record.lost_seconds}
        return {
            "step_seconds": comparison.step_seconds,
            "gain": comparison.gain,
            "confidence": comparison.confidence,
            "steps": comparison.steps,
            "pause_seconds": record.pause_seconds,
        }

    def _forget_trial(self, last_change: int) -> None:
        """Measure the present plan from now on: from the last change, without the first steps after it."""
        self._since, self._changes = max(self._since, last_change + WARM_UP_STEPS + 1), []
        self.due, self._known = 0, None

    def _request(self, trial: Decision, patch: Patch, outcome: DecisionOutcome | None, reason: str) -> None:
        self.last_request += 1
        self.pending = PendingRequest(id=self.last_request, patch=patch, reason=reason, outcome=outcome)
        self._output.request = self.pending
        measured = self._measured(trial) or {} if outcome is not None else None  # how a restarted controller knows
        self._write(replace(trial, request=self.last_request, measured=measured))

    def _write(self, decision: Decision) -> None:
        self.decisions[decision.id] = decision
        self._output.decisions.append(decision)

    def baseline_steps(self) -> list[TimedStep]:
        """Return the latest steady steps under the present plan."""
        warm = [each for each in self._samples if each.step >= self._since and self.marks.is_warm(each.step)]
        return self.marks.steady(warm[-MAX_BASELINE_STEPS:], TimedStep.place)
