"""The facts of a report as one JSON object: the page shows them, `--json` prints them."""

import json
import math
import shlex
import time
from typing import Any

from trimaran import __version__
from trimaran.app.report.curves import curves_of, groups_of, number, phases_of, ranks_of, tree
from trimaran.app.report.detailed_steps import detailed_steps
from trimaran.app.report.machines import machines_of
from trimaran.app.request.options import path_argument, program_name
from trimaran.app.views.decisions_view import last_decision_text
from trimaran.app.views.run_findings import read_findings
from trimaran.app.views.run_state import RunState
from trimaran.checkpoint.checkpoint_list import list_checkpoints
from trimaran.core import PHASES, Recipe, UserError, show_count
from trimaran.core.comm_axes import predicted_comm
from trimaran.core.regular_files import read_regular_text
from trimaran.launch.incident_text import incident_text
from trimaran.models import outline_if_known
from trimaran.run import RunDirectory

Tree = dict[str, Any]
FORMAT = 1
MAX_SNAPSHOT_BYTES = 16 << 20
KINDS = {"weights": "parameters", "gradients": "gradients", "optimizer": "states", "activations": "activations"}


def facts_of(run: RunDirectory) -> Tree:
    """Return the facts about `run` from its files: strict JSON; keys without data are empty."""
    state = RunState(run)
    state.refresh()
    findings, trouble = read_findings(run)
    detailed = detailed_steps(run)
    facts = {
        "format": FORMAT,
        "made": time.time(),
        "version": __version__,
        "name": state.recipe.name,
        "model": model_text(state.recipe),
        "plan_words": str(state.plan),
        "command": shlex.join([program_name(), "train", path_argument(run.recipe)]),
        "recipe": read_regular_text(run.recipe),
        "unit": state.unit,
        "why": state.attempts.why,
        "machines_used": _machines_used(state),
        "comparison": _comparison(state),
        "curves": curves_of(state, detailed),
        "not_finite": state.history.not_finite,
        "phases_over_time": phases_of(state.history),
        "ranks_over_time": ranks_of(detailed),
        "groups": groups_of(state),
        "timeline": _timeline(state),
        "checkpoints": [row.as_dict() for row in list_checkpoints(run.checkpoints)],
        "findings": [each.as_dict() for each in findings],
        "doctor_trouble": trouble,
        "last_decision": last_decision_text(state.decisions[-1]) if state.decisions else "",
        "machines_over_time": machines_of(run),
    }
    answer = strict(state.as_dict() | facts)
    for incident, found in zip(answer["incidents"], state.incidents, strict=True):
        incident["verdict"] = incident_text(found)
    return answer


def model_text(recipe: Recipe) -> str:
    """Return the name of the model, with its size if that is known here."""
    names = filter(None, [recipe.model.family, recipe.model.preset or recipe.model.path])
    try:
        outline = outline_if_known(recipe.model, recipe.data)
    except UserError:
        outline = None  # its folder is on another machine
    size = f", {show_count(outline.num_parameters)} parameters" if outline else ""
    return f"{' '.join(names)}{size}"


def _machines_used(state: RunState) -> Tree:
    """Return the hosts and versions of the ranks, from their last `start` events."""
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
    """Return the attempts and checkpoints with their times, in seconds since the epoch."""
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
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): strict(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [strict(each) for each in value]
    return value
