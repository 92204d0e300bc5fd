"""The facts about a run by parts, each a function of what was read: strict JSON; keys without data are empty."""

import json
import math
import shlex
import time
from collections.abc import Sequence
from typing import Any

from trimaran.app import RunState, StepHistory, command_of_decision
from trimaran.app.recipe.options import path_argument, program_name
from trimaran.app.runs.decisions_view import last_decision_text
from trimaran.autopilot import describe
from trimaran.checkpoint.checkpoint_list import count_drafts, list_checkpoints
from trimaran.core import PHASES, predicted_comm, read_regular_text
from trimaran.core.version import VERSION
from trimaran.launch import incident_text
from trimaran.models.resolve import model_text
from trimaran.runs import RunDirectory, read_rank_table
from trimaran.ui.report.curves import DetailedStep, curves_of, groups_of, number, phases_of, tree
from trimaran.ui.report.state_facts import commands_of, ranks_now, views_of, waterfall_of

Tree = dict[str, Any]
FORMAT = 1
MAX_SNAPSHOT_BYTES = 16 << 20
KINDS = {"weights": "parameters", "gradients": "gradients", "optimizer": "states", "activations": "activations"}


def about_facts(state: RunState) -> Tree:
    run = state.run
    return {
        "format": FORMAT,
        "made": time.time(),
        "version": VERSION,
        "name": state.recipe.name,
        "model": model_text(state.recipe.model, state.recipe.data),
        "plan_words": str(state.plan),
        "command": shlex.join([program_name(), "train", path_argument(run.recipe)]),
        "recipe": read_regular_text(run.recipe),
        "unit": state.unit,
    }


def state_facts(state: RunState) -> Tree:
    """Return the state of the run as `trimaran watch --json` prints it, and what the report says about it."""
    decisions = state.decisions
    facts = state.as_dict() | {
        "activity": state.activity,
        "remaining_seconds": state.remaining_seconds,
        "why": state.attempts.why,
        "machines_used": _machines_used(state),
        "comparison": _comparison(state),
        "groups": groups_of(state),
        "timeline": _timeline(state),
        "waterfall": waterfall_of(state),
        "commands": commands_of(state),
        "last_decision": last_decision_text(decisions[-1]) if decisions else "",
    }
    for incident, found in zip(facts["incidents"], state.incidents, strict=True):
        incident["verdict"] = incident_text(found)
    for decision, made in zip(facts["decisions"], decisions, strict=True):
        decision["change"] = describe(made.patch, made.undo)
        decision["command"] = command_of_decision(made, state.run, state.status)
    facts["samples"] = [event.data | {"step": event.step} for event in state.events_of_kind("sample")]
    return facts


def curve_facts(state: RunState, detailed: Sequence[DetailedStep]) -> Tree:
    curves = curves_of(state.history, state.evaluations, detailed)
    return {"curves": curves, "not_finite": state.history.not_finite}


def range_facts(
    history: StepHistory, evaluations: Sequence[tuple[int, float]], detailed: Sequence[DetailedStep]
) -> Tree:
    return {
        "curves": curves_of(history, evaluations, detailed),
        "not_finite": history.not_finite,
        "phases_over_time": phases_of(history),
    }


def rank_facts(state: RunState) -> Tree:
    return {"ranks_now": ranks_now(state, read_rank_table(state.run.rank_table))}


def checkpoint_facts(state: RunState) -> Tree:
    """Return the checkpoints on disk, oldest first, each with the tiers that hold it and what was read of it."""
    rows = [row.as_dict() for row in list_checkpoints(state.run.checkpoints)]
    sent = [event for event in state.events_of_kind("upload") if "sent" not in event.data]
    stored = {event.step for event in sent if not event.data.get("failed")}
    resumes = [event for event in state.events_of_kind("resume") if event.rank == 0]
    restored = {event.data.get("from_step") for event in resumes if event.data.get("tier") != "memory"}
    for row in rows:
        row["tiers"] = ["disk", *(["store"] if row["step"] in stored else [])]
        row["restored"] = row["step"] in restored
    return {"checkpoints": rows, "checkpoint_drafts": count_drafts(state.run.checkpoints)}


