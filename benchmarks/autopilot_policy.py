"""The autopilot's policy against simulated runs: `python -m benchmarks.autopilot_policy [--scenarios 10000]`.

Each scenario is a random surface of step times over some fields, with noise (autocorrelated, with outliers), drift, a
sudden change of the machine's speed, predictions that lie, predictions of memory that lie, and changes that are refused
or fail. The real decision loop (policy, trial, verdict) runs on it in virtual time, without waiting.

Three questions: does a run ever lose more than the budget? How close does it get to the best point that it can reach?
Does it ever change a field back and forth? The best point is the fastest of all that a sequence of changes of single
fields reaches, where each change makes steps shorter, fits, and is not one that the ranks refuse.
"""

import argparse
import math
import random
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from trimaran.autopilot.decision_loop import ChangeAnswer, DecisionLoop, PendingRequest, RunSettings
from trimaran.autopilot.policy import Proposal
from trimaran.autopilot.trial import TimedStep
from trimaran.core import AutopilotSection

BUDGET = 0.03
WANTED_FRACTION = 0.97  # of the best reachable throughput
SAMPLED_STEPS = 60  # before the policy looks again; the steps of a run at rest before that are skipped
Point = tuple[int, ...]  # an index into the values of each knob


@dataclass(frozen=True)
class Knob:
    """A field, its values, and what each does to the logarithm of step time and of memory."""

    name: str
    values: Sequence[Any]
    time: Sequence[float]
    memory: Sequence[float]
    in_place: bool


KNOBS: dict[str, tuple[Sequence[Any], bool]] = {
    "plan.micro_batch": ((1, 2, 4, 8, 16), True),
    "plan.recompute": (("full", "selective", "elementwise", "none"), True),
    "plan.comm.bucket_mb": ((1, 5, 25, 100), True),
    "data.workers": ((0, 1, 2, 4, 8), True),
    "plan.sharding": (("parameters", "gradients", "optimizer", "none"), False),
    "plan.compile": ((False, True), False),
    "plan.offload": (("optimizer", "none"), False),
}


@dataclass
class Scenario:
    """One random run. `time_of` and `memory_of` are the truth; `predicted` is what the cost model says."""

    seed: int
    knobs: list[Knob]
    interactions: dict[tuple[int, int, int, int], float]
    start: Point
    memory_limit: float
    steps: int
    step_seconds: float
    spread: float
    correlation: float
    outliers: float
    drift: float  # of the logarithm of step time, over the whole run
    shift: tuple[int, float]  # from this step on, everything takes this much longer (logarithm)
    lie: float  # factor by which a predicted gain may be off
    pauses: dict[bool, float]
    refused: set[tuple[int, int]] = field(default_factory=set)
    failing: set[tuple[int, int]] = field(default_factory=set)
    times: dict[Point, float] = field(default_factory=dict)

    def time_of(self, point: Point) -> float:
        """Return the logarithm of the step time at a point, relative to nothing in particular."""
        if point not in self.times:
            total = sum(knob.time[index] for knob, index in zip(self.knobs, point, strict=True))
            cells = self.interactions.items()
            self.times[point] = total + sum(size for (a, i, b, j), size in cells if point[a] == i and point[b] == j)
        return self.times[point]

    def memory_of(self, point: Point) -> float:
        return math.exp(sum(knob.memory[index] for knob, index in zip(self.knobs, point, strict=True)))

    def neighbours(self, point: Point) -> Iterator[tuple[int, int, Point]]:
        """Yield (knob, index, point) for every change of a single field."""
        for number, knob in enumerate(self.knobs):
            for index in range(len(knob.values)):
                if index != point[number]:
                    yield number, index, (*point[:number], index, *point[number + 1 :])

    def best(self) -> float:
        """Return the least logarithm of step time that changes of single fields reach, each for the better."""
        seen, todo = {self.start}, [self.start]
        best = self.time_of(self.start)
        while todo:
            point = todo.pop()
            now = self.time_of(point)
            for number, index, other in self.neighbours(point):
                if other in seen or (number, index) in self.refused | self.failing:
                    continue
                if self.memory_of(other) <= 0.92 * self.memory_limit and self.time_of(other) < now:
                    seen.add(other)
                    todo.append(other)
                    best = min(best, self.time_of(other))
        return best


