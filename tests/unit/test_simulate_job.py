"""The simulated job: equal to a simulation step by step, and to Daly's formula; failures, spares and checkpoints."""

import math
from dataclasses import replace

import numpy as np
import pytest

from trimaran.cost import (
    LLAMA_DEVICES,
    LLAMA_FAILURES,
    FailureClass,
    Faults,
    Interruption,
    JobHistory,
    JobTerms,
    SaveTerms,
    SlowNodeTerms,
    StepTimes,
    best_interval,
    draw_interruptions,
    draw_slow_periods,
    expected_goodput,
    job_trace,
    simulate_job,
    spares_needed,
)

CRASH = FailureClass(name="crash", count=1, loses_node=False, detect_seconds=0.0)
HOUR = 3600.0


def crashing_job(mtbf: float, save: SaveTerms, restart: float = 0.0) -> JobTerms:
    """Return a job on one device in which nothing happens but crashes."""
    never = SlowNodeTerms(per_node_second=0.0)
    scale = 1 / (mtbf * CRASH.per_device_second)
    return JobTerms(num_devices=1, save=save, restart=restart, failures=(CRASH,), failure_scale=scale,
                    planned_per_second=0.0, slow=never)  # fmt: skip


def llama_job(spares: int = 0, num_devices: int = LLAMA_DEVICES) -> JobTerms:
    return JobTerms(num_devices=num_devices, spares=spares, save=SaveTerms(every=20, stall=1.0, write=50.0))


def step_by_step(terms: JobTerms, seconds: list[float], until: float, seed: int) -> tuple[int, float, int]:
    """Simulate crashes, slow nodes and checkpoints without any jump; return steps, seconds of new steps, and saves."""
    interruptions: list[Interruption] = draw_interruptions(terms, until, seed)
    periods = draw_slow_periods(terms, until, seed)
    now, taken, done, best, saves, new = 0.0, 0, 0, 0, 0, 0.0
    saved, writing, last_save = 0, (0.0, 0), 0
    waiting = [each for each in interruptions if each.cause]

    def duration(start: float, work: float) -> float:
        """Return how long `work` seconds take from `start` on, with the slow periods on the way."""
        at = start
        while work > 1e-12:
            slow = next((period for period in periods if period[0] <= at < period[1]), None)
            factor = terms.slow.factor if slow else 1.0
            edge = slow[1] if slow else min((period[0] for period in periods if period[0] > at), default=math.inf)
            part = min(work, (edge - at) / factor)
            at, work = at + part * factor, work - part
        return at - start

    while now < until:
        if waiting and waiting[0].time <= now:  # a crash during a restart starts it again
            now = waiting.pop(0).time + terms.restart
            continue
        end = now + duration(now, seconds[taken % len(seconds)])
        if waiting and waiting[0].time < end:
            crash = waiting.pop(0).time
            saved = writing[1] if writing[0] <= crash else saved
            done, last_save, writing, now = saved, saved, (0.0, saved), crash + terms.restart
            continue
        if end > until:
            break
        new += seconds[taken % len(seconds)] if done == best else 0.0
        now, taken, done = end, taken + 1, done + 1
        best = max(best, done)
        if done - last_save == terms.save.every:
            stopped = max(now, writing[0]) + terms.save.stall
            if waiting and waiting[0].time < stopped:
                last_save = done  # the crash above loses this checkpoint
                now = waiting[0].time
                saved = writing[1] if writing[0] <= now else saved
                done, last_save, writing = saved, saved, (0.0, saved)
                continue
            if stopped > until:
                break
            saved = writing[1] if writing[0] <= stopped else saved
            now, last_save, writing, saves = stopped, done, (stopped + terms.save.write, done), saves + 1
    return best, new, saves


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("write", "slow"), [(0.0, 0.0), (20.0, 0.0), (45.0, 0.0), (20.0, 1 / (2 * HOUR))])
def test_jumping_from_event_to_event_equals_step_by_step(seed: int, write: float, slow: float) -> None:
    seconds = np.random.default_rng(seed).uniform(3.0, 5.0, 37).tolist()
    save = SaveTerms(every=7, stall=2.0, write=write)
    terms = replace(
        crashing_job(900.0, save, restart=60.0), slow=SlowNodeTerms(per_node_second=8 * slow, seconds=300.0)
    )
    until = 40_000.0
    history = simulate_job(terms, StepTimes(seconds), until, seed=seed)
    steps, new, saves = step_by_step(terms, seconds, until, seed)
    assert (history.steps, history.num_saves) == (steps, saves)
    assert history.by_activity["train"] == pytest.approx(new, abs=max(seconds))  # the last step is not complete
    assert sum(history.by_activity.values()) == pytest.approx(until)


def test_step_times_are_taken_in_turn() -> None:
    times = StepTimes([1.0, 2.0, 4.0])
    assert [times.until(number) for number in range(5)] == [0.0, 1.0, 3.0, 7.0, 8.0]
    assert [times.that_fit(1, seconds) for seconds in (1.9, 2.0, 6.0, 7.0, 13.9, 14.0)] == [0, 1, 2, 3, 5, 6]
    assert times.least(2) == 3.0
    assert times.least(4) == 8.0


