"""Investigates an attempt in trouble: files an incident at once, then collects evidence before the ranks are killed.

Also an incident as a few lines of text, and what a coordinator writes of nodes to the bad-node memory
(`runs/node_records.py`).
"""

import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimaran.core import Incident, UserError, show_seconds
from trimaran.launch.supervise.attempt_watch import AttemptWatch
from trimaran.launch.supervise.attribution import Attribution, attribute_fault, is_or_are, name_ranks
from trimaran.launch.supervise.node import Node, NodeLost, on_all_nodes
from trimaran.launch.supervise.rank_report import read_rank_reports
from trimaran.runs import IncidentLog, Kind, RunDirectory, add_observation, bad_nodes_file, observe

log = logging.getLogger(__name__)

MAX_FACTS = 3
MAX_FILES = 2
MAX_SAMPLES = 8
ACTION_TEXTS = {
    "continued": "the run continued",
    "skipped": "the update was skipped, and the run continued",
    "rewound": "restored the last good state, and left these samples out",
    "quarantined": "left the sample out and restarted",
    "restarted": "restarted from the newest state",
    "replanned": "changed the plan and restarted",
    "resized": "restarted with another number of ranks",
    "saved": "saved a checkpoint",
    "waited": "waited",
    "stopped": "stopped the run",
    "finished": "the run is done: training was finished and saved before",
}
COST_TEXTS = {"seconds_to_detect": "detected in {:.1f} s", "seconds_to_recover": "first new step after {:.1f} s",
              "seconds_to_stop": "stopped in {:.1f} s"}  # fmt: skip


def incident_text(incident: Incident) -> str:
    """Return the lines about `incident`. The command line, the live view and the documentation show the same."""
    suspects, victims = incident.suspects, incident.victims
    ranks = f"{name_ranks(suspects)} {is_or_are(suspects)} at fault" if suspects else "no rank is at fault"
    ranks += f"; {name_ranks(victims)} {is_or_are(victims)} affected" if victims else ""
    action, why = "none yet", incident.evidence.get("why")
    if incident.action is not None:
        action = ACTION_TEXTS.get(incident.action, incident.action)
        action = f"{action}: {why}" if why and why not in action else action
    facts: Sequence[str] = incident.evidence.get("facts", ())
    shown = [*facts[:MAX_FACTS]]
    if (left := len(facts) - MAX_FACTS) > 0:
        shown.append(f"and {left} more fact{'' if left == 1 else 's'}")
    if samples := incident.evidence.get("sample_ids", ()):
        more = " ..." if len(samples) > MAX_SAMPLES else ""
        shown.append(f"samples {', '.join(map(str, samples[:MAX_SAMPLES]))}{more}")
    # A name without a folder is in the incident's own folder.
    files: Sequence[str] = incident.evidence.get("files", ())
    if paths := [file if "/" in file else f"incidents/{incident.id}/{file}" for file in files[:MAX_FILES]]:
        shown.append(f"see {', '.join(paths)}")
    cost, parts = incident.cost, []
    for field, text in COST_TEXTS.items():
        if field in cost:
            parts.append(text.format(cost[field]))
    if "lost_steps" in cost:
        lost = round(cost["lost_steps"])
        repeated = f"{lost} step{'' if lost == 1 else 's'} repeated" if lost else "no step lost"
        if "max_lost_steps" in cost:  # as the ranks stated it before
            most, seconds = round(cost["max_lost_steps"]), show_seconds(cost.get("max_lost_seconds", 0.0))
            repeated += f" (at most {most}, about {seconds})"
        parts.append(repeated)
    if "slowdown" in cost:
        parts.append(f"each step takes {cost['slowdown']:.1f} times as long")
    rows = [("ranks", [ranks]), ("evidence", shown), ("action", [action]), ("cost", [", ".join(parts)])]
    lines = [headline(incident)]
    for name, texts in rows:
        given = [text for text in texts if text]
        lines += [f"  {name + ':' if index == 0 else '':<10}{text}" for index, text in enumerate(given)]
    return "\n".join(lines)


def headline(incident: Incident) -> str:
    """Return the first line: the incident's number, its cause, the step, and what happened."""
    when = f" after step {incident.step}" if incident.step else ""
    return f"{incident.id}  {incident.cause}{when}: {incident.what}"


# What the check of a node found, if a part of the node is broken: GPU memory errors, a network card that is down, wrong
# results of an all-reduce, a node that is slow with every partner. All other codes may be a person's mistake.
HARDWARE_CODES = frozenset({"H003", "H006", "H016", "H018"})
MAX_LOST_FRACTION = 0.5  # of all nodes; if more are lost at once, the network or the scheduler is the reason


def note_lost_nodes(run: RunDirectory, nodes: Sequence[Node], lost: Iterable[NodeLost], *, incident: str) -> None:
    """Note the nodes whose supervisor is gone. One loss makes no node bad: it may be a preemption."""
    hosts = {node.name: getattr(node, "host", "") for node in nodes}  # empty for the coordinator's own node
    gone = [each for each in lost if hosts.get(each.node)]
    if 0 < len(gone) <= MAX_LOST_FRACTION * len(nodes):
        for each in gone:
            _note(run, hosts[each.node], "lost", each.what, incident=incident)


def note_unfit_node(run: RunDirectory, host: str, error: UserError) -> None:
    """Note a node whose check found a broken part."""
    if error.code in HARDWARE_CODES:
        _note(run, host, "hardware", f"{error.code}: {error.what}", incident="")


