"""The policy and the verdict against simulated runs, see `benchmarks/autopilot_policy.py`."""

import pytest
from benchmarks.autopilot_policy import BUDGET, random_scenario, simulate, summarise


def check(scenarios: range, *, reached: float) -> None:
    found = summarise([simulate(seed) for seed in scenarios])
    assert found.over_budget == 0, found
    assert found.mean_spent < BUDGET
    assert found.reached_wanted >= reached, found
    assert found.reached_wanted > found.started_wanted + 0.5
    assert found.most_returns <= 1
    assert found.kept_worse < 0.01


def test_simulated_runs_reach_their_best_point_within_the_budget_and_without_going_back_and_forth() -> None:
    check(range(16), reached=0.93)  # one scenario more or less is 6 %


@pytest.mark.slow
def test_ten_thousand_simulated_runs() -> None:
    check(range(10_000), reached=0.95)


def test_a_scenario_has_something_to_find_and_always_the_same() -> None:
    first, again = random_scenario(3), random_scenario(3)
    assert first == again
    assert first.best() <= first.time_of(first.start)