def view_facts(run: RunDirectory) -> Tree:
    views, trouble = views_of(run)
    return {"views": views, "views_trouble": trouble}


def _machines_used(state: RunState) -> Tree:
    starts = [event.data for event in state.current_events("start")]
    keys = {key for data in starts for key in data} - {"pid", "world_size"}
    return {key: sorted({str(data[key]) for data in starts if key in data}) for key in sorted(keys)}


def _comparison(state: RunState) -> Tree:
    """Return predicted and measured values: totals, and the terms of a step and of memory.

    The terms of a rank's memory are only measured by a memory snapshot.
    """
    predicted, measured = state.plan.prediction, state.measured
    if predicted is None:
        return {}
    # For scenes the prediction counts positions, so the rates cannot be compared.
    rates = ("tokens_per_second", "mfu") if state.unit == "tokens" else ()
    rates = rates[: 1 if state.no_mfu else 2]
    phases, held, expected = state.phases, _held(state.run), predicted_comm(state.plan)
    of_memory, of_time = predicted.error_of("peak_bytes"), predicted.error
    return {
        "error": predicted.error,
        "memory_error": of_memory,
        "source": predicted.source,
        "totals": [
            _row(name, before, after, predicted.error_of(name, (after or 0.0) - before))
            for name in ("step_seconds", *rates, "peak_bytes")
            for before, after in [(getattr(predicted, name), getattr(measured, name, None))]
        ],
        "time": [
            _row(
                name, predicted.time.get(name), phases.get(name, 0.0) if measured and name in PHASES else None, of_time
            )
            for name in dict.fromkeys([*PHASES, *predicted.time])
            if name in predicted.time or name in phases
        ],
        "comm": [
            _row(axis, expected.get(axis), seconds, of_time) for axis, seconds in state.comm_seconds.items() if measured
        ],
        "memory": [_row(name, size, held.get(name), of_memory) for name, size in predicted.memory.items()],
    }


def _held(run: RunDirectory) -> dict[str, float]:
    """Return the bytes of rank 0's newest memory snapshot by the prediction's terms; empty without one."""
    found = sorted(run.profiles.glob("memory-step-*-rank-0.json"))
    if not found or found[-1].stat().st_size > MAX_SNAPSHOT_BYTES:
        return {}
    try:
        snapshot = tree(json.loads(read_regular_text(found[-1])))
    except ValueError:
        return {}
    kinds = tree(tree(snapshot.get("within")).get("kinds")) | tree(snapshot.get("kinds"))
    held = {term: number(kinds.get(kind)) for term, kind in KINDS.items()}
    return {term: size for term, size in held.items() if math.isfinite(size)}


def _row(name: str, predicted: float | None, measured: float | None, error: float) -> Tree:
    comparable = predicted is not None and measured is not None and predicted > 0
    return {
        "name": name,
        "predicted": predicted,
        "measured": measured,
        "difference": measured / predicted - 1 if comparable else None,
        "error": error,
    }


def _timeline(state: RunState) -> Tree:
    attempts = [
        {"number": each.number, "time": each.time, "ended": each.ended, "how": each.how, "step": each.step,
         "world_size": each.world_size} for each in state.attempts.attempts
    ]  # fmt: skip
    saved = [
        {"time": event.time, "step": event.step, "stall_seconds": event.data.get("stall_seconds")}
        for event in state.events_of_kind("checkpoint")
        if event.rank == 0
    ]
    times = [*(each["time"] for each in attempts), *(event.time for event in state.events)]
    times += [*(each["ended"] for each in attempts if each["ended"]), *(step.time for step in state.steps[-1:])]
    return {"begin": min(times, default=None), "end": max(times, default=None), "attempts": attempts, "saved": saved}


def strict(value: Any) -> Any:
    """Return `value` as strict JSON, where NaN and Inf are null."""
    kind = type(value)
    if kind is float:
        return value if value - value == 0 else None
    if kind is dict:
        return {name if type(name) is str else str(name): strict(each) for name, each in value.items()}
    if kind is list or kind is tuple or isinstance(value, tuple):
        return [strict(each) for each in value]
    if isinstance(value, float):
        return strict(float(value))
    return value
