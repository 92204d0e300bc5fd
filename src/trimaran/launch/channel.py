"""The channel: a small TCP server in the supervisor for the ranks and nodes of a run, which prove the run's token.

One thread serves all connections. A connection that has not proved the token is closed after two seconds and changes
nothing.
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
from trimaran.launch.key_store import KeyStore
from trimaran.run.wire import (
    FrameAuthenticator,
    FrameReader,
    Record,
    WireError,
    fingerprint,
    frame,
    matches,
    new_nonce,
    proof,
)

MAX_UNAUTHENTICATED = 64  # connections at once; the oldest is closed for a new one
AUTHENTICATION_SECONDS = 2.0
BACKLOG = 1024
SILENT_SECONDS = 5.0  # a node that has sent nothing for longer is lost
MAX_UNSENT_BYTES = 64 * 2**20  # of answers that a client does not read


@dataclass(eq=False, slots=True)
class Connection:
    """One connection; `authenticator` is None until it has proved the token. A node's connection has a mailbox."""

    socket: socket.socket
    nonce: str
    since: float
    reader: FrameReader = field(default_factory=FrameReader)
    authenticator: FrameAuthenticator | None = None
    unsent: bytearray = field(default_factory=bytearray)
    mailbox: "Mailbox | None" = None

    def reply(self, record: Record) -> None:
        self.unsent += frame(record, self.authenticator)


@dataclass(eq=False, slots=True)
class Mailbox:
    """The messages between one node and the coordinator.

    `heard` is when the node last sent something (monotonic clock), `session` identifies one connection of the node's
    supervisor, `broken` says that the connection is gone.
    """

    session: str
    heard: float
    inbox: deque[Record] = field(default_factory=deque)
    outbox: deque[Record] = field(default_factory=deque)
    broken: bool = False

    @property
    def in_use(self) -> bool:
        return not self.broken and time.monotonic() - self.heard < SILENT_SECONDS