def _note(run: RunDirectory, host: str, kind: Kind, why: str, *, incident: str) -> None:
    path = bad_nodes_file(os.environ)
    try:
        add_observation(path, observe(host, kind, why, run=str(run.location), incident=incident))
    except OSError as error:
        log.warning("the bad-node memory %s cannot be written: %s", path, error)


POLL_SECONDS = 0.02
MAX_NAMED_NODES = 6  # in an incident; with more lost nodes, their number
GATHER_SECONDS = 0.3  # after the first sign of trouble; what follows within it belongs to the same incident
REPORT_SECONDS_AFTER_DEATH, REPORT_SECONDS_IN_HANG = 0.5, 2.0  # how long live ranks may take to write their reports


@dataclass(slots=True, kw_only=True)
class OpenIncident:
    """An incident whose cost is not known yet."""

    incident: Incident
    since: float  # the first death, or the last progress before a hang, by the monotonic clock
    highest_step: int  # that was finished by then


def investigate(run: RunDirectory, watch: AttemptWatch, incidents: IncidentLog, *, step: int) -> OpenIncident:
    """File an incident for the trouble that `watch` has seen, with the ranks at fault and evidence. Kills no rank."""
    deaths = [each.time for each in watch.unexpected_exits()]
    silences = [each.heartbeat.entered for each in watch.silent.values()]
    losses = [each.since for each in watch.lost if each.since]
    since = min([*deaths, *silences, *losses], default=time.monotonic())
    dead = bool(deaths)
    first = _attribute(run, watch)
    known: Mapping[str, Any] = {"attempt": watch.spec.attempt, "step": step, "suspects": first.suspects}
    incident = incidents.notice(first.cause, first.what, victims=first.victims, evidence=first.evidence, **known)
    noticed = time.monotonic()
    while time.monotonic() < noticed + GATHER_SECONDS and watch.alive:
        time.sleep(POLL_SECONDS)
        watch.poll()
    folder = run.incident(incident.id)
    if watch.alive:
        seconds = REPORT_SECONDS_AFTER_DEATH if dead else REPORT_SECONDS_IN_HANG
        try:
            on_all_nodes(watch.nodes, lambda node: node.collect_reports(folder, seconds=seconds))
        except OSError as error:
            log.warning("the rank reports cannot be written: %s", error)
        watch.poll()
    final = _attribute(run, watch, folder)
    evidence = final.evidence | ({"folder": str(folder.relative_to(run.path))} if folder.exists() else {})
    if watch.silent:
        longest = max(watch.silent.values(), key=lambda each: each.seconds)
        evidence |= {"section": longest.heartbeat.section}
    named = noticed if dead and final.suspects == first.suspects else time.monotonic()
    incident = incidents.amend(
        incident,
        cause=final.cause,
        what=final.what,
        suspects=final.suspects,
        victims=final.victims,
        evidence=evidence,
        cost={"seconds_to_detect": round(named - since, 3)} | loss_bound(watch),
    )
    return OpenIncident(incident=incident, since=since, highest_step=step)


def loss_bound(watch: AttemptWatch) -> dict[str, float]:
    """Return what the trouble costs at most, as the ranks stated it last: fields of an incident's cost; maybe empty."""
    bound = next((event["data"] for event in reversed(watch.of_kind("loss_bound"))), {})
    # Without its fork server a node has lost its ranks, but not the copies in its memory.
    prefix = "node_" if any("fork server" not in each.what for each in watch.lost) else ""
    found = {name: bound.get(prefix + name) for name in ("steps", "seconds")}
    return {f"max_lost_{name}": each for name, each in found.items() if each is not None}


def _attribute(run: RunDirectory, watch: AttemptWatch, reports: Path | None = None) -> Attribution:
    """Return what is known, before or after the ranks wrote `reports`. A lost node explains lost connections."""
    exits = watch.unexpected_exits()
    if watch.lost and not exits:
        return _attribute_lost_nodes(watch)
    if reports is None and not exits:
        late = max(watch.silent.values(), key=lambda each: each.seconds)
        ranks = ", ".join(map(str, sorted(watch.silent)))
        what = f"no progress on rank {ranks} for {late.seconds:.1f} s in section {late.heartbeat.section}"
        return Attribution(cause="hang", what=what, evidence={"deadline": late.deadline})
    known = read_rank_reports(run, reports or run.incident("none"), range(watch.spec.world_size))
    found = attribute_fault(known, exits, watch.events, oom_killed=watch.oom_killed)
    return _attribute_lost_nodes(watch) if watch.lost and reports and found.cause == "network" else found


def _attribute_lost_nodes(watch: AttemptWatch) -> Attribution:
    names = ", ".join(each.node for each in watch.lost)
    named = watch.lost if len(watch.lost) <= MAX_NAMED_NODES else watch.lost[: MAX_NAMED_NODES - 1]
    what = "; ".join(f"{each.node}: {each.what}" for each in named)
    if len(named) < len(watch.lost):
        what += f"; and {len(watch.lost) - len(named)} more"
    cause = "network" if any("connection" in each.what for each in watch.lost) else "host"
    gone = tuple(rank for each in watch.lost for rank in each.ranks)
    left = tuple(sorted({*range(watch.spec.world_size)}.difference(gone)))
    return Attribution(cause=cause, suspects=gone, victims=left, what=f"lost {what}", evidence={"nodes": names})