def random_scenario(seed: int) -> Scenario:
    rng = random.Random(seed)
    names = rng.sample(sorted(KNOBS), rng.randint(2, 5))
    knobs = [_random_knob(rng, name) for name in names]
    interactions = {}
    for _ in range(rng.randint(0, 3)):
        a, b = sorted(rng.sample(range(len(knobs)), 2))
        cell = (a, rng.randrange(len(knobs[a].values)), b, rng.randrange(len(knobs[b].values)))
        interactions[cell] = rng.gauss(0, 0.03)
    start = tuple(rng.randrange(len(knob.values)) for knob in knobs)
    steps = round(math.exp(rng.uniform(math.log(3000), math.log(30000))))
    scenario = Scenario(
        seed=seed,
        knobs=knobs,
        interactions=interactions,
        start=start,
        memory_limit=1.0,
        steps=steps,
        step_seconds=math.exp(rng.uniform(math.log(0.5), math.log(5))),
        spread=rng.uniform(0.003, 0.05),
        correlation=rng.uniform(0, 0.7),
        outliers=rng.choice([0, 0.005, 0.02]),
        drift=rng.choice([0, 0, rng.uniform(-0.1, 0.1)]),
        shift=(rng.randrange(steps), rng.choice([0, 0, 0, rng.uniform(-0.1, 0.2)])),
        lie=rng.choice([1.0, 1.5, 2.0, 3.0]),
        pauses={True: rng.uniform(0.0, 0.5), False: rng.uniform(1.0, 10.0)},
    )
    scenario.memory_limit = scenario.memory_of(start) * math.exp(rng.uniform(0.1, 1.2))
    for number, knob in enumerate(knobs):
        for index in range(len(knob.values)):
            if index != start[number]:
                if rng.random() < 0.03:
                    scenario.refused.add((number, index))
                elif rng.random() < 0.03:
                    scenario.failing.add((number, index))
    return scenario


def _random_knob(rng: random.Random, name: str) -> Knob:
    """Return a knob with one best value: step times rise away from it, and memory rises with the index."""
    values, in_place = KNOBS[name]
    best, slope = rng.randrange(len(values)), abs(rng.gauss(0, 0.08))
    time = [slope * abs(index - best) ** rng.uniform(0.7, 1.2) + rng.gauss(0, 0.004) for index in range(len(values))]
    uses_memory = name in ("plan.micro_batch", "plan.recompute", "plan.sharding", "plan.offload")
    step = rng.uniform(0.1, 0.4) if uses_memory else 0.0
    return Knob(name, values, time, [step * index for index in range(len(values))], in_place)


@dataclass
class Outcome:
    """What became of a scenario. `extra` is the fraction of time that the run took longer than without autopilot."""

    seed: int
    extra: float
    reached: float  # fraction of the best reachable throughput at the end
    started: float  # the same at the start
    trials: int
    kept: int
    spent: float  # fraction of the run's time that trials cost, by the ledger
    returns: int  # kept changes that set a field back to a value that it had before
    kept_worse: int  # kept changes that made steps longer by more than 1 %


