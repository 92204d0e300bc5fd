"""A node on another machine: its ranks as the coordinator sees them, by what is said over the channel.

The node speaks first, several times a second, and takes its orders with the answer. Times travel as ages: the monotonic
clocks of two machines have nothing in common, and their wall clocks may differ by anything.
"""

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trimaran.core import UserError
from trimaran.launch.channel import SILENT_SECONDS, Mailbox
from trimaran.launch.node import Ended, Lost, News, Orders, Silent
from trimaran.run import Heartbeat, RunDirectory
from trimaran.run.wire import Record

KILL_SECONDS = 30.0
LOOK_SECONDS = 0.01


class RemoteNode:
    """Gives orders to a node and hears from it. A node that was lost stays so; one that comes back is a new object."""

    def __init__(self, run: RunDirectory, name: str, mailbox: Mailbox, *, num_ranks: int) -> None:
        self.name, self.num_ranks, self.mailbox = name, num_ranks, mailbox
        self._run = run
        self._given = self._obeyed = 0  # numbers of orders
        self._ranks = range(0)
        self._news: list[News] = []
        self._heartbeats: dict[int, Heartbeat] = {}
        self._apart: float | None = None  # our monotonic clock less the node's
        self._lost, self._told = "", False

    @property
    def lost(self) -> str:
        """Why the node counts as lost; empty while it does not."""
        if not self._lost:
            silence = time.monotonic() - self.mailbox.heard
            if self.mailbox.broken:
                self._lost = "its supervisor is gone"
            elif silence > SILENT_SECONDS:
                self._lost = f"no word over its connection for {silence:.1f} s"
        return self._lost

    def start(self, orders: Orders) -> None:
        self._ranks = range(orders.first_rank, orders.first_rank + orders.num_ranks)
        self._heartbeats, self._news, self._apart = {}, [], None
        self._order("start", orders=asdict(orders))

    def news(self) -> list[News]:
        self._read()
        found, self._news = self._news, []
        if self.lost and not self._told:
            self._told = True
            found.append(Lost(node=self.name, what=self.lost, ranks=tuple(self._ranks), since=self.mailbox.heard))
        return found

    def heartbeats(self) -> dict[int, Heartbeat]:
        self._read()
        return dict(self._heartbeats)

    def collect_reports(self, folder: Path, *, seconds: float, gently: bool = False) -> None:
        """Returns when the node has filed its evidence, or is known to be lost; at once where it has no `seconds`."""
        number = self._order("collect_reports", folder=str(folder.relative_to(self._run.path)), seconds=seconds,
                             **({"gently": True} if gently else {}))  # fmt: skip
        if seconds:
            self._await(number, seconds=seconds + SILENT_SECONDS)

    def ask_to_stop(self) -> None:
        self._order("stop")

    def kill(self) -> None:
        """Returns when the node has killed its ranks; one that is lost does so of itself, see `member`."""
        self._await(self._order("kill"), seconds=KILL_SECONDS)
        self._ranks = range(0)

    def dismiss(self, code: int, refusal: UserError | None = None) -> None:
        """Let the node's supervisor leave with `code`: the run is over, or not for it because of `refusal`."""
        self._order("end", code=code, **({"refusal": refusal.as_dict()} if refusal else {}))

    def _order(self, what: str, **more: Any) -> int:
        self._given += 1
        self.mailbox.outbox.append({"do": what, "number": self._given, **more})
        return self._given

    def _await(self, number: int, *, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self.lost and self._obeyed < number and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)
            self._read()

    def _read(self) -> None:
        while self.mailbox.inbox:
            letter = self.mailbox.inbox.popleft()
            if "obeyed" in letter:
                self._obeyed = max(self._obeyed, int(letter["obeyed"]))
            now = self._when(letter)
            self._heartbeats |= {int(rank): heartbeat_of(each, now) for rank, each in letter.get("pulses", {}).items()}
            self._news += [news_of(self.name, each, now) for each in letter.get("news", [])]

    def _when(self, letter: Record) -> float:
        """Return when a letter was written, by our clock. What it took on its way is that of the attempt's first one:
        a rank that stands still must not seem to move because letters take now more, now less time."""
        if self._apart is None and "clock" in letter:
            self._apart = time.monotonic() - letter["clock"]
        return time.monotonic() if self._apart is None or "clock" not in letter else letter["clock"] + self._apart


def record_of_heartbeat(heartbeat: Heartbeat, now: float) -> Record:
    """Return `heartbeat` with ages for times."""
    return asdict(heartbeat) | {"entered": now - heartbeat.entered, "alive": now - heartbeat.alive}


def heartbeat_of(record: Record, now: float) -> Heartbeat:
    """Return the heartbeat that `record_of_pulse` made `record` of, by this machine's clock."""
    return Heartbeat(**record | {"entered": now - record["entered"], "alive": now - record["alive"]})


def record_of_news(news: News, now: float) -> Record:
    match news:
        case Ended():
            return {"kind": "ended", "rank": news.rank, "code": news.code, "age": now - news.time}
        case Silent():
            heartbeat = record_of_heartbeat(news.heartbeat, now)
            return {"kind": "silent", "pulse": heartbeat} | {key: getattr(news, key) for key in SILENT}
        case Lost():
            return {"kind": "lost", "what": news.what, "ranks": news.ranks}


SILENT = ("rank", "seconds", "deadline", "stopped")


def news_of(node: str, record: Record, now: float) -> News:
    """Return the news that `record_of_news` made `record` of; raises KeyError for what is none."""
    return KINDS[record["kind"]](node, record, now)


KINDS: dict[str, Callable[[str, Record, float], News]] = {
    "ended": lambda node, told, now: Ended(rank=told["rank"], code=told["code"], time=now - told["age"]),
    "silent": lambda node, told, now: Silent(
        heartbeat=heartbeat_of(told["pulse"], now), **{key: told[key] for key in SILENT}
    ),
    "lost": lambda node, told, now: Lost(node=node, what=told["what"], ranks=tuple(told["ranks"])),
}
