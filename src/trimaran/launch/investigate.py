"""What happened to an attempt in trouble: filed at once, found out within seconds, before anything is killed."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimaran.core import Incident
from trimaran.launch.attempt_watch import AttemptWatch
from trimaran.launch.attribution import Attribution, attribute_fault
from trimaran.launch.node import on_all
from trimaran.launch.rank_report import read_rank_reports
from trimaran.run import IncidentLog, RunDirectory

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.02
GATHER_SECONDS = 0.3  # after the first sign of trouble: what follows at once belongs to it
DEATH_SECONDS, HANG_SECONDS = 0.5, 2.0  # for the rank report of the living


@dataclass(frozen=True, slots=True, kw_only=True)
class Investigation:
    """An incident and when it began, by the monotonic clock: a death, or the last sign of life before a silence."""

    incident: Incident
    since: float


def investigate(run: RunDirectory, watch: AttemptWatch, incidents: IncidentLog, *, step: int) -> Investigation:
    """File the trouble that `watch` has seen: who did it, and the evidence. Ranks that live still do so afterwards."""
    since, dead = _since(watch), bool(watch.improper())
    first = _first_words(run, watch)
    known: Mapping[str, Any] = {"attempt": watch.orders.attempt, "step": step, "suspects": first.suspects}
    incident = incidents.notice(first.cause, first.what, victims=first.victims, evidence=first.evidence, **known)
    noticed = time.monotonic()
    while time.monotonic() < noticed + GATHER_SECONDS and watch.alive:
        time.sleep(LOOK_SECONDS)
        watch.look()
    folder = run.incident(incident.id)
    if watch.alive:
        try:
            on_all(
                watch.nodes, lambda node: node.collect_reports(folder, seconds=DEATH_SECONDS if dead else HANG_SECONDS)
            )
        except OSError as error:
            log.warning("the evidence cannot be filed: %s", error)
        watch.look()
    last = _last_words(run, watch, folder)
    evidence = last.evidence | ({"folder": str(folder.relative_to(run.path))} if folder.exists() else {})
    named = noticed if dead and last.suspects == first.suspects else time.monotonic()
    incident = incidents.amend(
        incident,
        cause=last.cause,
        what=last.what,
        suspects=last.suspects,
        victims=last.victims,
        evidence=evidence,
        cost={"seconds_to_detect": round(named - since, 3)},
    )
    return Investigation(incident=incident, since=since)


def _since(watch: AttemptWatch) -> float:
    deaths = [each.time for each in watch.improper()]
    silences = [each.heartbeat.entered for each in watch.silent.values()]
    losses = [each.since for each in watch.lost if each.since]
    return min([*deaths, *silences, *losses], default=time.monotonic())


def _first_words(run: RunDirectory, watch: AttemptWatch) -> Attribution:
    """Return what can be said at once."""
    if watch.improper():
        return _judge(run, watch, folder=run.incident("none"))
    if watch.lost:
        return _lost(watch)
    late = max(watch.silent.values(), key=lambda each: each.seconds)
    who = ", ".join(map(str, sorted(watch.silent)))
    what = f"no progress on rank {who} for {late.seconds:.1f} s in section {late.heartbeat.section}"
    return Attribution(cause="hang", suspects=(), victims=(), what=what, evidence={"deadline": late.deadline})


def _last_words(run: RunDirectory, watch: AttemptWatch, folder: Path) -> Attribution:
    """Return what the evidence says. Ranks that only lost the others have lost those of a node that is lost."""
    if watch.lost and not watch.improper():
        return _lost(watch)
    judged = _judge(run, watch, folder=folder)
    return _lost(watch) if watch.lost and judged.cause == "network" else judged


def _judge(run: RunDirectory, watch: AttemptWatch, *, folder: Path) -> Attribution:
    reports = read_rank_reports(run, folder, range(watch.orders.world_size))
    return attribute_fault(reports, watch.improper(), watch.events, oom_killed=watch.oom_killed)


def _lost(watch: AttemptWatch) -> Attribution:
    names = ", ".join(each.node for each in watch.lost)
    what = "; ".join(f"{each.node}: {each.what}" for each in watch.lost)
    cause = "network" if any("connection" in each.what for each in watch.lost) else "host"
    gone = tuple(rank for each in watch.lost for rank in each.ranks)
    left = tuple(rank for rank in range(watch.orders.world_size) if rank not in gone)
    return Attribution(cause=cause, suspects=gone, victims=left, what=f"lost {what}", evidence={"nodes": names})
