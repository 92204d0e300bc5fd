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
    mailbox: "Mailbox | None" = None

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
        self._connections: dict[int, Connection] = {}
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
        return sum(connection.seal is None for connection in list(self._connections.values()))

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
                        for connection in list(self._connections.values()):
                            self._close(connection)
                        return
                self._look_at_the_clock()

    def _patience(self) -> float:
        """Return for how many seconds nothing has to be done unless somebody speaks."""
        times = [each.next_late() for each in self._attempts.values()]
        times += [
            connection.since + STRANGER_SECONDS for connection in self._connections.values() if connection.seal is None
        ]
        next_time = min((each for each in times if each is not None), default=None)
        return 1.0 if next_time is None else min(1.0, max(0.0, next_time - time.monotonic()))

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        for keys in self._attempts.values():
            keys.late(now)
        self._flush()
        for connection in [each for each in self._connections.values() if each.seal is None]:
            if connection.since + STRANGER_SECONDS <= now:
                self._refuse(connection, "slow")

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
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._make_room():
                    return  # a guest that left before it was let in, or no file to give it
                continue
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.num_strangers >= STRANGERS:
                self._make_room()
            connection = Connection(sock, new_nonce(), time.monotonic())
            self._connections[sock.fileno()] = connection
            self._selector.register(sock, selectors.EVENT_READ, connection)
            connection.reply({"trimaran": 1, "run": self._run, "nonce": connection.nonce})
            self._send(connection)

    def _make_room(self) -> bool:
        strangers = [each for each in self._connections.values() if each.seal is None]
        if strangers:
            self._refuse(min(strangers, key=lambda each: each.since), "crowd")
        return bool(strangers)

    def _attend(self, connection: Connection, events: int) -> None:
        if connection.socket.fileno() < 0:
            return  # closed while it stood in line
        if events & selectors.EVENT_WRITE:
            self._send(connection)
        if events & selectors.EVENT_READ and connection.socket.fileno() >= 0:
            self._hear(connection)

    def _hear(self, connection: Connection) -> None:
        try:
            data = connection.socket.recv(2**16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._refuse(connection, "left") if connection.seal is None else self._close(connection)
            return
        connection.reader.feed(data)
        try:
            while (record := connection.reader.next()) is not None:
                self._admit(connection, record) if connection.seal is None else self._answer(connection, record)
        except WireError:
            self._refuse(connection, "garbage")
        except PermissionError:
            self._refuse(connection, "token")
        self._flush()

    def _admit(self, connection: Connection, record: Record) -> None:
        theirs = str(record.get("nonce", ""))
        if not matches(record.get("proof"), proof(self._token, "client", connection.nonce, theirs)):
            raise PermissionError
        connection.reply({"proof": proof(self._token, "server", connection.nonce, theirs)})
        connection.seal = Seal(self._token, "server", connection.nonce, theirs)
        connection.reader.trust(Seal(self._token, "client", connection.nonce, theirs))

    def _answer(self, connection: Connection, request: Record) -> None:
        if request.get("op") == "exchange":
            connection.reply(self._exchange(connection, request))
            return
        attempt = request.get("attempt")
        if not isinstance(attempt, int):
            raise WireError("a question of no attempt")
        if attempt <= self._over:
            connection.reply({"error": "over"})
            return
        self._attempts.setdefault(attempt, Keys()).answer(request, connection.reply, now=time.monotonic())

    def _exchange(self, connection: Connection, request: Record) -> Record:
        """Take what a node says and return what there is for it. A node with a new session has a new desk."""
        name, session, messages = request.get("node"), request.get("session"), request.get("messages")
        if not isinstance(name, str) or not isinstance(session, str) or not isinstance(messages, list):
            raise WireError("an exchange without a node, a session or messages")
        mailbox = self.desks.get(name)
        if name == self._own_node or (mailbox is not None and mailbox.session != session and mailbox.in_use):
            return {"error": "another node of this name takes part"}
        if mailbox is None or mailbox.session != session:
            mailbox = self.desks[name] = Mailbox(session, time.monotonic())
        connection.mailbox, mailbox.heard = mailbox, time.monotonic()
        mailbox.inbox.extend(messages)
        down: list[Any] = []
        while mailbox.outbox:
            down.append(mailbox.outbox.popleft())
        return {"messages": down}

    def _flush(self) -> None:
        for connection in [each for each in self._connections.values() if each.unsent]:
            self._send(connection)

    def _send(self, connection: Connection) -> None:
        try:
            sent = connection.socket.send(connection.unsent) if connection.unsent else 0
            del connection.unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._close(connection)
            return
        if len(connection.unsent) > WAITING_BYTES:
            self._refuse(connection, "deaf")
            return
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        self._selector.modify(connection.socket, mask, connection)

    def _refuse(self, connection: Connection, reason: str) -> None:
        self.refused[reason] += 1
        self._close(connection)

    def _close(self, connection: Connection) -> None:
        if self._connections.pop(connection.socket.fileno(), None) is None:
            return
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.socket.close()
        for keys in self._attempts.values():
            keys.leave(connection.reply)
        if connection.mailbox is not None:
            connection.mailbox.broken = True


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
