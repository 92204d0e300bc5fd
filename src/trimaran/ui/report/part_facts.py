"""The facts about a run by parts, each a function of what was read: strict JSON; keys without data are empty."""

import json
import math
import shlex
import time
from contextlib import suppress
from statistics import median
from typing import Any

from trimaran.app import RunState, command_of_decision, generate_command
from trimaran.app.recipe.options import path_argument, program_name
from trimaran.app.runs.decisions_view import last_decision_text
from trimaran.app.runs.run_state import ACTIVE_STATUSES
from trimaran.autopilot import describe
from trimaran.checkpoint.checkpoint_list import count_drafts, list_checkpoints
from trimaran.core import PHASES, UserError, predicted_comm, read_regular_text
from trimaran.core.version import VERSION
from trimaran.launch import incident_text
from trimaran.models.resolve import model_text
from trimaran.runs import MARKER, RunDirectory, read_rank_table
from trimaran.runs.record_types import is_number, is_time
from trimaran.ui.report.curves import groups_of, number, tree
from trimaran.ui.viz.catalogue import build_view
from trimaran.ui.viz.figures import view_as_dict
from trimaran.ui.viz.viz_request import read_subject

Tree = dict[str, Any]
FORMAT = 1
MAX_SNAPSHOT_BYTES = 16 << 20
KINDS = {"weights": "parameters", "gradients": "gradients", "optimizer": "states", "activations": "activations"}


