"""Serves connections in one thread: accepts them, has them prove the run's token, and passes on what they ask.

A connection that has not proved the token is closed after two seconds and changes nothing.
"""

import contextlib
import errno
import resource
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

from trimaran.core import UserError
from trimaran.runs import (
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

MAX_UNAUTHENTICATED = 1024  # connections at once; the oldest is closed for a new one
MAX_ACCEPTED = 64  # at once; then the other connections are served
AUTHENTICATION_SECONDS = 2.0
TURN_SECONDS = 0.1  # for requests, between two looks at urgent connections
BACKLOG = 4096
MAX_UNSENT_BYTES = 64 * 2**20  # of answers that a client does not read


@dataclass(eq=False, slots=True)
class Connection:
    """One connection of `server`."""

    server: "ConnectionServer"
    socket: socket.socket
    receive: Callable[["Connection", Record], None]  # called with each record
    reader: FrameReader = field(default_factory=FrameReader)
    authenticator: FrameAuthenticator | None = None  # None until the client has proved the token
    nonce: str = field(default_factory=new_nonce)
    since: float = field(default_factory=time.monotonic)
    is_urgent: bool = False  # served before the others
    unsent: bytearray = field(default_factory=bytearray)
    events: int = selectors.EVENT_READ  # the selector's mask

    @property
    def is_open(self) -> bool:
        return self.socket.fileno() >= 0

    def reply(self, record: Record) -> None:
        """Send `record` at the end of the turn. Raises `WireError` if it is too long."""
        self.unsent += frame(record, self.authenticator)
        self.server.outgoing.add(self)

    def close(self) -> None:
        if self.server.remove(self):
            self.socket.close()
            self.server.forget(self)

    def detach(self) -> socket.socket:
        """Return the socket for another reader and writer, who has to close it."""
        self.server.remove(self)
        self.socket.setblocking(True)
        return self.socket


class ConnectionServer:
    """The server, bound to `host` only. It serves until `close`. `refused` counts closed connections by reason.

    A subclass answers the requests. All calls of the methods that it overrides come from the server's thread.
    """

    def __init__(self, host: str, port: int, token: str, *, authentication_seconds: float) -> None:
        self.refused: Counter[str] = Counter()
        self.outgoing: set[Connection] = set()  # those with something to send
        self._token, self._run = token, fingerprint(token)
        self._authentication_seconds = authentication_seconds
        self._connections: dict[int, Connection] = {}
        self._unproved: dict[Connection, None] = {}  # that have not proved the token yet, the oldest first
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            why = error.strerror or str(error)
            fix = "name an address of this machine: --address IP"
            if error.errno == errno.EADDRINUSE:
                fix = "end the process that listens there, or name another port on all nodes: --head HOST:PORT"
            raise UserError("S022.run-channel", where=f"{host}:{port}", fix=fix, why=why) from None
        listener.setblocking(False)
        self._listener = listener
        _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))  # every rank has a connection or two
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="channel", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def num_unauthenticated(self) -> int:
        return len(self._unproved)

    def answer(self, connection: Connection, request: Record) -> None:
        """Reply to a client that has proved the token, now or later. Raises `WireError` if it breaks the protocol."""
        raise NotImplementedError

    def note_urgent_served(self, until: float) -> None:
        """Take note that all that had arrived on urgent connections `until` then is answered."""

    def end_turn(self, now: float) -> None:
        """Reply to requests whose time is up, and send what else is due."""

    def longest_wait(self) -> float:
        """Return for how many seconds the server may wait for input."""
        raise NotImplementedError

    def forget(self, connection: Connection) -> None:
        """Drop the state of a closed connection."""

    def call(self, function: Callable[[], None]) -> None:
        """Run `function` in the server's thread; return when it is done and its replies are sent."""
        done = threading.Event()

        def run() -> None:
            function()
            self.end_turn(time.monotonic())
            self._flush()
            done.set()

        self._calls.put(run)
        self._wake.send(b"!")
        done.wait(timeout=10.0)

    def close(self) -> None:
        """Close all connections, and return when the port is free."""
        if self._thread.is_alive():
            self._calls.put(None)
            self._wake.send(b"!")
            self._thread.join()

    def _serve(self) -> None:
        with self._selector, self._listener, self._wake, self._woken:
            while True:
                wait = self.longest_wait()
                if oldest := next(iter(self._unproved), None):
                    wait = min(wait, max(0.0, oldest.since + self._authentication_seconds - time.monotonic()))
                ready = self._selector.select(wait)
                now = time.monotonic()
                requests = []
                for key, events in ready:
                    if key.data is not None and not key.data.is_urgent:
                        requests.append((key.data, events))
                    elif key.data is not None:
                        self._serve_connection(key.data, events)
                    elif key.fileobj is self._listener:
                        self._accept()
                    else:  # what other threads have queued
                        self._woken.recv(4096)
                        while not self._calls.empty():
                            call = self._calls.get()
                            if call is None:
                                for connection in list(self._connections.values()):
                                    connection.close()
                                return
                            call()
                self._flush()  # urgent ones first: a node that is not answered in time takes the coordinator for lost
                self.note_urgent_served(now)
                for connection, events in requests:
                    self._serve_connection(connection, events)
                    if time.monotonic() > now + TURN_SECONDS:
                        break  # the others are served in the next turn
                self.end_turn(time.monotonic())
                self._flush()
                latest = time.monotonic() - self._authentication_seconds
                while (oldest := next(iter(self._unproved), None)) and oldest.since <= latest:
                    self._refuse(oldest, "timeout")

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTED):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._refuse_oldest():
                    return  # the client is gone already, or no file descriptor is free
                continue
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.num_unauthenticated >= MAX_UNAUTHENTICATED:
                self._refuse_oldest()
            connection = Connection(self, sock, self._authenticate)
            self._unproved[connection] = None
            self.add(connection)
            connection.reply({"trimaran": 1, "run": self._run, "nonce": connection.nonce})
            self._send(connection)

    def _refuse_oldest(self) -> bool:
        oldest = next(iter(self._unproved), None)
        if oldest is not None:
            self._refuse(oldest, "overload")
        return oldest is not None

    def _serve_connection(self, connection: Connection, events: int) -> None:
        if not connection.is_open:
            return  # closed since `select` returned
        if events & selectors.EVENT_WRITE:
            self._send(connection)
        if events & selectors.EVENT_READ and connection.is_open:
            self._receive(connection)

    def _receive(self, connection: Connection) -> None:
        try:
            data = connection.socket.recv(2**16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            connection.close() if connection.authenticator else self._refuse(connection, "disconnected")
            return
        connection.reader.feed(data)
        try:
            while (record := connection.reader.next()) is not None:
                connection.receive(connection, record)
        except WireError:
            self._refuse(connection, "malformed")
        except PermissionError:
            self._refuse(connection, "token")

    def _authenticate(self, connection: Connection, record: Record) -> None:
        ours, theirs = connection.nonce, str(record.get("nonce", ""))
        if not matches(record.get("proof"), proof(self._token, "client", ours, theirs)):
            raise PermissionError
        connection.reply({"proof": proof(self._token, "server", ours, theirs)})
        del self._unproved[connection]
        connection.authenticator = FrameAuthenticator(self._token, "server", ours, theirs)
        connection.reader.authenticate_with(FrameAuthenticator(self._token, "client", ours, theirs))
        connection.receive = self.answer

    def _flush(self) -> None:
        """Send what replies have added since the last call. A socket that is full is then watched by the selector."""
        while self.outgoing:
            self._send(self.outgoing.pop())

    def _send(self, connection: Connection) -> None:
        if not connection.is_open:
            return  # closed since it was given the reply
        try:
            sent = connection.socket.send(connection.unsent) if connection.unsent else 0
            del connection.unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            connection.close()
            return
        if len(connection.unsent) > MAX_UNSENT_BYTES:
            self._refuse(connection, "unread")
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        if events != connection.events:
            connection.events = events
            self._selector.modify(connection.socket, events, connection)

    def _refuse(self, connection: Connection, reason: str) -> None:
        self.refused[reason] += 1
        connection.close()

    def add(self, connection: Connection) -> None:
        self._connections[connection.socket.fileno()] = connection
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)

    def remove(self, connection: Connection) -> bool:
        """Serve a connection no more. Returns False if it is closed or detached already."""
        if self._connections.pop(connection.socket.fileno(), None) is None:
            return False
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        self._unproved.pop(connection, None)
        return True
