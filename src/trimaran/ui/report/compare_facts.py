"""Several runs beside each other: results, what differs in recipe and plan, and curves by step, tokens and time."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trimaran.app.runs.step_history import StepHistory
from trimaran.core import UserError
from trimaran.runs import RunDirectory
from trimaran.ui.report.curves import finite_or_none
from trimaran.ui.report.part_facts import strict
from trimaran.ui.report.run_feed import RunFeed

Tree = dict[str, Any]
Knot = tuple[float, float]
FORMAT = 1
MIN_RUNS, MAX_RUNS = 2, 8
MAX_KNOTS = 300
CURVES = ("loss", "held_out", "grad_norm", "tokens_per_second", "step_seconds", "peak_bytes", "lr")
PARTS = ("about", "state", "curves")
RESULTS = ("run_dir", "name", "model", "unit", "status", "steps", "total_steps", "first_loss", "final_loss",
           "held_out_loss", "goodput", "restarts", "plan_words")  # fmt: skip
IGNORED = ("name",)  # fields of a recipe that say nothing about its training


def compare_runs(runs: Sequence[RunDirectory]) -> Tree:
    """Return the facts about `runs` beside each other: lists have a value for each run, in the given order."""
    refuse_count(len(runs))
    return compare_feeds([RunFeed(run) for run in runs])


def compare_feeds(feeds: Sequence[RunFeed]) -> Tree:
    """Return the facts about runs that are followed; what is new is read."""
    found = [feed.refresh(PARTS) for feed in feeds]
    recipes = [feed.state.recipe.model_dump(mode="json") for feed in feeds]
    plans = [feed.state.plan.model_dump(mode="json", exclude={"prediction"}) for feed in feeds]
    return strict({
        "format": FORMAT,
        "runs": [_result(facts, feed) for facts, feed in zip(found, feeds, strict=True)],
        "recipe": differences(recipes, ignored=IGNORED),
        "plan": differences(plans),
        "curves": {name: [facts["curves"].get(name, {}) for facts in found] for name in CURVES},
        "axes": {name: [knots[name] for knots in (progress_of(feed.state.history) for feed in feeds)]
                 for name in ("tokens", "seconds")},
    })  # fmt: skip


def refuse_count(count: int) -> None:
    if not MIN_RUNS <= count <= MAX_RUNS:
        raise UserError("A042", f"{count} runs cannot be compared", where="the names of the runs",
                        fix=f"name {MIN_RUNS} to {MAX_RUNS} runs: trimaran report runs/a runs/b")  # fmt: skip


def _result(facts: Tree, feed: RunFeed) -> Tree:
    measured = facts["measured"] or {}
    speed = {name: measured.get(name) for name in ("tokens_per_second", "step_seconds", "peak_bytes", "mfu")}
    seconds = progress_of(feed.state.history)["seconds"]
    total = {"seconds": seconds[-1][1] if seconds else None, "world_size": feed.state.plan.mesh.world_size}
    return {name: facts[name] for name in RESULTS} | speed | total | {"path_name": feed.run.path.name}


def differences(trees: Sequence[Mapping[str, Any]], *, ignored: Sequence[str] = ()) -> list[Tree]:
    """Return the fields whose values differ, with the value of each tree; None where a tree has no such field."""
    leaves = [dict(_leaves(tree, "")) for tree in trees]
    names = dict.fromkeys(name for each in leaves for name in each)
    rows = [{"field": name, "values": [each.get(name) for each in leaves]} for name in names if name not in ignored]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"])]


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def progress_of(history: StepHistory) -> dict[str, list[Knot]]:
    """Return how many tokens were trained, and how many seconds of steps, up to some of the steps.

    The tokens of joined steps are their mean rate times their seconds.
    """
    rows: list[tuple[float, float, float]] = []
    for block in history.blocks:
        seconds, rate = block.scalars.get("step_seconds"), block.scalars.get("tokens_per_second")
        if seconds is not None and rate is not None:
            rows.append((block.last, rate.total / rate.count * seconds.total, seconds.total))
    rows += [(step.step, float(step.tokens), step.step_seconds) for step in history.steps]
    tokens = seconds = 0.0
    knots: list[tuple[float, float, float]] = []
    for step, more_tokens, more_seconds in rows:
        if math.isfinite(more_tokens) and math.isfinite(more_seconds):
            tokens, seconds = tokens + more_tokens, seconds + more_seconds
            knots.append((step, tokens, seconds))
    every = max(1, math.ceil(len(knots) / MAX_KNOTS))
    kept = [*knots[:1], *knots[every - 1 :: every], *knots[-1:]]
    return {"tokens": [(step, each) for step, each, _ in kept], "seconds": [(step, each) for step, _, each in kept]}


def at_step(knots: Sequence[Sequence[float]], step: float) -> float | None:
    """Return the tokens or seconds at a step, between the knots by a straight line; None without knots."""
    if not knots:
        return None
    after = bisect_right(knots, step, key=lambda knot: knot[0])
    if after == 0:
        return finite_or_none(knots[0][1] * step / knots[0][0]) if knots[0][0] else knots[0][1]
    if after == len(knots):
        return knots[-1][1]
    (low, before), (high, later) = knots[after - 1], knots[after]
    return before + (later - before) * (step - low) / ((high - low) or 1.0)
