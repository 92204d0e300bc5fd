"""A node on another machine, as the coordinator sees it through the messages on the channel.

The node sends first, several times a second, and gets its commands with the answer. Times are sent as ages: the
monotonic clocks of two machines have nothing in common, and their wall clocks may differ by any amount.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from trimaran.core import UserError, read_regular_text
from trimaran.launch.supervise.channel import SILENT_SECONDS, Mailbox
from trimaran.launch.supervise.head_client import FileReceiver
from trimaran.launch.supervise.node import AttemptSpec, NodeEvent, NodeLost, RankEnded, RankSilent
from trimaran.runs import Heartbeat, LinkSpeed, Record, RunDirectory

KILL_SECONDS = 30.0
AGE_DIGITS = 4  # of seconds; `attempt_watch` tolerates 0.01 s
POLL_SECONDS = 0.5  # between checks whether a node is lost while we wait for its message


class RemoteNode:
    """Sends commands to a node and reads its messages. A lost node stays lost; if it returns, it is a new object.

    `own_disk`: the node has a run directory of its own; it gets recipe and plan with each start, and sends its files.
    """

    def __init__(
        self, run: RunDirectory, name: str, mailbox: Mailbox, *, num_ranks: int, own_disk: bool = False
    ) -> None:
        self.name, self.num_ranks, self.mailbox = name, num_ranks, mailbox
        self.host = name  # as the scheduler knows it; the node's first message says it
        self.channel_address = ""  # its first message says it, too
        self._leaving = False
        self._links: dict[str, LinkSpeed | None] = {}
        self._speed: float | None = None
        self._run = run
        self._files = FileReceiver(run, name) if own_disk else None
        self._sent = self._executed = 0  # numbers of commands
        self._ranks = range(0)
        self._events: list[NodeEvent] = []
        self._heartbeats: dict[int, Heartbeat] = {}
        self._clock_offset: float | None = None  # our monotonic clock minus the node's
        self._lost, self._is_loss_reported = "", False

    @property
    def lost(self) -> str:
        """Why the node counts as lost; empty while it does not."""
        if not self._lost:
            silence = self.mailbox.silent_seconds
            if self.mailbox.broken:
                self._lost = "its supervisor is gone"
            elif silence > SILENT_SECONDS:
                self._lost = f"no message over its connection for {silence:.1f} s"
                self.mailbox.given_up = True
        return self._lost

    @property
    def leaving(self) -> bool:
        """Whether the node's supervisor was asked to stop."""
        self._read()
        return self._leaving

    def start(self, spec: AttemptSpec) -> None:
        self._ranks = range(spec.first_rank, spec.first_rank + spec.num_ranks)
        self._heartbeats, self._events, self._clock_offset = {}, [], None
        texts: dict[str, Any] = {}
        if self._files is not None:
            texts = {"recipe": read_regular_text(self._run.recipe), "plan": read_regular_text(self._run.plan)}
        # The node knows the token, which must not be sent: frames are not encrypted.
        self._send("start", spec=asdict(replace(spec, token="")), **({"files": texts} if texts else {}))

    def start_ranks(self, spec: AttemptSpec, ranks: Sequence[int]) -> None:
        """See `Node.start_ranks`. A node that has just connected has no other ranks."""
        if not self._ranks:
            self._ranks = range(spec.first_rank, spec.first_rank + spec.num_ranks)
        for rank in ranks:
            self._heartbeats.pop(rank, None)
        self._send("start_ranks", spec=asdict(replace(spec, token="")), ranks=[*ranks])

    def kill_ranks(self, ranks: Sequence[int]) -> None:
        self._send("kill_ranks", ranks=[*ranks])

    def poll(self) -> list[NodeEvent]:
        self._read()
        events, self._events = self._events, []
        if self.lost and not self._is_loss_reported:
            self._is_loss_reported = True
            events.append(NodeLost(node=self.name, what=self.lost, ranks=tuple(self._ranks), since=self.mailbox.heard))
        return events

    def heartbeats(self) -> dict[int, Heartbeat]:
        self._read()
        return dict(self._heartbeats)

    def collect_reports(self, folder: Path, *, seconds: float, gently: bool = False) -> None:
        """Return when the node has written its reports or is lost; at once if `seconds` is 0."""
        number = self._send("collect_reports", folder=str(folder.relative_to(self._run.path)), seconds=seconds,
                            **({"gently": True} if gently else {}))  # fmt: skip
        if seconds:
            self._wait_until_executed(number, seconds=seconds + SILENT_SECONDS)

    def request_stop(self) -> None:
        self._send("stop")

    def request_leave(self) -> None:
        self._send("leave")

    def measure_link(self, peer: str, address: str, *, seconds: float) -> None:
        self._send("measure_link", peer=peer, address=address, seconds=seconds)

    def begin_speed(self, kind: str, *, seconds: float) -> None:
        self._send("measure_speed", kind=kind, seconds=seconds)

    def take_speed(self) -> float | None:
        self._read()
        speed, self._speed = self._speed, None
        return speed

    def take_links(self) -> dict[str, LinkSpeed | None]:
        self._read()
        links, self._links = self._links, {}
        return links

    def kill(self) -> None:
        """Return when the node has killed its ranks. A lost node kills them by itself, see `follower`."""
        self._wait_until_executed(self._send("kill"), seconds=KILL_SECONDS)
        self._ranks = range(0)

    def dismiss(self, code: int, refusal: UserError | None = None) -> None:
        """Let the node's supervisor exit with `code`: the run is over, or the node is turned away with `refusal`."""
        self._send("end", code=code, **({"refusal": refusal.as_dict()} if refusal else {}))

    def _send(self, command: str, **fields: Any) -> int:
        self._sent += 1
        self.mailbox.outbox.append({"command": command, "number": self._sent, **fields})
        return self._sent

    def _wait_until_executed(self, number: int, *, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self.lost and self._executed < number and time.monotonic() < until:
            self.mailbox.changed.wait(POLL_SECONDS)  # no busy loop: there is a thread for each of many nodes
            self.mailbox.changed.clear()
            self._read()

    def _read(self) -> None:
        while self.mailbox.inbox:
            message = self.mailbox.inbox.popleft()
            if self._files is not None and "files" in message:
                self._files.write(message["files"])  # first: what follows may be about them
            if "executed" in message:
                self._executed = max(self._executed, int(message["executed"]))
            if "speed" in message:
                self._speed = float(message["speed"])
            if "link" in message:
                speed = {name: each for name, each in message["link"].items() if name != "peer"}
                self._links[str(message["link"]["peer"])] = LinkSpeed(**speed) if speed else None
            self._leaving |= bool(message.get("leaving", False))
            now = time.monotonic()
            if "clock" in message:
                # The transit time is that of the attempt's first message: with the real one, which varies, a hung rank
                # would seem to move.
                if self._clock_offset is None:
                    self._clock_offset = now - message["clock"]
                now = message["clock"] + self._clock_offset
            heartbeats = message.get("heartbeats", {})
            self._heartbeats |= {int(rank): heartbeat_of_record(each, now) for rank, each in heartbeats.items()}
            self._events += [event_of_record(self.name, each, now) for each in message.get("events", [])]


def record_of_heartbeat(heartbeat: Heartbeat, now: float) -> list[Any]:
    """Return the fields of `heartbeat` with ages instead of times. It is short: each rank has one in each message."""
    entered, alive = round(now - heartbeat.entered, AGE_DIGITS), round(now - heartbeat.alive, AGE_DIGITS)
    return [heartbeat.section, heartbeat.step, entered, alive, heartbeat.answered, heartbeat.saved]


def heartbeat_of_record(record: Sequence[Any], now: float) -> Heartbeat:
    """Return the heartbeat in a record of `record_of_heartbeat`, with times of this machine's clock."""
    section, step, entered, alive, answered, saved = record
    return Heartbeat(
        section=section, step=step, entered=now - entered, alive=now - alive, answered=answered, saved=saved
    )


def record_of_event(event: NodeEvent, now: float) -> Record:
    match event:
        case RankEnded():
            return {"kind": "ended", "rank": event.rank, "code": event.code, "age": now - event.time}
        case RankSilent():
            heartbeat = record_of_heartbeat(event.heartbeat, now)
            return {"kind": "silent", "heartbeat": heartbeat} | {key: getattr(event, key) for key in SILENT_FIELDS}
        case NodeLost():
            return {"kind": "lost", "what": event.what, "ranks": event.ranks}


SILENT_FIELDS = ("rank", "seconds", "deadline", "stopped")


def event_of_record(node: str, record: Record, now: float) -> NodeEvent:
    """Return the event in a record of `record_of_event`. Raises KeyError for an unknown kind."""
    match record["kind"]:
        case "ended":
            return RankEnded(rank=record["rank"], code=record["code"], time=now - record["age"])
        case "silent":
            heartbeat = heartbeat_of_record(record["heartbeat"], now)
            return RankSilent(heartbeat=heartbeat, **{key: record[key] for key in SILENT_FIELDS})
        case "lost":
            return NodeLost(node=node, what=record["what"], ranks=tuple(record["ranks"]))
    raise KeyError(record["kind"])