@pytest.mark.parametrize("interval", [600, 1150, 3000])
def test_the_goodput_is_dalys_expected_time(interval: int) -> None:
    # J. Daly, 2006, equation 20: exponential failures, also during restarts, and synchronous checkpoints.
    mtbf, write, restart = 3 * HOUR, 60.0, 600.0
    terms = crashing_job(mtbf, SaveTerms(every=interval, stall=write), restart)
    history = simulate_job(terms, StepTimes([1.0]), 10_000 * mtbf)
    exact = interval / (mtbf * math.exp(restart / mtbf) * math.expm1((interval + write) / mtbf))
    assert history.goodput == pytest.approx(exact, rel=0.01)


def test_dalys_interval_is_the_best_and_the_closed_form_of_plan_agrees() -> None:
    mtbf, write, restart = 3 * HOUR, 60.0, 600.0
    best = best_interval(write, mtbf, restart=restart)  # type: ignore[arg-type]
    goodputs = {}
    for factor in (0.4, 1.0, 2.5):
        terms = crashing_job(mtbf, SaveTerms(every=round(factor * best), stall=write), restart)
        goodputs[factor] = simulate_job(terms, StepTimes([1.0]), 3000 * mtbf).goodput
    assert max(goodputs, key=lambda factor: goodputs[factor]) == 1.0
    faults = Faults(device_hours=3.0, restart=restart)  # type: ignore[arg-type]
    closed = expected_goodput(faults, 1, write=write, step=1.0).fraction  # type: ignore[arg-type]
    assert goodputs[1.0] == pytest.approx(closed, rel=0.01)


def test_the_published_counts_are_the_default_rates() -> None:
    assert sum(each.count for each in LLAMA_FAILURES) == 419
    terms = llama_job(spares=30)
    assert terms.mtbf == pytest.approx(54 * 24 * HOUR / 419)
    history = simulate_job(terms, StepTimes([6.0]), 54 * 24 * HOUR, seed=7)
    assert sum(history.by_cause.values()) == pytest.approx(419, rel=0.15)
    assert max(history.by_cause, key=lambda name: history.by_cause[name]) == "faulty GPU"


def test_spares_end_the_waiting_for_repairs() -> None:
    needed = spares_needed(llama_job())
    assert 10 < needed < 30  # 7 nodes are in repair on average

    def run(spares: int) -> JobHistory:
        return simulate_job(llama_job(spares), StepTimes([6.0]), 20 * 24 * HOUR, seed=3)

    none, half, enough = run(0), run(needed // 2), run(needed)
    assert none.goodput < half.goodput < enough.goodput
    assert none.by_activity["wait for a node"] > 0.5 * none.seconds
    assert enough.by_activity["wait for a node"] < 0.01 * enough.seconds
    assert none.by_cause == half.by_cause == enough.by_cause  # the same failures


def test_a_checkpoint_that_is_not_complete_is_not_restored() -> None:
    quick, slow = (
        simulate_job(crashing_job(2 * HOUR, SaveTerms(every=100, stall=0.0, write=write)), StepTimes([1.0]),
                     500 * HOUR, seed=1)
        for write in (0.0, 90.0)
    )  # fmt: skip
    lost = [each.by_activity["replay"] / sum(each.by_cause.values()) for each in (quick, slow)]
    assert lost[0] == pytest.approx(50, rel=0.1)  # half of an interval
    assert lost[1] == pytest.approx(50 + 90, rel=0.1)  # and the time until it could be restored


def test_the_same_seed_gives_the_same_history_and_another_seed_another() -> None:
    terms = llama_job(8, num_devices=4096)
    first, again, other = (simulate_job(terms, StepTimes([6.0]), 20 * 24 * HOUR, seed=seed) for seed in (1, 1, 2))
    assert first.segments == again.segments
    assert first.goodput != other.goodput


def test_the_timeline_shows_every_outage_without_gaps() -> None:
    history = simulate_job(llama_job(8), StepTimes([6.0]), 5 * 24 * HOUR, seed=2)
    spans = [event for event in job_trace(history)["traceEvents"] if event["ph"] == "X"]
    ends = [event["ts"] + event["dur"] for event in spans]
    assert spans[0]["ts"] == 0
    assert ends[-1] == pytest.approx(5 * 24 * HOUR * 1e6)
    assert [event["ts"] for event in spans[1:]] == pytest.approx(ends[:-1])
    assert {"train", "detect", "restart"} <= {event["name"] for event in spans}


def test_a_planned_interruption_loses_no_complete_step() -> None:
    quiet = replace(llama_job(), failure_scale=0.0, slow=SlowNodeTerms(per_node_second=0.0))
    history = simulate_job(quiet, StepTimes([6.0]), 54 * 24 * HOUR, seed=1)
    stops = sum(each.cause == "planned" and each.activity == "restart" for each in history.segments)
    assert 30 < stops < 65
    assert history.by_activity["replay"] < 6.0 * stops  # the step that was under way
    assert history.by_activity["save"] > stops * 51.0
