"""The usual targets of a run: met, missed, or not measured."""

from typing import Any

import pytest

from trimaran.core import Mesh, Plan, Recipe
from trimaran.doctor import Evidence, TargetCheck, check_targets


def checks(*, ranks: int = 2, **known: Any) -> dict[str, TargetCheck]:
    recipe = Recipe.model_validate({"telemetry": {"targets": known.pop("limits", {})}})
    plan = Plan(mesh=Mesh(dp_replicate=ranks))
    return {each.name: each for each in check_targets(Evidence(recipe=recipe, plan=plan, **known))}


def steps(*, comm: float = 0.0, pause_after: int = 0, pause: float = 0.0) -> tuple[dict[str, Any], ...]:
    """Thirty steps of one second, of which `comm` is exposed communication; a pause follows one of them."""
    phases = {"forward": 0.4 - comm / 2, "backward": 0.6 - comm / 2, "comm": comm}
    return tuple(
        {"step": at, "time": 100.0 + at + (pause if at > pause_after > 0 else 0.0), "step_seconds": 1.0,
         "phases": phases, "loss": 3.0}
        for at in range(1, 31)
    )  # fmt: skip


@pytest.mark.parametrize(("comm", "met"), [(0.1, True), (0.35, False)])
def test_exposed_communication_and_scaling(comm: float, met: bool) -> None:
    found = checks(steps=steps(comm=comm))
    assert found["exposed communication"].measured == pytest.approx(comm)
    assert found["exposed communication"].is_met is met
    assert found["scaling efficiency"].measured == pytest.approx(1 - comm)
    assert found["scaling efficiency"].is_met is met


def test_limits_are_settable() -> None:
    found = checks(steps=steps(comm=0.35), limits={"exposed_comm": 0.4, "scaling": 0.6})
    assert found["exposed communication"].is_met
    assert found["scaling efficiency"].is_met
    assert str(found["scaling efficiency"]) == "scaling efficiency: 65% (at least 60%)"


def test_one_rank_has_nothing_to_communicate() -> None:
    found = checks(ranks=1, steps=steps())
    assert found["exposed communication"].is_met is None
    assert "there is one rank" in str(found["scaling efficiency"])


@pytest.mark.parametrize(("busy", "met"), [(0.93, True), (0.5, False)])
def test_gpus_are_busy_while_steps_are_trained(busy: float, met: bool) -> None:
    start = [{"time": 50.0, "gpus": [{"index": 0, "utilisation": 0.0}]}]  # before the first step: does not count
    samples = [{"time": 100.0 + at, "gpus": [{"index": 0, "utilisation": busy}]} for at in range(2, 30, 5)]
    found = checks(steps=steps(), samples=tuple(start + samples))["GPU busy"]
    assert (found.measured, found.is_met) == (pytest.approx(busy), met)
    assert checks(steps=steps())["GPU busy"].is_met is None


@pytest.mark.parametrize(("pause", "met"), [(40.0, True), (900.0, False)])
def test_a_recovery_lasts_until_the_next_step(pause: float, met: bool) -> None:
    incident = {"id": "i-0001", "cause": "crash", "time": 110.5, "action": "restarted"}
    found = checks(steps=steps(pause_after=10, pause=pause), incidents=(incident,))["longest recovery"]
    assert found.measured == pytest.approx(pause + 0.5)
    assert found.is_met is met
    assert checks(steps=steps())["longest recovery"].is_met is None