def about_facts(state: RunState) -> Tree:
    """Return the facts that do not change while a run trains, unless its plan is replaced."""
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
    decisions, starts = state.decisions, [event.data for event in state.current_events("start")]
    keys = {key for data in starts for key in data} - {"pid", "world_size"}
    facts = state.as_dict() | {
        "activity": state.activity,
        "remaining_seconds": state.remaining_seconds,
        "why": state.attempts.why,
        "machines_used": {key: sorted({str(data[key]) for data in starts if key in data}) for key in sorted(keys)},
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


def _comparison(state: RunState) -> Tree:
    """Return totals, terms of a step and of memory, predicted and measured; memory's need a snapshot."""
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


LATE_FRACTION = 0.1  # of a step: a rank that is later than the median of its stage by more is late
SILENT_SECONDS = 30.0  # without a heartbeat; samples are a few seconds apart


def ranks_now(state: RunState) -> Tree:
    """Return a list for each quantity, with a value for each rank; empty before any rank has started.

    `lag_seconds` is how much later than the median rank of its stage a rank finished its own work of step
    `measured_step`. `heartbeat_time` is when the rank was last known to live. `state` is one of `late`, `silent`,
    `ended`, `failed`, `missing` (it has not started) and `ok`.
    """
    world_size = state.plan.mesh.world_size
    started = {event.rank for event in state.current_events("start")}
    if not started:
        return {}
    table = read_rank_table(state.run.rank_table)
    measures = table.measures if table is not None else {}
    if any(len(column) != world_size for column in measures.values()):  # it is of a plan that was changed since
        measures = {}
    lags: list[float] = []
    if measures:
        ready = [busy + data for busy, data in zip(measures["busy_seconds"], measures["data_seconds"], strict=True)]
        size = max(1, len(ready) // state.plan.mesh.pp)
        middles = [median(ready[first : first + size]) for first in range(0, len(ready), size)]
        lags = [max(0.0, each - middles[min(rank // size, len(middles) - 1)]) for rank, each in enumerate(ready)]
    samples: dict[int, Tree] = {}  # the newest of each rank, with the time and the node of its node's sample
    for sample in state.samples.values():
        at = number(sample.get("time"))
        samples |= {int(rank): tree(each) | {"time": at, "node": sample.get("node")}
                    for rank, each in tree(sample.get("ranks")).items() if rank.isdecimal() and at == at}  # fmt: skip
    newest = max((number(sample.get("time")) for sample in state.samples.values()), default=0.0)
    step_seconds = state.measured.step_seconds if state.measured else 0.0
    rows = [
        _rank_row(rank, state, samples.get(rank), newest, has_started=rank in started) for rank in range(world_size)
    ]
    for rank, row in enumerate(rows):
        row["lag_seconds"] = lags[rank] if lags else None
        row["memory_bytes"] = measures["peak_bytes"][rank] if "peak_bytes" in measures else row["memory_bytes"]
        if row["state"] == "ok" and lags and lags[rank] > LATE_FRACTION * step_seconds:
            row["state"] = "late"
    per_node = max((len(tree(sample.get("ranks"))) for sample in state.samples.values()), default=0)
    if per_node and world_size % per_node:  # rows of the matrix would not be nodes
        per_node = 0
    # The memory of a rank's device; that of the whole machine is shared by its ranks.
    gpus = [gpu for sample in state.samples.values() for gpu in sample.get("gpus") or () if isinstance(gpu, dict)]
    memory = min((float(gpu["memory"]) for gpu in gpus if is_number(gpu.get("memory"))), default=None)
    about = {"world_size": world_size, "measured_step": table.step if measures and table else None,
             "per_node": per_node, "memory_total": memory, "step_seconds": step_seconds,
             "is_live": state.status in ACTIVE_STATUSES}  # fmt: skip
    return about | {name: [row[name] for row in rows] for name in rows[0]}


def _rank_row(rank: int, state: RunState, sample: Tree | None, newest: float, *, has_started: bool) -> Tree:
    events = state.events_of_rank(rank)
    last = max((event.time for event in events), default=None)
    row: Tree = {"heartbeat_time": last, "progress_seconds": None, "section": None, "step": None, "node": None,
                 "memory_bytes": None, "cpu": None}  # fmt: skip
    if sample is not None:
        at = sample["time"] - (sample["heartbeat_seconds"] if is_number(sample.get("heartbeat_seconds")) else 0.0)
        row["heartbeat_time"] = max(at, last or 0.0)
        names = {"memory_bytes": "ram", "progress_seconds": "progress_seconds", "cpu": "cpu", "step": "step"}
        row |= {name: value for name, key in names.items() if is_number(value := sample.get(key))}
        row |= {"section": str(sample["section"])} if isinstance(sample.get("section"), str) else {}
        row |= {"node": sample["node"]} if isinstance(sample.get("node"), int) else {}
    kinds = {event.kind for event in events}
    if not has_started:
        status = "missing"
    elif "error" in kinds:
        status = "failed"
    elif kinds & {"done", "stop"} or state.status not in ACTIVE_STATUSES:
        status = "ended"
    else:
        beat = row["heartbeat_time"]
        status = "silent" if beat is not None and newest - beat > SILENT_SECONDS else "ok"
    return row | {"state": status}


GROUPS = {  # categories of the ledger, in the order of the drawing
    "queue": ("idle",),
    "start": ("init", "compile"),
    "restart": ("restart",),
    "replay": ("replay",),
    "stall": ("data", "straggler", "save", "evaluation"),
    "useful": ("compute", "communication"),
}


def waterfall_of(state: RunState) -> Tree:
    """Return the seconds of each group and of its categories, which add up to `total`; empty before the first start.

    `queue` is the time before the first start and between a stop and a resume, when no process ran.
    """
    if (ledger := state.ledger) is None:
        return {}
    waited = 0.0
    with suppress(OSError, ValueError, LookupError, TypeError):  # of a run directory that does not say when it was made
        created = json.loads(read_regular_text(state.run.path / MARKER))["created"]
        waited = max(0.0, ledger.since - float(created)) if is_time(created) and created else 0.0
    parts = {name: {each: ledger.seconds[each] for each in categories} for name, categories in GROUPS.items()}
    parts["queue"] = {"before the first start": waited, **parts["queue"]}
    groups = [
        {"name": name, "seconds": sum(found.values()), "parts": {each: value for each, value in found.items() if value}}
        for name, found in parts.items()
    ]
    return {"total": ledger.total + waited, "goodput": ledger.goodput, "groups": groups}


ALWAYS = (
    ("follow it in a terminal", ("watch", "{run}")),
    ("diagnose it", ("doctor", "{run}")),
    ("list its incidents", ("incidents", "{run}")),
    ("list the decisions of the autopilot", ("decisions", "{run}")),
    ("list its checkpoints", ("checkpoints", "{run}")),
    ("read every checkpoint file and check it", ("checkpoints", "verify", "{run}")),
    ("write the report, one HTML file", ("report", "{run}")),
    ("print everything on this page as JSON", ("report", "{run}", "--json")),
    ("what fits, with what the run measured", ("viz", "need", "--run", "{run}")),
)
LIVE = (("change the plan while it trains", ("replan", "{run}")), ("profile it", ("profile", "{run}")))


def commands_of(state: RunState) -> list[Tree]:
    """Return what each command is for, and the command; the most useful for the run's status come first."""
    run, recipe = path_argument(state.run.path), path_argument(state.run.recipe)
    first: list[tuple[str, tuple[str, ...]]] = []
    if state.status in ACTIVE_STATUSES:
        first += LIVE
    elif state.status == "done":
        if state.events_of_kind("saved"):
            generate = generate_command(state.recipe, run)
            first += [("try the trained model", tuple(generate[1:]))] if generate else []
            first.append(("export the trained model", ("export", "{run}")))
        longer = f"train.steps={2 * state.recipe.train.steps}"
        first.append(("train it longer", ("resume", "{run}", "--set", longer)))
    else:
        first.append(("resume it from its newest checkpoint", ("resume", "{run}")))
    rows = [*first, *ALWAYS, ("train the same run again", ("train", recipe))]
    words = [[program_name(), *(run if each == "{run}" else each for each in parts)] for _, parts in rows]
    return [{"purpose": purpose, "command": shlex.join(each)} for (purpose, _), each in zip(rows, words, strict=True)]


def view_facts(run: RunDirectory) -> Tree:
    """Return the views that suit the run as JSON, in the mode that says most about a run; and why there are none."""
    try:
        subject = read_subject(None, str(run.path), None, [], [])
        mesh = subject.plan.mesh
        suits = {
            "need": True,
            "ddp": mesh.dp_replicate > 1 and mesh.dp_shard == 1 and mesh.pp == 1,
            "fsdp": mesh.dp_shard > 1 and subject.plan.sharding == "parameters",
            "zero": mesh.dp_shard > 1,
            "pipeline": mesh.pp > 1,
            "tensor": mesh.tp > 1,
            "mesh": mesh.world_size > 1,
        }
        views = [build_view(name, subject) for name, is_shown in suits.items() if is_shown]
    except UserError as error:
        return {"views": [], "views_trouble": error.what}
    found = []
    for view in views:
        mode = next(name for name in ("live", "simulate", "explain") if name in view.modes)
        tree = view_as_dict(view)
        about = {name: tree[name] for name in ("name", "title", "question", "about")}
        found.append(about | {"mode": mode} | tree["modes"][mode])
    return {"views": found, "views_trouble": ""}
