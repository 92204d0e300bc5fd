"""Steps that suddenly become longer or shorter: a link degrades and recovers, and the autopilot follows."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from tests.unit.test_autopilot_loop import ToyRun
from trimaran.autopilot import MAX_SHIFTS, Baseline, Proposal, TimedStep, find_shift, undo_of

PIPELINE = {"plan.mesh.pp": 2, "plan.mesh.dp_replicate": 1}


def steps(*seconds: float, noise: float = 0.0, first: int = 1) -> list[TimedStep]:
    rng = random.Random(1)
    took = [each * rng.gauss(1, noise) for each in seconds]
    return [TimedStep(first + index, each, each) for index, each in enumerate(took)]


@pytest.mark.parametrize("after", [4.0, 0.3])
def test_a_shift_is_found_at_its_first_step(after: float) -> None:
    found = find_shift(steps(*[1.0] * 40, *[after] * 10, noise=0.05))
    assert found is not None
    assert found.step == 41
    assert found.before == pytest.approx(1.0, rel=0.05)
    assert found.after == pytest.approx(after, rel=0.05)
    assert found.is_slower == (after > 1)


@pytest.mark.parametrize(
    "seconds",
    [
        [1.0] * 60,
        [*[1.0] * 40, *[4.0] * 5],  # too few
        [*[1.0] * 40, *[4.0] * 4, *[1.0] * 4],  # over already
        [*[1.0] * 40, *[1.1] * 20],  # too small
        [*[1.0] * 10, *[4.0] * 8],  # too few before it
        [1.0, 2.5] * 30 + [2.0] * 8,  # within the noise
    ],
    ids=["none", "short", "over", "small", "start", "noise"],
)
def test_what_is_no_shift(seconds: Sequence[float]) -> None:
    assert find_shift(steps(*seconds)) is None


def test_after_a_trial_a_few_steps_are_compared_with_what_it_measured() -> None:
    known = Baseline(step_seconds=1.0, spread=0.05, steps=30)
    found = find_shift(steps(*[4.0] * 9, first=70), known)
    assert found is not None
    assert (found.step, found.before, found.after) == (70, 1.0, pytest.approx(4.0))
    assert find_shift(steps(*[1.05] * 9), known) is None


class LinkedRun(ToyRun):
    """Replicas need the link more than a pipeline does, which computes for longer. `link`: times slower."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.plan |= {"plan.mesh.pp": 1, "plan.mesh.dp_replicate": 2}
        self.link, self.in_place = 1.0, False

    def propose(self) -> Sequence[Proposal]:
        """Return what a cost model says that knows the measured link."""
        other = PIPELINE if self.plan["plan.mesh.pp"] == 1 else {"plan.mesh.pp": 1, "plan.mesh.dp_replicate": 2}
        now, then = self._seconds(self.plan["plan.mesh.pp"]), self._seconds(other["plan.mesh.pp"])
        known: dict[str, Any] = {"gain": 1 - then / now, "uncertainty": 0.2, "reason": "a layout"}
        return [Proposal(patch=other, undo=undo_of(other, self.plan) or {}, **known)]

    def _seconds(self, stages: int) -> float:
        return 1.3 + 0.02 * self.link if stages == 2 else 1.0 + 0.2 * self.link

    def seconds(self) -> float:
        return self._seconds(self.plan["plan.mesh.pp"]) * self.rng.gauss(1, 0.03)

    def train(self, count: int = 1, *, answer: bool = True) -> None:
        for _ in range(count):
            super().train(answer=answer)
            self.loop.find_shift()

    def num_kept(self) -> int:
        return sum(each.outcome == "kept" for each in self.loop.decisions.values())

    def train_until_kept(self, count: int, most: int = 400) -> None:
        for _ in range(most):
            if self.num_kept() == count:
                return
            self.train()
        raise AssertionError(self.loop.decisions)


def test_a_link_that_degrades_and_recovers_is_followed_once_each_way() -> None:
    run = LinkedRun()
    run.train(200)
    assert run.num_kept() == 0
    run.link = 20.0
    run.train_until_kept(1)
    assert run.plan["plan.mesh.pp"] == 2
    (there,) = [each for each in run.loop.decisions.values() if each.outcome == "kept"]
    assert there.reason.startswith("steps take 4.")
    assert there.baseline["usual_seconds"] == pytest.approx(1.2, rel=0.05)
    run.train(400)
    assert run.num_kept() == 1, "it stays while the link is slow"
    run.link = 1.0
    run.train_until_kept(2)
    assert run.plan["plan.mesh.pp"] == 1
    back = [*run.loop.decisions.values()][-1]
    assert back.patch == there.undo
    assert f"before decision {there.id}" in back.reason
    tried = len(run.loop.decisions)
    run.train(1000)
    assert (run.num_kept(), len(run.loop.decisions)) == (2, tried), "nothing goes back and forth"
    run.link = 20.0  # a second time
    run.train_until_kept(3)
    assert run.plan["plan.mesh.pp"] == 2


def test_a_link_that_degrades_during_a_trial_is_noticed_after_it() -> None:
    run = LinkedRun()
    while run.loop.trial is None or run.plan["plan.mesh.pp"] == 1:
        run.train()
        assert run.step < 200
    run.link = 20.0  # and the pipeline is blamed for it
    run.train_until_kept(1)
    assert run.plan["plan.mesh.pp"] == 2


def test_a_link_that_flaps_is_left_alone_in_the_end() -> None:
    run = LinkedRun(steps=6000)
    for _ in range(40):
        run.train(100)
        run.link = 21.0 - run.link
    assert run.num_kept() <= MAX_SHIFTS
    assert run.loop.spent_seconds < run.loop.section.budget * run.steps * 1.2
