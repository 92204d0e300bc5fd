"""One attempt, from the start of the ranks to the first sign that it is over."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from trimaran.core import EXIT_AGAIN, EXIT_DONE
from trimaran.launch.exit_cause import count_oom_kills
from trimaran.launch.node import Ended, Lost, Node, Orders, Silent
from trimaran.run import Follower, Heartbeat, RunDirectory, Section

Sign = Literal["done", "stopped", "trouble"]
PROPER = {EXIT_DONE: "done", EXIT_AGAIN: "stop"}  # exit codes, and what a rank writes down before it leaves with them
MOVED_SECONDS = 0.01  # times of other nodes are a little less exact than this machine's
DOUBT_SECONDS = 0.3  # for that word to be readable
PATIENT: tuple[Section, ...] = ("data", "save", "evaluation", "compile")  # what others wait for, and may take long


class AttemptWatch:
    """What is seen of an attempt: who ended, who is silent, which node is lost, what the ranks wrote.

    `highest` is how many steps all ranks have finished. `events` are those of this attempt.
    """

    def __init__(self, run: RunDirectory, nodes: Sequence[Node], orders: Orders) -> None:
        self.nodes, self.orders = nodes, orders
        self.ended: dict[int, Ended] = {}
        self.silent: dict[int, Silent] = {}
        self.lost: list[Lost] = []
        self.events: list[dict[str, Any]] = []
        self.highest = 0
        self._oom_kills = count_oom_kills()
        # An earlier attempt's lines are not of interest; they are told from ours by their number.
        self._followers = {rank: Follower(run.events(rank), backlog=0) for rank in range(orders.world_size)}
        first = 0
        for number, node in enumerate(nodes):
            here = min(node.num_ranks, orders.world_size - first)
            node.start(replace(orders, first_rank=first, num_ranks=here, node=number))
            first += here

    def look(self) -> Sign | None:
        """Take in what is new, and return how the attempt is over, if it is."""
        for node in self.nodes:
            for news in node.news():
                match news:
                    case Ended():
                        self.ended[news.rank] = news
                    case Silent():
                        self.silent[news.rank] = news
                    case Lost(back=False):
                        self.lost.append(news)
        heartbeats = {rank: heartbeat for node in self.nodes for rank, heartbeat in node.heartbeats().items()}
        self.highest = max(self.highest, min((heartbeat.step for heartbeat in heartbeats.values()), default=0))
        self._read_events()
        if self.lost or self._stands_still(heartbeats) or self.improper(doubt=DOUBT_SECONDS):
            return "trouble"
        if len(self.ended) < self.orders.world_size:
            return None
        codes = {each.code for each in self.ended.values()}
        return "done" if codes == {EXIT_DONE} else "stopped"

    def _stands_still(self, heartbeats: Mapping[int, Heartbeat]) -> bool:
        """Whether silence is trouble: not while ranks only wait for one that does what may take long.

        One that is stopped does nothing, and those who wait for it may well be in such a section themselves.
        """
        self.silent = {
            rank: each
            for rank, each in self.silent.items()
            if heartbeats[rank].entered < each.heartbeat.entered + MOVED_SECONDS
        }
        if not self.silent or any(each.stopped for each in self.silent.values()):
            return bool(self.silent)
        reached = min(each.heartbeat.step for each in self.silent.values())
        waited_for = (
            heartbeat for rank, heartbeat in heartbeats.items() if rank in self.alive and rank not in self.silent
        )
        return not any(heartbeat.section in PATIENT and heartbeat.step <= reached for heartbeat in waited_for)

    def improper(self, *, doubt: float = 0.0) -> list[Ended]:
        """Return the ends of ranks that did not end as they should: any but 0 and 75, or these without a word.

        Who left without a word gets the benefit of the `doubt` for that many seconds.
        """
        now = time.monotonic()
        words = {(event["rank"], event["kind"]) for event in self.events}
        found = []
        for each in self.ended.values():
            word = PROPER.get(each.code)
            if word is None or ((each.rank, word) not in words and now - each.time > doubt):
                found.append(each)
        return found

    @property
    def oom_killed(self) -> bool:
        """Whether the kernel has killed a process here for want of memory since the ranks were started."""
        return count_oom_kills() > self._oom_kills

    @property
    def alive(self) -> list[int]:
        return [rank for rank in range(self.orders.world_size) if rank not in self.ended]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    def _read_events(self) -> None:
        for follower in self._followers.values():
            for event in follower.new():
                if event.get("attempt", 0) == self.orders.attempt:
                    self.events.append(event)
