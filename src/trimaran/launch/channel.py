"""Where the ranks and the nodes of a run meet: a small server in the supervisor that wants the run's token.

One thread serves everybody. Whoever has not proved the token costs a socket for two seconds and changes nothing.
"""

import contextlib
import errno
import resource
import selectors
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from trimaran.core import UserError
from trimaran.launch.key_store import Keys
from trimaran.run.wire import Reader, Record, Seal, WireError, fingerprint, frame, matches, new_nonce, proof

STRANGERS = 64  # at once; the one that has waited longest makes room
STRANGER_SECONDS = 2.0
BACKLOG = 1024
SILENT_SECONDS = 5.0  # a node that has said nothing for longer is lost
WAITING_BYTES = 64 * 2**20  # of answers that a guest does not fetch


@dataclass(eq=False, slots=True)
class Connection:
    """One connection. A node's has a desk."""

    socket: socket.socket
    nonce: str
    since: float
    reader: Reader = field(default_factory=Reader)
    seal: Seal | None = None
    unsent: bytearray = field(default_factory=bytearray)
    desk: "Mailbox | None" = None

    def reply(self, record: Record) -> None:
        self.unsent += frame(record, self.seal)


@dataclass(eq=False, slots=True)
class Mailbox:
    """What a node and the coordinator have for each other. `heard` is when the node spoke last (monotonic clock),
    `session` what it calls this stretch of its life, `broken` whether its connection is gone."""

    session: str
    heard: float
    inbox: deque[Record] = field(default_factory=deque)
    outbox: deque[Record] = field(default_factory=deque)
    broken: bool = False

    @property
    def in_use(self) -> bool:
        return not self.broken and time.monotonic() - self.heard < SILENT_SECONDS