class SimulatedRun:
    """Drives the real decision loop over a scenario, in virtual time."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.rng = scenario, random.Random(scenario.seed + 1)
        self.loop = DecisionLoop(AutopilotSection(mode="act", budget=BUDGET))
        self.point, self.step, self.seconds, self.plain_seconds = scenario.start, 0, 0.0, 0.0
        self.noise, self.lies = 0.0, {}
        self.points = [scenario.start]
        self.kept_worse = 0

    def run(self) -> Outcome:
        scenario, loop = self.scenario, self.loop
        poll_every = max(3, round(1.0 / scenario.step_seconds))
        while self.step < scenario.steps:
            if loop.trial is None and loop.due - self.step > SAMPLED_STEPS:
                self._skip(min(loop.due - SAMPLED_STEPS, scenario.steps) - self.step)
            for _ in range(min(poll_every, scenario.steps - self.step)):
                self._train_step()
            if loop.trial is None and not loop.is_due():
                continue
            kept = sum(each.outcome == "kept" for each in loop.decisions.values())
            output = loop.poll(self._facts(), now=self.seconds, propose=self._propose)
            if output.request is not None:
                self._answer(output.request)
            if sum(each.outcome == "kept" for each in loop.decisions.values()) > kept:
                self._note_kept()
        return self._outcome()

    def _environment(self) -> float:
        scenario = self.scenario
        begin, size = scenario.shift
        return scenario.drift * self.step / scenario.steps + (size if self.step >= begin else 0.0)

    def _mean_seconds(self, point: Point) -> float:
        scenario = self.scenario
        relative = scenario.time_of(point) - scenario.time_of(scenario.start)
        return scenario.step_seconds * math.exp(relative + self._environment())

    def _train_step(self) -> None:
        scenario, rng = self.scenario, self.rng
        c = scenario.correlation
        self.noise = c * self.noise + math.sqrt(1 - c * c) * rng.gauss(0, 1)
        mean = self._mean_seconds(self.point)
        measured = mean * math.exp(scenario.spread * self.noise)
        if rng.random() < scenario.outliers:
            measured *= 1 + rng.expovariate(1)
        self.step += 1
        self.seconds += mean
        self.plain_seconds += self._mean_seconds(scenario.start)
        peak = scenario.memory_of(self.point)
        self.loop.add_step(TimedStep(self.step, measured, measured, peak))

    def _skip(self, steps: int) -> None:
        """Train steps that nobody looks at."""
        for _ in range(20):
            part = steps // 20
            self.seconds += part * self._mean_seconds(self.point)
            self.plain_seconds += part * self._mean_seconds(self.scenario.start)
            self.step += part

    def _facts(self) -> RunSettings:
        knobs = self.scenario.knobs
        settings = {knob.name: knob.values[index] for knob, index in zip(knobs, self.point, strict=True)}
        return RunSettings(total_steps=self.scenario.steps, settings=settings, memory_limit=self.scenario.memory_limit)

    def _propose(self) -> list[Proposal]:
        """Return every change of a single field, with a gain and a peak that the cost model gets wrong."""
        scenario = self.scenario
        return [
            Proposal(
                patch={scenario.knobs[number].name: scenario.knobs[number].values[index]},
                undo={scenario.knobs[number].name: scenario.knobs[number].values[self.point[number]]},
                gain=(gain := self._predicted_gain(number, index, point)),
                uncertainty=max(0.05, 0.5 * abs(gain)),
                reason=f"{scenario.knobs[number].name} should be {scenario.knobs[number].values[index]}",
                peak_ratio=(scenario.memory_of(point) / scenario.memory_of(self.point)) ** self._lie(number, index)[1],
                is_in_place=scenario.knobs[number].in_place,
            )
            for number, index, point in scenario.neighbours(self.point)
        ]

    def _lie(self, number: int, index: int) -> tuple[float, float]:
        """Return by what factor predictions for a value are off: of the gain, and of the peak memory."""
        if (number, index) not in self.lies:
            size = math.log(self.scenario.lie)
            self.lies[number, index] = (math.exp(self.rng.uniform(-size, size)), math.exp(self.rng.gauss(0, 0.1)))
        return self.lies[number, index]

    def _predicted_gain(self, number: int, index: int, point: Point) -> float:
        shorter = self.scenario.time_of(self.point) - self.scenario.time_of(point)
        return 1 - math.exp(-shorter * self._lie(number, index)[0])

    def _answer(self, request: PendingRequest) -> None:
        scenario = self.scenario
        numbers = {knob.name: number for number, knob in enumerate(scenario.knobs)}
        point, in_place = list(self.point), True
        for name, value in request.patch.items():
            knob = scenario.knobs[numbers[name]]
            point[numbers[name]] = knob.values.index(value)
            in_place = in_place and knob.in_place
        cells = {(numbers[name], point[numbers[name]]) for name in request.patch}
        pause = scenario.pauses[in_place] * self.rng.uniform(0.7, 1.5)
        status = "applied"
        if cells & scenario.refused:
            status, pause = "refused", 0.0
        elif cells & scenario.failing or scenario.memory_of(tuple(point)) > scenario.memory_limit:
            status, pause = "failed", 2 * pause
        for _ in range(self.rng.randint(0, 2)):  # the ranks agree on a later step
            if self.step < scenario.steps:
                self._train_step()
        if status == "applied":
            self.point = tuple(point)
        self.seconds += pause
        answer = ChangeAnswer(
            id=request.id, step=self.step, status=status, patch=request.patch, in_place=in_place, pause_seconds=pause
        )
        self.loop.add_answer(answer)

    def _note_kept(self) -> None:
        worse = self.scenario.time_of(self.point) - self.scenario.time_of(self.points[-1])
        self.kept_worse += worse > 0.01
        self.points.append(self.point)

    def _outcome(self) -> Outcome:
        scenario, decisions = self.scenario, self.loop.decisions.values()
        best = scenario.best()
        returns = 0
        for number in range(len(scenario.knobs)):
            values = [point[number] for point in self.points]
            left = [value for index, value in enumerate(values[1:], 1) if value != values[index - 1]]
            returns += len(left) + 1 - len({values[0], *left})
        return Outcome(
            seed=scenario.seed,
            extra=self.seconds / self.plain_seconds - 1,
            reached=math.exp(best - scenario.time_of(self.point)),
            started=math.exp(best - scenario.time_of(scenario.start)),
            trials=len(decisions),
            kept=sum(each.outcome == "kept" for each in decisions),
            spent=self.loop.spent_seconds / self.plain_seconds,
            returns=returns,
            kept_worse=self.kept_worse,
        )


def simulate(seed: int) -> Outcome:
    return SimulatedRun(random_scenario(seed)).run()


@dataclass
class Summary:
    """The figures over all scenarios; fractions from 0 to 1."""

    scenarios: int
    worst_extra: float
    over_budget: int
    reached_wanted: float
    started_wanted: float
    mean_reached: float
    mean_started: float
    most_returns: int
    mean_trials: float
    mean_spent: float
    kept_worse: float

    def text(self) -> str:
        return "\n".join(
            [
                f"{self.scenarios:,} scenarios, budget {BUDGET:.0%}",
                f"ended more than the budget below the start: {self.over_budget} "
                f"(worst run: {self.worst_extra:+.2%} of its time)",
                f"at least {WANTED_FRACTION:.0%} of the best reachable throughput: {self.reached_wanted:.1%} of runs "
                f"({self.started_wanted:.1%} at the start)",
                f"mean fraction of the best reachable: {self.mean_reached:.1%} ({self.mean_started:.1%} at the start)",
                f"most returns of one run to a value that a field had before: {self.most_returns}",
                f"trials a run: {self.mean_trials:.1f}, cost {self.mean_spent:.2%} of its time; "
                f"kept changes that hurt by more than 1 %: {self.kept_worse:.2%}",
            ]
        )


def summarise(outcomes: Sequence[Outcome]) -> Summary:
    count = len(outcomes)
    return Summary(
        scenarios=count,
        worst_extra=max(each.extra for each in outcomes),
        over_budget=sum(each.extra > BUDGET for each in outcomes),
        reached_wanted=sum(each.reached >= WANTED_FRACTION for each in outcomes) / count,
        started_wanted=sum(each.started >= WANTED_FRACTION for each in outcomes) / count,
        mean_reached=sum(each.reached for each in outcomes) / count,
        mean_started=sum(each.started for each in outcomes) / count,
        most_returns=max(each.returns for each in outcomes),
        mean_trials=sum(each.trials for each in outcomes) / count,
        mean_spent=sum(each.spent for each in outcomes) / count,
        kept_worse=sum(each.kept_worse for each in outcomes) / max(1, sum(each.kept for each in outcomes)),
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="The autopilot's policy against simulated runs.")
    parser.add_argument("--scenarios", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first scenario")
    parser.add_argument("--processes", type=int, default=2)
    flags = parser.parse_args(arguments)
    seeds = range(flags.first, flags.first + flags.scenarios)
    with ProcessPoolExecutor(flags.processes) as pool:
        print(summarise(list(pool.map(simulate, seeds, chunksize=20))).text())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
