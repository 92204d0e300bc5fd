"""Investigates an attempt in trouble: files an incident at once, then collects evidence before the ranks are killed."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimaran.core import Incident
from trimaran.launch.supervise.attempt_watch import AttemptWatch
from trimaran.launch.supervise.attribution import Attribution, attribute_fault
from trimaran.launch.supervise.node import on_all_nodes
from trimaran.launch.supervise.rank_report import read_rank_reports
from trimaran.runs import IncidentLog, RunDirectory

log = logging.getLogger(__name__)

POLL_SECONDS = 0.02
MAX_NAMED_NODES = 6  # in an incident; with more lost nodes, their number
GATHER_SECONDS = 0.3  # after the first sign of trouble; what follows within it belongs to the same incident
REPORT_SECONDS_AFTER_DEATH, REPORT_SECONDS_IN_HANG = 0.5, 2.0  # how long live ranks may take to write their reports


@dataclass(frozen=True, slots=True, kw_only=True)
class Investigation:
    """An incident and when it began, by the monotonic clock: the first death, or the last progress before a hang."""

    incident: Incident
    since: float


def investigate(run: RunDirectory, watch: AttemptWatch, incidents: IncidentLog, *, step: int) -> Investigation:
    """File an incident for the trouble that `watch` has seen, with the ranks at fault and evidence. Kills no rank."""
    since, dead = _since(watch), bool(watch.unexpected_exits())
    first = _attribute_at_once(run, watch)
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
    final = _attribute_with_reports(run, watch, folder)
    evidence = final.evidence | ({"folder": str(folder.relative_to(run.path))} if folder.exists() else {})
    evidence |= _section(watch)
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
    return Investigation(incident=incident, since=since)


def loss_bound(watch: AttemptWatch) -> dict[str, float]:
    """Return what the trouble costs at most, as the ranks stated it last: fields of an incident's cost; maybe empty."""
    bound = next((event["data"] for event in reversed(watch.of_kind("loss_bound"))), {})
    # Without its fork server a node has lost its ranks, but not the copies in its memory.
    prefix = "node_" if any("fork server" not in each.what for each in watch.lost) else ""
    found = {name: bound.get(prefix + name) for name in ("steps", "seconds")}
    return {f"max_lost_{name}": each for name, each in found.items() if each is not None}


def _section(watch: AttemptWatch) -> dict[str, str]:
    """Return the section of the rank that has been silent for longest, as evidence; nothing if none is silent."""
    if not watch.silent:
        return {}
    return {"section": max(watch.silent.values(), key=lambda each: each.seconds).heartbeat.section}


def _since(watch: AttemptWatch) -> float:
    deaths = [each.time for each in watch.unexpected_exits()]
    silences = [each.heartbeat.entered for each in watch.silent.values()]
    losses = [each.since for each in watch.lost if each.since]
    return min([*deaths, *silences, *losses], default=time.monotonic())


def _attribute_at_once(run: RunDirectory, watch: AttemptWatch) -> Attribution:
    """Return what is known before any rank has written a report."""
    if watch.unexpected_exits():
        return _attribute(run, watch, folder=run.incident("none"))
    if watch.lost:
        return _attribute_lost_nodes(watch)
    late = max(watch.silent.values(), key=lambda each: each.seconds)
    ranks = ", ".join(map(str, sorted(watch.silent)))
    what = f"no progress on rank {ranks} for {late.seconds:.1f} s in section {late.heartbeat.section}"
    return Attribution(cause="hang", suspects=(), victims=(), what=what, evidence={"deadline": late.deadline})


def _attribute_with_reports(run: RunDirectory, watch: AttemptWatch, folder: Path) -> Attribution:
    """Return what the rank reports say. If a node is lost, it explains ranks that only lost a connection."""
    if watch.lost and not watch.unexpected_exits():
        return _attribute_lost_nodes(watch)
    attribution = _attribute(run, watch, folder=folder)
    return _attribute_lost_nodes(watch) if watch.lost and attribution.cause == "network" else attribution


def _attribute(run: RunDirectory, watch: AttemptWatch, *, folder: Path) -> Attribution:
    reports = read_rank_reports(run, folder, range(watch.spec.world_size))
    return attribute_fault(reports, watch.unexpected_exits(), watch.events, oom_killed=watch.oom_killed)


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
