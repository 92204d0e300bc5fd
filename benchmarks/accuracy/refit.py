"""Errors on runs that a fit has not seen: `python -m benchmarks.accuracy.refit [small]`.

Each group (a model, a number of GPUs) is left out in turn. The constants that were fitted to published runs are fitted
to the others, starting from values that are off by a half, and scored on the group. All other constants are counted or
measured, but were written with all of these runs known: only the fitted constants are really left out.

`small` fits the constants of our own small steps (`TRIMARAN_HOST` and others in `cost/stack_profiles.py`) to
h200_small.jsonl and prints them, with the errors on each shape when it is left out.
"""

import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from benchmarks.accuracy.ask import SMALL, clean, question_of
from benchmarks.accuracy.errors import Case, by, summarise
from benchmarks.accuracy.published import SOURCES, Run

from trimaran.core import Plan
from trimaran.cost import STACKS, Job, Stack, predict
from trimaran.cost.stack_profiles import HostOverhead
from trimaran.machine import parse_cluster
from trimaran.planner.predict_request import cluster_of, job_of, plan_of, tidy

NUM_SAMPLED_RUNS, NUM_ROUNDS, STEP_FACTOR = 160, 3, 2.5
FRACTIONS = ("dp_overlap", "fragmentation")  # at most 1
Part = Literal["memory", "time"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Fitted constants of one stack's profile: a field, and an index if it has several values."""

    source: str
    stack: str
    part: Part
    constants: tuple[tuple[str, int | None], ...]
    keep: Callable[[Case], bool] = lambda _: True


FITS = (
    Fit(source="nanotron", stack="nanotron", part="memory",
        constants=(("fragmentation", 0), ("fragmentation", 1), ("gathered_input_bytes", 0))),
    Fit(source="nanotron", stack="nanotron", part="time", keep=clean,
        constants=(("host", 0), ("host", 2), ("dp_overlap", 0))),
    Fit(source="llm-foundry", stack="llm-foundry", part="time", constants=(("eager", 0), ("host", 0))),
)  # fmt: skip


def value_of(stack: Stack, part: Part, constant: tuple[str, int | None]) -> float:
    field, index = constant
    value: Any = getattr(getattr(stack, part), field)
    return value if index is None else value[index]


def with_value(stack: Stack, part: Part, constant: tuple[str, int | None], value: float) -> Stack:
    """Return the stack with one constant changed."""
    field, index = constant
    profile: Any = getattr(stack, part)
    if index is not None:
        values = getattr(profile, field)
        fresh = (*values[:index], value, *values[index + 1 :])
        changed: Any = values._make(fresh) if hasattr(values, "_make") else fresh
    else:
        changed = value
    return replace(stack, **{part: replace(profile, **{field: changed})})


def ask_with(runs: Sequence[Run], stack: Stack) -> list[Case]:
    """Return the prediction for each run with the profile of `stack`. Plans that cannot run are left out."""
    cases = []
    for run in runs:
        model, cluster, plan = (json.dumps(tidy(run.line[key]), sort_keys=True) for key in ("model", "cluster", "plan"))
        machines = cluster_of(cluster)
        job = replace(job_of(model, run.line["stack"]), stack=stack)
        read, _ = plan_of(plan, machines.world_size)
        if read.num_stages > job.outline.layers:
            continue
        found = predict(job, machines, read)
        speed = found.tokens_per_second / machines.world_size
        cases.append(Case(run=run, peak_bytes=found.peak_bytes, tokens_per_second_per_gpu=speed, fits=found.fits))
    return cases


def errors_of(cases: Sequence[Case], part: Part) -> list[float]:
    errors = [case.memory_error if part == "memory" else case.speed_error for case in cases]
    return [each for each in errors if each is not None]


def refit(runs: Sequence[Run], fit: Fit) -> Stack:
    """Return the stack with its constants fitted to `runs`: least mean logarithmic error, one constant at a time."""
    sample = random.Random(0).sample(list(runs), min(NUM_SAMPLED_RUNS, len(runs)))
    stack = STACKS[fit.stack]
    for constant in fit.constants:
        stack = with_value(stack, fit.part, constant, 1.5 * value_of(stack, fit.part, constant))

    def loss(candidate: Stack) -> float:
        return statistics.fmean(abs(math.log1p(each)) for each in errors_of(ask_with(sample, candidate), fit.part))

    for turn in range(NUM_ROUNDS):
        for constant in fit.constants:
            here, step = value_of(stack, fit.part, constant), STEP_FACTOR ** (0.5**turn)
            most = 1.0 if constant[0] in FRACTIONS else math.inf
            tries = [min(most, here * step ** (power / 3)) for power in range(-3, 4)]
            stack = min((with_value(stack, fit.part, constant, each) for each in tries), key=loss)
    return stack


def left_out() -> Iterator[list[str]]:
    """Yield the rows of the table: errors on each group as committed, and with constants fitted without it."""
    yield ["source", "error of", "left out", "runs", "as committed", "fitted to the rest", "constants"]
    for fit in FITS:
        runs = [run for run in SOURCES[fit.source]() if not run.failed]
        kept = [case for case in ask_with(runs, STACKS[fit.stack]) if fit.keep(case)]
        keys: list[Callable[[Case], str | int]] = [lambda case: case.run.model, lambda case: case.run.gpus]
        for key in keys:
            for group, cases in by(kept, key).items():
                stack = refit([case.run for case in kept if key(case) != group], fit)
                held = [case.run for case in cases]
                before, after = (
                    summarise(errors_of(ask_with(held, each), fit.part)) for each in (STACKS[fit.stack], stack)
                )
                if before is None or after is None:
                    continue
                name = f"{group} GPUs" if isinstance(group, int) else group
                what = "memory" if fit.part == "memory" else "tokens/s"
                errors = [f"{100 * each.mape:.1f} %" for each in (before, after)]
                yield [fit.source, what, name, str(before.count), *errors, _constants_text(stack, fit)]


def _constants_text(stack: Stack, fit: Fit) -> str:
    """Return the constants with their values: `fragmentation 0.162 / 0.102, gathered_input_bytes 2.65`."""
    values: dict[str, list[str]] = {}
    for name, at in fit.constants:
        values.setdefault(name, []).append(f"{value_of(stack, fit.part, (name, at)):.3g}")
    return ", ".join(f"{name} {' / '.join(each)}" for name, each in values.items())


# What a small step costs: seconds of the host, and the memory traffic of eager operators.
SMALL_CONSTANTS: tuple[tuple[str, int | None], ...] = (
    ("host", HostOverhead._fields.index("compiled")), ("host", HostOverhead._fields.index("eager")),
    ("host", HostOverhead._fields.index("step")), ("compiled", 0), ("eager", 0), ("eager", 1),
)  # fmt: skip


def small_rows() -> list[tuple[Job, Plan, dict[str, Any]]]:
    """Return the rows of h200_small.jsonl with their questions."""
    rows = [row for row in map(json.loads, SMALL.read_text().splitlines()) if "step_seconds" in row]
    return [(*question_of(row), row) for row in rows]


def small_errors(rows: Sequence[tuple[Job, Plan, dict[str, Any]]], stack: Stack) -> list[float]:
    cluster = parse_cluster("1xH200")
    return [
        predict(replace(job, stack=stack), cluster, plan).step_seconds / row["step_seconds"] - 1
        for job, plan, row in rows
    ]


def refit_small(rows: Sequence[tuple[Job, Plan, dict[str, Any]]]) -> Stack:
    """Return our stack with the constants of small steps fitted to `rows`."""
    stack = STACKS["trimaran"]

    def loss(candidate: Stack) -> float:
        return statistics.fmean(abs(math.log1p(each)) for each in small_errors(rows, candidate))

    for turn in range(2 * NUM_ROUNDS):
        for constant in SMALL_CONSTANTS:
            here, step = value_of(stack, "time", constant), STEP_FACTOR ** (0.5**turn)
            tries = [here * step ** (power / 3) for power in range(-3, 4)]
            stack = min((with_value(stack, "time", constant, each) for each in tries), key=loss)
    return stack


def small_table() -> Iterator[list[str]]:
    """Yield each row's error as committed, when its shape is left out of the fit, and when all rows are fitted."""
    rows = small_rows()
    all_fitted = refit_small(rows)
    yield ["row", "measured ms", "as committed", "shape left out", "fitted"]
    for shape in dict.fromkeys(row["name"].split()[0] for *_, row in rows):
        own = [each for each in rows if each[2]["name"].split()[0] == shape]
        rest = refit_small([each for each in rows if each not in own])
        columns = [small_errors(own, stack) for stack in (STACKS["trimaran"], rest, all_fitted)]
        for (_, _, row), *errors in zip(own, *columns, strict=True):
            yield [row["name"], f"{1e3 * row['step_seconds']:.2f}", *(f"{100 * each:+.1f} %" for each in errors)]
    for constant in SMALL_CONSTANTS:
        field, index = constant
        name = getattr(getattr(all_fitted.time, field), "_fields", ())[index or 0]
        now, then = (value_of(stack, "time", constant) for stack in (STACKS["trimaran"], all_fitted))
        yield [f"{field}.{name}", "", f"{now:.4g}", "", f"{then:.4g}"]


if __name__ == "__main__":
    for row in small_table() if "small" in sys.argv else left_out():
        print(f"| {' | '.join(row)} |", flush=True)
