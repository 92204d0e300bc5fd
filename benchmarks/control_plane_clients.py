"""The simulated part of `control_plane.py`: nodes and ranks as light clients of the real protocol, without threads.

A node has the connections of a real one: one for messages, and one for the requests of its ranks (`StoreRelay`, the
real class). What a rank asks its node over a local connection is a call here; its requests follow one another after a
pause (`REQUEST_SECONDS`), so that they are not collected better than those of real ranks.
"""

import heapq
import json
import os
import selectors
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from itertools import count
from math import inf
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from trimaran.core import EXIT_AGAIN
from trimaran.launch.supervise.key_store import StoreRelay
from trimaran.launch.supervise.remote_node import record_of_heartbeat
from trimaran.runs import Heartbeat, RunDirectory, lease
from trimaran.runs.wire import FrameAuthenticator, FrameReader, frame, new_nonce, proof, unpack

NUM_CLIENTS = max(2, min(8, len(os.sched_getaffinity(0)) - 2))  # processes
EXCHANGE_SECONDS = 0.1  # of a node, if the coordinator names no other
STEP_SECONDS = 0.5
RETRY_SECONDS, RANK_RETRY_SECONDS = 0.5, 0.05
REQUEST_SECONDS = 0.001  # between two requests of a rank
MAX_PER_TURN = 512  # requests of ranks, and answers to relays
LONE_GROUPS, SHARED_GROUPS = 13, 4  # of a rank, beside the group of all ranks, with FSDP and tensor parallelism
Request = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One simulated run: its directory and size. `direct`: ranks have connections of their own to the coordinator."""

    run: str
    nodes: int
    ranks_per_node: int
    direct: bool = False


def requests_of_rank(rank: int, world_size: int) -> Generator[Request, Request, None]:
    """Yield what a rank asks the store until training starts, as traced in real runs (gloo with lazy connections).

    It publishes an address for each process group, and reads those of the ranks that it communicates with: in the group
    of all ranks its neighbours and, for all-reduces, those at distances of powers of two. On GPUs, NCCL's id of each
    group is published by its first rank.
    """
    address = "QUJDREVGR0hJ" * 16
    for group in range(LONE_GROUPS + SHARED_GROUPS):
        yield {"op": "set", "keys": [f"{group}//{rank}//cpu//0/{rank}"], "values": [address]}
    yield {"op": "set", "keys": [f"0//cpu//0/{rank}"], "values": [address]}
    distances = [1, *(2**power for power in range(world_size.bit_length()) if 2**power < world_size)]
    peers = {(rank + distance) % world_size for distance in distances} - {rank}
    for key in [*(f"0//cpu//0/{peer}" for peer in peers),
                *(f"{group}//{(rank + 1) % world_size}//cpu//0/{(rank + 1) % world_size}"
                  for group in range(SHARED_GROUPS))]:  # fmt: skip
        answer = yield {"op": "get", "keys": [key], "seconds": 600.0}
        assert len(unpack(answer["values"][0])) == 144
    for group in range(1 + SHARED_GROUPS):
        if rank == 0:
            yield {"op": "set", "keys": [f"nccl/{group}"], "values": [address]}
        else:
            yield {"op": "get", "keys": [f"nccl/{group}"], "seconds": 600.0}


class Loop:
    """Sockets and timers of one client process. `relays` have requests to send at the end of the turn.

    The messages of nodes go first, and a turn does not much else: a real node sends them in a thread of its own.
    """

    def __init__(self, token: str) -> None:
        self.token, self.selector, self.counts = token, selectors.DefaultSelector(), Counter[str]()
        self.relays: set[StoreRelay] = set()
        self.asking: deque[tuple[float, Callable[[], None]]] = deque()  # ranks, and when they ask
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._numbers), call))

    def turn(self) -> None:
        """Handle what has arrived and what is due."""
        due = min(self._timers[0][0] if self._timers else inf, self.asking[0][0] if self.asking else inf)
        ready = self.selector.select(min(0.05, max(0.0, due - time.monotonic())))
        others = [each for each in ready if not each[0].data.of_node]
        for key, events in (each for each in ready if each[0].data.of_node):
            key.data.serve(events)
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()
        for key, events in others[:MAX_PER_TURN]:
            key.data.serve(events)
        for _ in range(MAX_PER_TURN):
            if not self.asking or self.asking[0][0] > now:
                break
            self.asking.popleft()[1]()
        while self.relays:
            self.relays.pop().flush()


class Client:
    """One connection to the channel, without threads. `answered` gets None when it is open, then each answer.

    `of_node`: it is for the messages of a node.
    """

    def __init__(self, loop: Loop, address: str, answered: Callable[[Request | None], None],
                 lost: Callable[[], None], *, of_node: bool = False) -> None:  # fmt: skip
        self.loop, self._answered, self._lost, self.of_node = loop, answered, lost, of_node
        self._reader, self._nonce, self._theirs = FrameReader(), new_nonce(), ""
        self._authenticator: FrameAuthenticator | None = None
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        host, _, port = address.rpartition(":")
        self.socket.connect_ex((host, int(port)))
        self._unsent, self._events = bytearray(), selectors.EVENT_READ
        loop.selector.register(self.socket, selectors.EVENT_READ, self)

    def send(self, request: Request) -> None:
        self.loop.counts[request["op"]] += 1
        self._write(frame(request, self._authenticator))

    def close(self) -> None:
        if self.socket.fileno() >= 0:
            self.loop.selector.unregister(self.socket)
            self.socket.close()

    def _write(self, data: bytes) -> None:
        self._unsent += data
        if len(self._unsent) == len(data):  # else the selector waits until more can be sent
            self._send_unsent()

    def _send_unsent(self) -> None:
        try:
            sent = self.socket.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._fail()
            return
        del self._unsent[:sent]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        if events != self._events:
            self._events = events
            self.loop.selector.modify(self.socket, events, self)

    def serve(self, events: int) -> None:
        if self.socket.fileno() < 0:
            return  # closed in this turn
        if events & selectors.EVENT_WRITE and self._unsent:
            self._send_unsent()
        if events & selectors.EVENT_READ and self.socket.fileno() >= 0:
            self._receive()

    def _fail(self) -> None:
        if self.socket.fileno() >= 0:
            self.close()
            self.loop.counts["lost connections"] += 1
            self._lost()

    def _receive(self) -> None:
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._fail()
            return
        self._reader.feed(data)
        while self.socket.fileno() >= 0 and (record := self._reader.next()) is not None:
            if self._authenticator is not None:
                self._answered(record)
            elif not self._theirs:
                self._theirs = record["nonce"]
                token, ours = self.loop.token, self._nonce
                self._write(frame({"nonce": ours, "proof": proof(token, "client", self._theirs, ours)}))
            else:
                assert record["proof"] == proof(self.loop.token, "server", self._theirs, self._nonce)
                self._reader.authenticate_with(FrameAuthenticator(self.loop.token, "server", self._theirs, self._nonce))
                self._authenticator = FrameAuthenticator(self.loop.token, "client", self._theirs, self._nonce)
                self._answered(None)


class SimulatedRank:
    """A rank that does its requests one after the other, and is then `joined`.

    It asks `relay`, that of its node, or, if that is None, the coordinator over a connection of its own.
    """

    def __init__(self, node: "SimulatedNode", rank: int, spec: Mapping[str, Any], relay: StoreRelay | None) -> None:
        self.rank, self.joined, self.attempt, self._ended = rank, False, spec["attempt"], False
        self._fleet, self._spec, self._relay = node.fleet, spec, relay
        self._requests = requests_of_rank(rank, spec["world_size"])
        self._client: Client | None = None
        self._pending: Request | None = None
        if relay is None:
            self._connect()
        else:
            self._answered(None)

    def end(self) -> None:
        self._ended = True
        if self._client is not None:
            self._client.close()

    def _connect(self) -> None:
        self._client = Client(self._fleet.loop, self._spec["store"], self._answered, self._retry)

    def _retry(self) -> None:
        """Connect again as `token_store.connect` does; only before the first answer is a lost connection no fault."""
        if self._pending is None:
            self._fleet.loop.after(RANK_RETRY_SECONDS, self._connect)

    def _answered(self, answer: Request | None) -> None:
        if self._ended or (answer is not None and "error" in answer):
            return  # the attempt is over
        try:
            request = next(self._requests) if answer is None else self._requests.send(answer)
        except StopIteration:
            self.joined = True
            self._fleet.note_event(self.rank, "ready", self.attempt)
            return
        self._pending = request | {"attempt": self.attempt}
        self._fleet.loop.asking.append((time.monotonic() + REQUEST_SECONDS, self._ask))

    def _ask(self) -> None:
        if self._ended or self._pending is None:
            return
        self._fleet.loop.counts["requests of ranks"] += 1
        if self._relay is not None:
            self._relay.answer(self._pending, self._answered)
            self._fleet.loop.relays.add(self._relay)
        elif self._client is not None and self._client.socket.fileno() >= 0:
            self._client.send(self._pending)


class SimulatedNode:
    """A node: sends heartbeats of its ranks, and executes commands. `silent`: it does nothing any more, as if lost."""

    def __init__(self, fleet: "Fleet", name: str) -> None:
        self.fleet, self.name, self.silent = fleet, name, False
        self.ranks: list[SimulatedRank] = []
        self._out: list[Request] = []
        self._ended = False
        self._client: Client | None = None
        self._upstream: Client | None = None  # of the relay
        self._since = 0.0
        self.connect()

    def connect(self) -> None:
        self._session = os.urandom(8).hex()
        self._out = [{"num_ranks": self.fleet.ranks_per_node, "time": time.time(), "host": self.name}]
        address = self.fleet.coordinator()
        if not address:
            self.fleet.loop.after(RETRY_SECONDS, self.connect)
            return
        self._client = Client(self.fleet.loop, address, self._answered, self._lose, of_node=True)

    def fall_silent(self) -> None:
        self.silent = True
        self.kill()

    def kill(self) -> None:
        for rank in self.ranks:
            rank.end()
        self.ranks = []
        if self._upstream is not None:
            self._upstream.close()

    def _lose(self) -> None:
        self.kill()
        if not self.silent and not self._ended:
            self.fleet.note("coordinator lost")
            self.fleet.loop.after(RETRY_SECONDS, self.connect)

    def _answered(self, answer: Request | None) -> None:
        if self.silent:
            return
        if answer is None:
            self._exchange()
            return
        if "error" in answer:
            raise AssertionError(f"{self.name}: {answer['error']}")
        for command in answer["messages"]:
            self._execute(command)
        # What a node has to report it sends soon, as the real one does.
        usual = answer.get("seconds", EXCHANGE_SECONDS)
        self.fleet.loop.after(EXCHANGE_SECONDS if self._out else usual, self._exchange)

    def _exchange(self) -> None:
        if self.silent or self._client is None or self._client.socket.fileno() < 0 or self._ended:
            return
        if self.ranks:
            self._out.append(self._report())
        messages, self._out = self._out, []
        self._client.send({"op": "exchange", "node": self.name, "session": self._session, "messages": messages})

    def _report(self) -> Request:
        now = time.monotonic()
        step = int((now - self._since) / STEP_SECONDS) + 1
        heartbeats = {}
        for each in self.ranks:
            entered = now - (now - self._since) % STEP_SECONDS if each.joined else self._since
            heartbeat = Heartbeat(section="step" if each.joined else "start", step=step if each.joined else 0,
                                  entered=entered, alive=now - 0.05, answered=0)  # fmt: skip
            heartbeats[str(each.rank)] = record_of_heartbeat(heartbeat, now)
        return {"events": [], "heartbeats": heartbeats, "clock": now}

    def _connect_relay(self, spec: Mapping[str, Any]) -> None:
        """Connect the relay to the coordinator, and start the ranks when it is connected."""

        def answered(answer: Request | None) -> None:
            if answer is None:
                self._start_ranks(spec, relay)
            else:
                relay.receive(answer)
                self.fleet.loop.relays.add(relay)

        upstream = Client(self.fleet.loop, spec["store"], answered, lambda: self._lose_relay(spec, upstream))
        relay = StoreRelay(spec["attempt"], upstream.send)
        self._upstream = upstream

    def _lose_relay(self, spec: Mapping[str, Any], upstream: "Client") -> None:
        if upstream is self._upstream and not self.ranks:
            self._start_ranks(spec, None)  # as a real node does that cannot connect

    def _start_ranks(self, spec: Mapping[str, Any], relay: StoreRelay | None) -> None:
        self.ranks = [
            SimulatedRank(self, spec["first_rank"] + local, spec, relay) for local in range(spec["num_ranks"])
        ]

    def _execute(self, command: Request) -> None:
        self._out.append({"executed": command["number"]})
        match command["command"]:
            case "start":
                spec, self._since = command["spec"], time.monotonic()
                self.fleet.note(f"start {spec['attempt']}")
                if self.fleet.options.direct:
                    self._start_ranks(spec, None)
                else:
                    self._connect_relay(spec)
                self.fleet.start_ranks_of_coordinator(spec)
            case "stop":
                self.fleet.note("stop")
                events = [{"kind": "ended", "rank": each.rank, "code": EXIT_AGAIN, "age": 0.0} for each in self.ranks]
                for each in self.ranks:
                    self.fleet.note_event(each.rank, "stop", each.attempt)
                self._out.append(self._report() | {"events": events})
            case "kill":
                self.fleet.note("kill")
                self.kill()
            case "end":
                self.fleet.note("end")
                self._ended = True
                self.kill()
                assert self._client is not None
                self._client.close()


class Fleet:
    """All nodes of one client process. The first process also has the ranks of the coordinator's own node."""

    def __init__(self, options: "Options", number: int, token: str) -> None:
        self.loop, self.options, self.number = Loop(token), options, number
        self.run, self.ranks_per_node = RunDirectory(Path(options.run)), options.ranks_per_node
        self._address, self._address_due = "", 0.0
        self._own = SimpleNamespace(fleet=self)
        self._own_ranks: list[SimulatedRank] = []
        self._own_attempt = -1
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}
        names = [f"node-{each:05d}" for each in range(1, options.nodes)][number::NUM_CLIENTS]
        self.nodes = [SimulatedNode(self, name) for name in names]

    def note(self, what: str) -> None:
        self.first.setdefault(what, time.monotonic())
        self.last[what] = time.monotonic()

    def note_event(self, rank: int, kind: str, attempt: int) -> None:
        """Append an event of a rank to its file in the run directory, as a rank does."""
        self.note(f"{kind} {attempt}")
        event = {"kind": kind, "rank": rank, "step": 0, "time": time.time(), "attempt": attempt, "data": {}}
        with self.run.events(rank).open("ab") as file:
            file.write(json.dumps(event).encode() + b"\n")

    def coordinator(self) -> str:
        """Return the address of the coordinator; an empty text while the one that we know is lost."""
        if time.monotonic() >= self._address_due:  # one look a while for all nodes of this process
            self._address_due = time.monotonic() + RETRY_SECONDS / 2
            holder = lease.read_holder(self.run)
            is_alive = holder is not None and psutil.pid_exists(holder.pid)
            self._address = holder.address if holder is not None and is_alive else ""
        return self._address

    def start_ranks_of_coordinator(self, spec: Mapping[str, Any]) -> None:
        if self.number == 0 and spec["attempt"] > self._own_attempt:
            self._own_attempt = spec["attempt"]
            for each in self._own_ranks:
                each.end()
            node: Any = self._own
            self._own_ranks = [SimulatedRank(node, rank, spec, None) for rank in range(self.ranks_per_node)]

    def num_joined(self, attempt: int) -> int:
        ranks = [*self._own_ranks, *(rank for node in self.nodes for rank in node.ranks)]
        return sum(rank.joined and rank.attempt == attempt for rank in ranks)

    def lose(self, num: int) -> None:
        """Let nodes fall silent, and connect as many new ones a second later."""
        lost = self.nodes[:num]
        for node in lost:
            node.fall_silent()
        self.note("lost")
        self.nodes = self.nodes[num:]
        self.loop.after(1.0, lambda: self.nodes.extend(SimulatedNode(self, f"{node.name}-new") for node in lost))

    def serve(self, pipe: Pipe) -> None:
        """Simulate until the driver says `end`. It may ask for the state, and for nodes to be lost."""
        while True:
            self.loop.turn()
            while pipe.poll():
                match pipe.recv():
                    case ("joined", attempt):
                        pipe.send(self.num_joined(attempt))
                    case ("times",):
                        pipe.send((self.first, self.last, dict(self.loop.counts)))
                    case ("lose", num):
                        self.lose(num)
                    case ("end",):
                        return
