"""The channel: a small TCP server in the supervisor for the ranks and nodes of a run, which prove the run's token.

One thread serves all connections. A connection that has not proved the token is closed after two seconds and changes
nothing. Where another node coordinates the run, the channel relays its ranks' store requests to that node's channel.
"""

import contextlib
import errno
import resource
import selectors
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

from trimaran.core import UserError
from trimaran.launch import store_relay
from trimaran.launch.key_store import KeyStore
from trimaran.launch.store_relay import StoreRelay
from trimaran.run.wire import (
    ChannelClient,
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
TURN_SECONDS = 0.1  # for requests, between two looks at the connections of nodes
BACKLOG = 4096
WAIT_SECONDS, WAIT_SECONDS_WITH_NODES = 1.0, 0.02  # for input; so much later than necessary is a silent node noticed
SILENT_SECONDS = 5.0  # a node that has sent nothing for longer is lost
MAX_UNSENT_BYTES = 64 * 2**20  # of answers that a client does not read
EXCHANGE_SECONDS, SECONDS_PER_NODE = 0.1, 0.0005
"""A node's usual pause between two exchanges. With many nodes it is longer, for 2,000 exchanges a second in all."""


@dataclass(eq=False, slots=True)
class Connection:
    """One connection; `authenticator` is None until it has proved the token. A node's connection has a mailbox.

    With something to send, it is in the channel's set `outgoing`. `events` are those that the selector waits for.
    `relay`: the connection is ours to the coordinator. For the relay of another node there are `answers` to send, with
    the numbers of the requests, and `num_taken`, how many of its messages arrived.
    """

    socket: socket.socket
    nonce: str
    since: float
    outgoing: "set[Connection]"
    reader: FrameReader = field(default_factory=FrameReader)
    authenticator: FrameAuthenticator | None = None
    unsent: bytearray = field(default_factory=bytearray)
    mailbox: "Mailbox | None" = None
    events: int = selectors.EVENT_READ
    relay: StoreRelay | None = None
    answers: list[tuple[int, Record]] = field(default_factory=list)
    num_taken: int = 0

    def reply(self, record: Record) -> None:
        self.unsent += frame(record, self.authenticator)
        self.outgoing.add(self)

    def reply_to_relay(self, number: int | None, answer: Record) -> None:
        """Answer one request of a relay, together with others. It wants no answer if `number` is None."""
        if number is not None:
            self.answers.append((number, answer))
            self.outgoing.add(self)

    def frame_answers(self) -> None:
        """Make one message of the answers to a relay."""
        if self.num_taken or self.answers:
            answers, self.answers = self.answers, []
            self._frame_answers(answers)

    def _frame_answers(self, answers: list[tuple[int, Record]]) -> None:
        try:
            self.unsent += frame({"taken": self.num_taken, "answers": answers}, self.authenticator)
            self.num_taken = 0
        except WireError as error:
            middle = len(answers) // 2
            parts = (answers[:middle], answers[middle:]) if middle else ([(answers[0][0], {"error": str(error)})],)
            for part in parts:
                self._frame_answers(part)


@dataclass(eq=False, slots=True)
class Mailbox:
    """The messages between one node and the coordinator.

    `heard` is when the node last sent something (monotonic clock), `begun` when it first did (wall clock). `session`
    identifies one connection of the node's supervisor, `broken` says that the connection is gone. `given_up`: the node
    counts as lost, and has to connect anew. `changed` is set with each message and when it breaks. `read_until` returns
    up to when all that arrived has been read: a channel that is late does not make nodes silent.
    """

    session: str
    heard: float
    inbox: deque[Record] = field(default_factory=deque)
    outbox: deque[Record] = field(default_factory=deque)
    broken: bool = False
    given_up: bool = False
    changed: threading.Event = field(default_factory=threading.Event)
    read_until: Callable[[], float] = time.monotonic
    begun: float = field(default_factory=time.time)

    @property
    def silent_seconds(self) -> float:
        return self.read_until() - self.heard

    @property
    def in_use(self) -> bool:
        return not self.broken and self.silent_seconds < SILENT_SECONDS


class Channel:
    """The server, bound to `host` only. It serves until `close`. `refused` counts closed connections by reason."""

    def __init__(
        self,
        host: str,
        token: str,
        *,
        port: int = 0,
        own_node: str = "",
        authentication_seconds: float = AUTHENTICATION_SECONDS,
    ) -> None:
        self.refused: Counter[str] = Counter()
        self.mailboxes: dict[str, Mailbox] = {}
        self.operations: dict[str, Callable[[Record], Record]] = {}  # further requests of nodes, answered at once
        self.streams: dict[str, Callable[[socket.socket], None]] = {}  # requests that take over the connection
        self._own_node = own_node  # no other node may use this name
        self._token, self._run = token, fingerprint(token)
        self._authentication_seconds = authentication_seconds
        self._read_until = time.monotonic()
        self._upstream: Connection | None = None  # to the coordinator, while this channel relays to it
        self._attempts: dict[int, KeyStore] = {}
        self._last_ended = -1  # this attempt and all before it are over
        self._connections: dict[int, Connection] = {}
        self._unauthenticated: dict[Connection, None] = {}  # the oldest first
        self._outgoing: set[Connection] = set()
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
        return len(self._unauthenticated)

    @property
    def is_idle(self) -> bool:
        """Whether no request of a rank waits for a key."""
        return all(each.is_idle for each in list(self._attempts.values()))

    @property
    def num_refused(self) -> int:
        """How many connections were closed before they proved the token, or because they broke the protocol."""
        return sum(list(self.refused.values()))

    def end_attempt(self, attempt: int) -> None:
        """Drop the values of `attempt` and of all before it. Their pending and later requests fail as over."""
        self._call(lambda: self._end(attempt))

    def exchange_keys(self, attempt: int, prefix: str, written: Mapping[str, bytes | None]) -> dict[str, bytes]:
        """Write to the store of an attempt, in order, and return the values whose keys begin with `prefix`.

        None deletes a key.
        """
        found: dict[str, bytes] = {}

        def exchange() -> None:
            if (keys := self._keys_of({"attempt": attempt})) is None:
                return
            for key, value in written.items():
                keys.values.pop(key, None) if value is None else keys.put(key, value)
            found.update({key: value for key, value in keys.values.items() if key.startswith(prefix)})
            self._flush()

        self._call(exchange)
        return found

    def relay_to(self, client: ChannelClient, *, attempt: int) -> None:
        """From now on relay the requests of the ranks of `attempt` to the coordinator, to which `client` is connected.

        If that connection breaks, those of the ranks are closed too: what they have set may not have arrived.
        """
        self._call(lambda: self._begin_relay(client, attempt))

    def end_relay(self) -> None:
        """Answer the requests of ranks here, as the coordinator does."""
        self._call(self._end_relay)

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

    def _begin_relay(self, client: ChannelClient, attempt: int) -> None:
        self._end_relay()
        sock, reader, authenticator = client.detach()
        sock.setblocking(False)
        upstream = Connection(sock, "", time.monotonic(), self._outgoing, reader, authenticator)
        upstream.relay = StoreRelay(attempt, upstream.reply)
        self._upstream = self._connections[sock.fileno()] = upstream
        self._selector.register(sock, selectors.EVENT_READ, upstream)

    def _end_relay(self) -> None:
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            self._close(upstream)

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector, self._listener, self._wake, self._woken:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            self._selector = selector
            while True:
                ready = selector.select(self._seconds_to_next_timeout())
                now = time.monotonic()
                requests = []
                for key, events in ready:
                    if key.data is not None and key.data.mailbox is None:
                        requests.append((key.data, events))
                    elif key.data is not None:
                        self._serve_connection(key.data, events)
                    elif key.fileobj is self._listener:
                        self._accept()
                    elif not self._run_calls():
                        for connection in list(self._connections.values()):
                            self._close(connection)
                        return
                self._flush()  # nodes first: one that is not answered in time takes the coordinator for lost
                self._read_until = now
                for connection, events in requests:
                    self._serve_connection(connection, events)
                    if time.monotonic() > now + TURN_SECONDS:
                        break  # the others are served in the next turn
                self._expire()

    def _seconds_to_next_timeout(self) -> float:
        """Return how long the server may wait for input: until the next timeout, and not long if nodes take part."""
        times = [each.next_timeout() for each in self._attempts.values()]
        times += [each.since + self._authentication_seconds for each in self._oldest_unauthenticated()]
        next_time = min((each for each in times if each is not None), default=None)
        longest = WAIT_SECONDS_WITH_NODES if self.mailboxes else WAIT_SECONDS
        return longest if next_time is None else min(longest, max(0.0, next_time - time.monotonic()))

    def _oldest_unauthenticated(self) -> list[Connection]:
        """Return the oldest connection that has not proved the token, if there is one."""
        return [next(iter(self._unauthenticated))] if self._unauthenticated else []

    def _expire(self) -> None:
        """Time out requests, and connections that have not proved the token in time."""
        now = time.monotonic()
        for keys in self._attempts.values():
            keys.expire(now)
        if self._upstream is not None and self._upstream.relay is not None:
            self._upstream.relay.flush()
        self._flush()
        while (oldest := self._oldest_unauthenticated()) and oldest[0].since + self._authentication_seconds <= now:
            self._refuse(oldest[0], "timeout")

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
        for _ in range(MAX_ACCEPTED):
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
            connection = Connection(sock, new_nonce(), time.monotonic(), self._outgoing)
            self._connections[sock.fileno()] = connection
            self._unauthenticated[connection] = None
            self._selector.register(sock, selectors.EVENT_READ, connection)
            connection.reply({"trimaran": 1, "run": self._run, "nonce": connection.nonce})
            self._send(connection)

    def _close_oldest_unauthenticated(self) -> bool:
        oldest = self._oldest_unauthenticated()
        for each in oldest:
            self._refuse(each, "overload")
        return bool(oldest)

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
                if connection.authenticator is None:
                    self._authenticate(connection, record)
                elif connection.relay is not None:
                    connection.relay.receive(record)
                else:
                    self._answer(connection, record)
        except WireError:
            self._refuse(connection, "malformed")
        except PermissionError:
            self._refuse(connection, "token")

    def _authenticate(self, connection: Connection, record: Record) -> None:
        theirs = str(record.get("nonce", ""))
        if not matches(record.get("proof"), proof(self._token, "client", connection.nonce, theirs)):
            raise PermissionError
        connection.reply({"proof": proof(self._token, "server", connection.nonce, theirs)})
        del self._unauthenticated[connection]
        connection.authenticator = FrameAuthenticator(self._token, "server", connection.nonce, theirs)
        connection.reader.authenticate_with(FrameAuthenticator(self._token, "client", connection.nonce, theirs))

    def _answer(self, connection: Connection, request: Record) -> None:
        name = str(request.get("op"))
        if name == "exchange":
            connection.reply(self._exchange(connection, request))
        elif name == store_relay.OPERATION:
            self._answer_relay(connection, request)
        elif (operation := self.operations.get(name)) is not None:
            try:
                connection.reply(operation(request))
            except (OSError, ValueError) as error:
                connection.reply({"error": str(error)})
        elif (stream := self.streams.get(name)) is not None:
            self._hand_over(connection, stream)
        elif self._upstream is not None and self._upstream.relay is not None:
            if self._upstream.socket.fileno() < 0:
                self._close(connection)
            else:
                self._upstream.relay.answer(request, connection.reply)
        elif (keys := self._keys_of(request)) is None:
            connection.reply({"error": "over"})
        else:
            keys.answer(request, connection.reply, client=connection, now=time.monotonic())

    def _hand_over(self, connection: Connection, stream: Callable[[socket.socket], None]) -> None:
        """Let `stream` use the connection from now on, in a thread of its own. It has to close it."""
        del self._connections[connection.socket.fileno()]
        self._selector.unregister(connection.socket)
        connection.socket.setblocking(True)
        threading.Thread(target=stream, args=(connection.socket,), name="channel-stream", daemon=True).start()

    def _answer_relay(self, connection: Connection, message: Record) -> None:
        """Answer the requests of the ranks of another node. A malformed one is answered with an error."""
        requests, now = message.get("requests"), time.monotonic()
        if not isinstance(requests, list) or not all(map(store_relay.is_relayed, requests)):
            raise WireError("a message of a relay without requests")
        keys = self._keys_of(message)
        connection.num_taken += 1
        self._outgoing.add(connection)
        for number, request in requests:
            reply = partial(connection.reply_to_relay, number)
            if keys is None:
                reply({"error": "over"})
                continue
            try:
                keys.answer(request, reply, client=connection, now=now)
            except WireError as error:
                reply({"error": str(error)})

    def _keys_of(self, request: Record) -> KeyStore | None:
        """Return the store of the attempt that `request` is about; None if that is over."""
        attempt = request.get("attempt")
        if not isinstance(attempt, int):
            raise WireError("a request without an attempt")
        if attempt <= self._last_ended:
            return None
        keys = self._attempts.get(attempt)
        if keys is None:
            keys = self._attempts[attempt] = KeyStore()
        return keys

    def _exchange(self, connection: Connection, request: Record) -> Record:
        """Take a node's messages and return those for it. A new session of a node gets a new mailbox."""
        name, session, messages = request.get("node"), request.get("session"), request.get("messages")
        if not isinstance(name, str) or not isinstance(session, str) or not isinstance(messages, list):
            raise WireError("an exchange without a node, a session or messages")
        mailbox = self.mailboxes.get(name)
        if name == self._own_node or (mailbox is not None and mailbox.session != session and mailbox.in_use):
            return {"error": "another node of this name takes part"}
        if mailbox is None or mailbox.session != session:
            mailbox = Mailbox(session, time.monotonic(), read_until=lambda: self._read_until)
            self.mailboxes[name] = mailbox
        if mailbox.given_up:  # the node was suspended for a while, and knows nothing of its loss
            self._close(connection)
            return {}
        connection.mailbox, mailbox.heard = mailbox, time.monotonic()
        mailbox.inbox.extend(messages)
        if messages:
            mailbox.changed.set()
        outgoing: list[Any] = []
        while mailbox.outbox:
            outgoing.append(mailbox.outbox.popleft())
        seconds = SECONDS_PER_NODE * len(self.mailboxes)
        return {"messages": outgoing} | ({"seconds": seconds} if seconds > EXCHANGE_SECONDS else {})

    def _flush(self) -> None:
        """Send what replies have added since the last call. A socket that is full is then watched by the selector."""
        while self._outgoing:
            self._send(self._outgoing.pop())

    def _send(self, connection: Connection) -> None:
        if connection.socket.fileno() < 0:
            return  # closed since it was given the reply
        connection.frame_answers()
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
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        if events != connection.events:
            connection.events = events
            self._selector.modify(connection.socket, events, connection)

    def _refuse(self, connection: Connection, reason: str) -> None:
        self.refused[reason] += 1
        self._close(connection)

    def _close(self, connection: Connection) -> None:
        if self._connections.pop(connection.socket.fileno(), None) is None:
            return
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.socket.close()
        self._unauthenticated.pop(connection, None)
        for keys in self._attempts.values():
            keys.drop_client(connection)
        if connection.mailbox is not None:
            connection.mailbox.broken = True
            connection.mailbox.changed.set()
        if connection.relay is not None:
            for each in [each for each in self._connections.values() if each.authenticator and not each.mailbox]:
                self._close(each)


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
        fix = "name an address of this machine: --address IP"
        if error.errno == errno.EADDRINUSE:
            fix = "end the process that listens there, or name another port on all nodes: --head HOST:PORT"
        raise UserError("S022", f"the run's channel cannot listen there: {why}", where=f"{host}:{port}",
                        fix=fix) from None  # fmt: skip
    listener.setblocking(False)
    return listener