class Channel:
    """The server, bound to `host` alone; serves from its making until `close`. `refused` counts by reason."""

    def __init__(self, host: str, token: str, *, port: int = 0, own_node: str = "") -> None:
        self.refused: Counter[str] = Counter()
        self.desks: dict[str, Mailbox] = {}
        self._own_node = own_node  # nobody else speaks for it
        self._token, self._run = token, fingerprint(token)
        self._attempts: dict[int, Keys] = {}
        self._over = -1  # this attempt and all before it are history
        self._guests: dict[int, Connection] = {}
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._listener = _listen(host, port)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # every rank has a line or two
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="channel", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Where ranks and nodes find this channel: `host:port`."""
        host, port = self._listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def num_strangers(self) -> int:
        return sum(guest.seal is None for guest in list(self._guests.values()))

    def forget(self, attempt: int) -> None:
        """Drop the values of `attempt` and of all before it. Whoever waits for one, or asks later, hears it is over."""
        self._call(lambda: self._end(attempt))

    def close(self) -> None:
        """Hang up on everybody, and return when the port is free."""
        if self._thread.is_alive():
            self._calls.put(None)
            self._wake.send(b"!")
            self._thread.join()

    def _call(self, function: Callable[[], None]) -> None:
        """Run `function` in the server's thread and return when it has."""
        done = threading.Event()
        self._calls.put(function)
        self._calls.put(done.set)
        self._wake.send(b"!")
        done.wait(timeout=10.0)

    def _end(self, attempt: int) -> None:
        self._over = max(self._over, attempt)
        for old in [each for each in self._attempts if each <= attempt]:
            self._attempts.pop(old).close()
        self._flush()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector, self._listener, self._wake, self._woken:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            self._selector = selector
            while True:
                ready = selector.select(self._patience())
                for key, events in ready:
                    if key.data is not None:
                        self._attend(key.data, events)
                    elif key.fileobj is self._listener:
                        self._accept()
                    elif not self._run_calls():
                        for guest in list(self._guests.values()):
                            self._close(guest)
                        return
                self._look_at_the_clock()

    def _patience(self) -> float:
        """Return for how many seconds nothing has to be done unless somebody speaks."""
        times = [each.next_late() for each in self._attempts.values()]
        times += [guest.since + STRANGER_SECONDS for guest in self._guests.values() if guest.seal is None]
        next_time = min((each for each in times if each is not None), default=None)
        return 1.0 if next_time is None else min(1.0, max(0.0, next_time - time.monotonic()))

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        for keys in self._attempts.values():
            keys.late(now)
        self._flush()
        for guest in [each for each in self._guests.values() if each.seal is None]:
            if guest.since + STRANGER_SECONDS <= now:
                self._refuse(guest, "slow")

    def _run_calls(self) -> bool:
        """Do what other threads asked for; return False when they want this one to end."""
        self._woken.recv(4096)
        while not self._calls.empty():
            call = self._calls.get()
            if call is None:
                return False
            call()
        return True

    def _accept(self) -> None:
        for _ in range(STRANGERS):  # then the others have their turn
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._make_room():
                    return  # a guest that left before it was let in, or no file to give it
                continue
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.num_strangers >= STRANGERS:
                self._make_room()
            guest = Connection(connection, new_nonce(), time.monotonic())
            self._guests[connection.fileno()] = guest
            self._selector.register(connection, selectors.EVENT_READ, guest)
            guest.reply({"trimaran": 1, "run": self._run, "nonce": guest.nonce})
            self._send(guest)

    def _make_room(self) -> bool:
        strangers = [each for each in self._guests.values() if each.seal is None]
        if strangers:
            self._refuse(min(strangers, key=lambda each: each.since), "crowd")
        return bool(strangers)

    def _attend(self, guest: Connection, events: int) -> None:
        if guest.socket.fileno() < 0:
            return  # closed while it stood in line
        if events & selectors.EVENT_WRITE:
            self._send(guest)
        if events & selectors.EVENT_READ and guest.socket.fileno() >= 0:
            self._hear(guest)

    def _hear(self, guest: Connection) -> None:
        try:
            data = guest.socket.recv(2**16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._refuse(guest, "left") if guest.seal is None else self._close(guest)
            return
        guest.reader.feed(data)
        try:
            while (record := guest.reader.next()) is not None:
                self._admit(guest, record) if guest.seal is None else self._answer(guest, record)
        except WireError:
            self._refuse(guest, "garbage")
        except PermissionError:
            self._refuse(guest, "token")
        self._flush()

    def _admit(self, guest: Connection, record: Record) -> None:
        theirs = str(record.get("nonce", ""))
        if not matches(record.get("proof"), proof(self._token, "client", guest.nonce, theirs)):
            raise PermissionError
        guest.reply({"proof": proof(self._token, "server", guest.nonce, theirs)})
        guest.seal = Seal(self._token, "server", guest.nonce, theirs)
        guest.reader.trust(Seal(self._token, "client", guest.nonce, theirs))

    def _answer(self, guest: Connection, request: Record) -> None:
        if request.get("op") == "exchange":
            guest.reply(self._exchange(guest, request))
            return
        attempt = request.get("attempt")
        if not isinstance(attempt, int):
            raise WireError("a question of no attempt")
        if attempt <= self._over:
            guest.reply({"error": "over"})
            return
        self._attempts.setdefault(attempt, Keys()).answer(request, guest.reply, now=time.monotonic())

    def _exchange(self, guest: Connection, request: Record) -> Record:
        """Take what a node says and return what there is for it. A node with a new session has a new desk."""
        name, session, messages = request.get("node"), request.get("session"), request.get("messages")
        if not isinstance(name, str) or not isinstance(session, str) or not isinstance(messages, list):
            raise WireError("an exchange without a node, a session or messages")
        desk = self.desks.get(name)
        if name == self._own_node or (desk is not None and desk.session != session and desk.in_use):
            return {"error": "another node of this name takes part"}
        if desk is None or desk.session != session:
            desk = self.desks[name] = Mailbox(session, time.monotonic())
        guest.desk, desk.heard = desk, time.monotonic()
        desk.inbox.extend(messages)
        down: list[Any] = []
        while desk.outbox:
            down.append(desk.outbox.popleft())
        return {"messages": down}

    def _flush(self) -> None:
        for guest in [each for each in self._guests.values() if each.unsent]:
            self._send(guest)

    def _send(self, guest: Connection) -> None:
        try:
            sent = guest.socket.send(guest.unsent) if guest.unsent else 0
            del guest.unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._close(guest)
            return
        if len(guest.unsent) > WAITING_BYTES:
            self._refuse(guest, "deaf")
            return
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if guest.unsent else 0)
        self._selector.modify(guest.socket, mask, guest)

    def _refuse(self, guest: Connection, reason: str) -> None:
        self.refused[reason] += 1
        self._close(guest)

    def _close(self, guest: Connection) -> None:
        if self._guests.pop(guest.socket.fileno(), None) is None:
            return
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(guest.socket)
        guest.socket.close()
        for keys in self._attempts.values():
            keys.leave(guest.reply)
        if guest.desk is not None:
            guest.desk.broken = True


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        why = error.strerror or str(error)
        raise UserError("S022", f"the run's channel cannot be opened: {why}", where=f"{host}:{port}",
                        fix="name an address of this machine: --address IP") from None  # fmt: skip
    listener.setblocking(False)
    return listener
