"""Watches one attempt, from the start of its ranks until it is done, stopped or in trouble."""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

from trimaran.core import EXIT_AGAIN, EXIT_DONE
from trimaran.launch.supervise.node import AttemptSpec, Node, NodeLost, RankEnded, RankSilent
from trimaran.machine import count_oom_kills
from trimaran.runs import AttemptOutcome, Heartbeat, RunDirectory, RunReader, Section

# The event that a rank writes before it exits with one of these codes. An exit without it is unexpected.
LAST_EVENTS = {EXIT_DONE: "done", EXIT_AGAIN: "stop"}
LAST_EVENT_SECONDS = 0.3  # until that event is readable
FILES_PER_POLL = 512
CLOCK_TOLERANCE_SECONDS = 0.01  # times of other nodes are this much less exact than those of this machine
# Other ranks may wait long for a rank in another section than these: it reads, writes, compiles or generates.
SHORT_SECTIONS: tuple[Section, ...] = ("start", "first", "step", "finish", "close")


class AttemptWatch:
    """The state of an attempt: which ranks ended, which are silent, which nodes are lost, and the ranks' events."""

    def __init__(
        self, run: RunDirectory, nodes: Sequence[Node], spec: AttemptSpec, *, files_per_poll: int = FILES_PER_POLL
    ) -> None:
        self._files_per_poll = files_per_poll  # events of rank 0 and of the next so many ranks are read
        self.nodes: Sequence[Node] = nodes
        self.spec = spec
        self.lead_ranks: tuple[int, ...] = (0,)  # one of them commits the last checkpoint and the model
        self.ended: dict[int, RankEnded] = {}
        self.silent: dict[int, RankSilent] = {}
        self.lost: list[NodeLost] = []
        self.events: list[dict[str, Any]] = []  # of this attempt
        self.highest_step = 0  # that all ranks have finished
        # The last step is done, and the last checkpoint and the model are on disk: the rank that commits both knows.
        self.is_saved = False
        self._oom_kills = count_oom_kills()
        # Skip the lines of earlier attempts; those that are still being written are recognised by their number.
        self._ranks = range(spec.world_size)
        self._reader = RunReader(run).follow(*map(run.events, self._ranks), backlog=0)
        self._turns = cycle(self._ranks)
        self._by_kind: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self._written: set[tuple[int, str]] = set()  # ranks and kinds of `events`
        first = 0
        for number, node in enumerate(nodes):
            here = min(node.num_ranks, spec.world_size - first)
            node.start(replace(spec, first_rank=first, num_ranks=here, node=number))
            first += here

    def poll(self) -> AttemptOutcome | None:
        """Read what is new, and return how the attempt ended; None while it runs."""
        num_known = len(self.ended) + len(self.silent) + len(self.lost)
        for node in self.nodes:
            for event in node.poll():
                match event:
                    case RankEnded():
                        self.ended[event.rank] = event
                    case RankSilent():
                        self.silent[event.rank] = event
                    case NodeLost():
                        self.lost.append(event)
        heartbeats = {rank: heartbeat for node in self.nodes for rank, heartbeat in node.heartbeats().items()}
        self.highest_step = max(self.highest_step, self._finished_step(heartbeats))
        has_news = len(self.ended) + len(self.silent) + len(self.lost) > num_known
        ranks = {*self._ranks}
        if not has_news and all(map(self._has_last_event, self.ended.values())):
            ranks = {0, *islice(self._turns, min(self._files_per_poll, self.spec.world_size))}  # the others soon
        for rank in ranks:
            for event in self._reader.events(rank):
                if event.get("attempt", 0) == self.spec.attempt:
                    self.events.append(event)
                    self._by_kind[event["kind"]].append(event)
                    self._written.add((event["rank"], event["kind"]))
        told = any(event["rank"] in self.lead_ranks for event in self.of_kind("trained"))
        marked = any(rank in heartbeats and heartbeats[rank].saved for rank in self.lead_ranks)
        self.is_saved = self.is_saved or told or marked
        return self._outcome(heartbeats)

    def _finished_step(self, heartbeats: Mapping[int, Heartbeat]) -> int:
        return min((heartbeat.step for heartbeat in heartbeats.values()), default=0)

    def _outcome(self, heartbeats: Mapping[int, Heartbeat]) -> AttemptOutcome | None:
        """Return how the attempt ended, from what is known now; None while it runs."""
        if self.lost or self._is_hung(heartbeats) or self.unexpected_exits(grace_seconds=LAST_EVENT_SECONDS):
            return "trouble"
        if len(self.ended) < self.spec.world_size:
            return None
        codes = {each.code for each in self.ended.values()}
        return "done" if codes == {EXIT_DONE} else "stopped"

    def _is_hung(self, heartbeats: Mapping[int, Heartbeat]) -> bool:
        """Return whether silent ranks mean a hang: one is stopped, or none waits for a rank in a long section."""
        self.silent = {
            rank: each
            for rank, each in self.silent.items()
            if heartbeats[rank].entered < each.heartbeat.entered + CLOCK_TOLERANCE_SECONDS
        }
        if not self.silent or any(each.stopped for each in self.silent.values()):
            return bool(self.silent)
        reached = min(each.heartbeat.step for each in self.silent.values())
        waited_for = (
            heartbeat for rank, heartbeat in heartbeats.items() if rank not in self.ended and rank not in self.silent
        )
        return not any(
            heartbeat.section not in SHORT_SECTIONS and heartbeat.step <= reached for heartbeat in waited_for
        )

    def unexpected_exits(self, *, grace_seconds: float = 0.0) -> list[RankEnded]:
        """Return the ranks that ended with another code than 0 or 75, or with one of these but without its last event.

        A missing last event counts only after `grace_seconds`, unless the rank wrote an `error` event instead.
        """
        now = time.monotonic()
        unexpected = []
        for each in self.ended.values():
            is_known = each.code not in LAST_EVENTS or (each.rank, "error") in self._written
            if not self._has_last_event(each) and (is_known or now - each.time > grace_seconds):
                unexpected.append(each)
        return unexpected

    def _has_last_event(self, ended: RankEnded) -> bool:
        return (ended.rank, LAST_EVENTS.get(ended.code, "")) in self._written

    @property
    def oom_killed(self) -> bool:
        """Whether the kernel's OOM killer has killed a process here since the ranks were started."""
        return count_oom_kills() > self._oom_kills

    @property
    def alive(self) -> list[int]:
        return [rank for rank in range(self.spec.world_size) if rank not in self.ended]

    def not_done(self) -> list[str]:
        """Return the kinds of the events that were to follow training and that the rank for it has not written."""
        mine = [event for event in self.events if event["rank"] in self.lead_ranks]
        planned = next((event["data"].get("next", []) for event in mine if event["kind"] == "trained"), [])
        written = {event["kind"] for event in mine if event["kind"] != "unfinished"}
        reported = {event["data"].get("what") for event in mine if event["kind"] == "unfinished"}
        return [kind for kind in planned if kind not in written and kind not in reported]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [*self._by_kind[kind]]