class Channel:
    """The server, bound to `host` only. It serves until `close`. `refused` counts closed connections by reason."""

    def __init__(self, host: str, token: str, *, port: int = 0, own_node: str = "") -> None:
        self.refused: Counter[str] = Counter()
        self.mailboxes: dict[str, Mailbox] = {}
        self._own_node = own_node  # no other node may use this name
        self._token, self._run = token, fingerprint(token)
        self._attempts: dict[int, KeyStore] = {}
        self._last_ended = -1  # this attempt and all before it are over
        self._connections: dict[int, Connection] = {}
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._listener = _listen(host, port)
        _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))  # every rank has a connection or two
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="channel", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """The address of this channel, `host:port`."""
        host, port = self._listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def num_unauthenticated(self) -> int:
        return sum(connection.authenticator is None for connection in list(self._connections.values()))

    @property
    def num_refused(self) -> int:
        """How many connections were closed before they proved the token, or because they broke the protocol."""
        return sum(list(self.refused.values()))

    def end_attempt(self, attempt: int) -> None:
        """Drop the values of `attempt` and of all before it. Their pending and later requests fail as over."""
        self._call(lambda: self._end(attempt))

    def close(self) -> None:
        """Close all connections, and return when the port is free."""
        if self._thread.is_alive():
            self._calls.put(None)
            self._wake.send(b"!")
            self._thread.join()

    def _call(self, function: Callable[[], None]) -> None:
        """Run `function` in the server's thread and return when it is done."""
        done = threading.Event()
        self._calls.put(function)
        self._calls.put(done.set)
        self._wake.send(b"!")
        done.wait(timeout=10.0)

    def _end(self, attempt: int) -> None:
        self._last_ended = max(self._last_ended, attempt)
        for old in [each for each in self._attempts if each <= attempt]:
            self._attempts.pop(old).close()
        self._flush()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector, self._listener, self._wake, self._woken:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            self._selector = selector
            while True:
                ready = selector.select(self._seconds_to_next_timeout())
                for key, events in ready:
                    if key.data is not None:
                        self._serve_connection(key.data, events)
                    elif key.fileobj is self._listener:
                        self._accept()
                    elif not self._run_calls():
                        for connection in list(self._connections.values()):
                            self._close(connection)
                        return
                self._expire()

    def _seconds_to_next_timeout(self) -> float:
        """Return how long the server may wait for input: until the next timeout, at most 1 s."""
        times = [each.next_timeout() for each in self._attempts.values()]
        times += [each.since + AUTHENTICATION_SECONDS for each in self._unauthenticated()]
        next_time = min((each for each in times if each is not None), default=None)
        return 1.0 if next_time is None else min(1.0, max(0.0, next_time - time.monotonic()))

    def _unauthenticated(self) -> list[Connection]:
        return [each for each in self._connections.values() if each.authenticator is None]

    def _expire(self) -> None:
        """Time out requests, and connections that have not proved the token in time."""
        now = time.monotonic()
        for keys in self._attempts.values():
            keys.expire(now)
        self._flush()
        for connection in self._unauthenticated():
            if connection.since + AUTHENTICATION_SECONDS <= now:
                self._refuse(connection, "timeout")

    def _run_calls(self) -> bool:
        """Run what other threads have queued; return False when this thread is to end."""
        self._woken.recv(4096)
        while not self._calls.empty():
            call = self._calls.get()
            if call is None:
                return False
            call()
        return True

    def _accept(self) -> None:
        for _ in range(MAX_UNAUTHENTICATED):  # then the other connections are served
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._close_oldest_unauthenticated():
                    return  # the client is gone already, or no file descriptor is free
                continue
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.num_unauthenticated >= MAX_UNAUTHENTICATED:
                self._close_oldest_unauthenticated()
            connection = Connection(sock, new_nonce(), time.monotonic())
            self._connections[sock.fileno()] = connection
            self._selector.register(sock, selectors.EVENT_READ, connection)
            connection.reply({"trimaran": 1, "run": self._run, "nonce": connection.nonce})
            self._send(connection)

    def _close_oldest_unauthenticated(self) -> bool:
        candidates = self._unauthenticated()
        if candidates:
            self._refuse(min(candidates, key=lambda each: each.since), "overload")
        return bool(candidates)

    def _serve_connection(self, connection: Connection, events: int) -> None:
        if connection.socket.fileno() < 0:
            return  # closed since `select` returned
        if events & selectors.EVENT_WRITE:
            self._send(connection)
        if events & selectors.EVENT_READ and connection.socket.fileno() >= 0:
            self._receive(connection)

    def _receive(self, connection: Connection) -> None:
        try:
            data = connection.socket.recv(2**16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._refuse(connection, "disconnected") if connection.authenticator is None else self._close(connection)
            return
        connection.reader.feed(data)
        try:
            while (record := connection.reader.next()) is not None:
                is_new = connection.authenticator is None
                self._authenticate(connection, record) if is_new else self._answer(connection, record)
        except WireError:
            self._refuse(connection, "malformed")
        except PermissionError:
            self._refuse(connection, "token")
        self._flush()

    def _authenticate(self, connection: Connection, record: Record) -> None:
        theirs = str(record.get("nonce", ""))
        if not matches(record.get("proof"), proof(self._token, "client", connection.nonce, theirs)):
            raise PermissionError
        connection.reply({"proof": proof(self._token, "server", connection.nonce, theirs)})
        connection.authenticator = FrameAuthenticator(self._token, "server", connection.nonce, theirs)
        connection.reader.authenticate_with(FrameAuthenticator(self._token, "client", connection.nonce, theirs))

    def _answer(self, connection: Connection, request: Record) -> None:
        if request.get("op") == "exchange":
            connection.reply(self._exchange(connection, request))
            return
        attempt = request.get("attempt")
        if not isinstance(attempt, int):
            raise WireError("a request without an attempt")
        if attempt <= self._last_ended:
            connection.reply({"error": "over"})
            return
        self._attempts.setdefault(attempt, KeyStore()).answer(request, connection.reply, now=time.monotonic())

    def _exchange(self, connection: Connection, request: Record) -> Record:
        """Take a node's messages and return those for it. A new session of a node gets a new mailbox."""
        name, session, messages = request.get("node"), request.get("session"), request.get("messages")
        if not isinstance(name, str) or not isinstance(session, str) or not isinstance(messages, list):
            raise WireError("an exchange without a node, a session or messages")
        mailbox = self.mailboxes.get(name)
        if name == self._own_node or (mailbox is not None and mailbox.session != session and mailbox.in_use):
            return {"error": "another node of this name takes part"}
        if mailbox is None or mailbox.session != session:
            mailbox = self.mailboxes[name] = Mailbox(session, time.monotonic())
        connection.mailbox, mailbox.heard = mailbox, time.monotonic()
        mailbox.inbox.extend(messages)
        outgoing: list[Any] = []
        while mailbox.outbox:
            outgoing.append(mailbox.outbox.popleft())
        return {"messages": outgoing}

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
        if len(connection.unsent) > MAX_UNSENT_BYTES:
            self._refuse(connection, "unread")
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
            keys.drop_client(connection.reply)
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
        raise UserError("S022", f"the run's channel cannot listen there: {why}", where=f"{host}:{port}",
                        fix="name an address of this machine: --address IP") from None  # fmt: skip
    listener.setblocking(False)
    return listener
