"""The channel: a small TCP server in the supervisor for the ranks and nodes of a run, which prove the run's token.

It answers the coordinator's side of all requests. Where another node coordinates the run, it relays its ranks' store
requests to that node's channel.
"""

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from trimaran.launch.supervise.connection_server import AUTHENTICATION_SECONDS, Connection, ConnectionServer
from trimaran.launch.supervise.key_store import RELAY, KeyStore, RelayAnswers, StoreRelay, is_relayed
from trimaran.runs import ChannelClient, Record, WireError

WAIT_SECONDS, WAIT_SECONDS_WITH_NODES = 1.0, 0.02  # for input; so much later than necessary is a silent node noticed
SILENT_SECONDS = 5.0  # a node that has sent nothing for longer is lost
EXCHANGE_SECONDS, SECONDS_PER_NODE = 0.1, 0.0005
"""A node's usual pause between two exchanges. With many nodes it is longer, for 2,000 exchanges a second in all."""


@dataclass(eq=False, slots=True)
class Mailbox:
    """The messages between one node and the coordinator."""

    session: str  # of one connection of the node's supervisor
    heard: float  # when the node last sent something (monotonic clock)
    inbox: deque[Record] = field(default_factory=deque)
    outbox: deque[Record] = field(default_factory=deque)
    broken: bool = False  # the connection is gone
    given_up: bool = False  # the node counts as lost, and has to connect anew
    changed: threading.Event = field(default_factory=threading.Event)  # set with each message and when it breaks
    # up to when all that arrived was read: a late channel silences no node
    read_until: Callable[[], float] = time.monotonic
    begun: float = field(default_factory=time.time)  # when the node first sent something (wall clock)

    @property
    def silent_seconds(self) -> float:
        return self.read_until() - self.heard


class Channel(ConnectionServer):
    """The channel, bound to `host` only. It serves until `close`. No other node may use the name `own_node`.

    `operations` are further requests of nodes, which are answered at once; `streams` are requests that take over the
    connection.
    """

    def __init__(
        self,
        host: str,
        token: str,
        *,
        port: int = 0,
        own_node: str = "",
        authentication_seconds: float = AUTHENTICATION_SECONDS,
    ) -> None:
        self.mailboxes: dict[str, Mailbox] = {}
        self.operations: dict[str, Callable[[Record], Record]] = {}
        self.streams: dict[str, Callable[[socket.socket], None]] = {}
        self._own_node = own_node
        self._read_until = time.monotonic()
        self._stores: dict[int, KeyStore] = {}  # of attempts that are not over, made by their first requests
        self._last_ended = -1  # this attempt and all before it are over
        self._mailbox_of: dict[Connection, Mailbox] = {}
        self._answers_to: dict[Connection, RelayAnswers] = {}  # to the relays of other nodes
        self._unsent: set[RelayAnswers] = set()
        self._relay: StoreRelay | None = None  # while another node coordinates
        self._upstream: Connection | None = None  # to that node
        self._relayed: set[Connection] = set()  # of ranks
        super().__init__(host, port, token, authentication_seconds=authentication_seconds)

    @property
    def is_idle(self) -> bool:
        """Whether no request of a rank waits for a key."""
        return all(each.is_idle for each in list(self._stores.values()))

    @property
    def num_refused(self) -> int:
        """How many connections were closed before they proved the token, or because they broke the protocol."""
        return sum(list(self.refused.values()))

    def end_attempt(self, attempt: int) -> None:
        """Drop the values of `attempt` and of all before it. Their pending and later requests fail as over."""

        def end() -> None:
            self._last_ended = max(self._last_ended, attempt)
            for old in [each for each in self._stores if each <= attempt]:
                self._stores.pop(old).close()

        self.call(end)

    def exchange_keys(self, attempt: int, prefix: str, written: Mapping[str, bytes | None]) -> dict[str, bytes]:
        """Write to an attempt's store in order (None deletes), and return the values whose keys begin with `prefix`."""
        found: dict[str, bytes] = {}

        def exchange() -> None:
            if (store := self._store_of({"attempt": attempt})) is None:
                return
            for key, value in written.items():
                store.values.pop(key, None) if value is None else store.put(key, value)
            found.update((key, value) for key, value in store.values.items() if key.startswith(prefix))

        self.call(exchange)
        return found

    def _store_of(self, request: Record) -> KeyStore | None:
        """Return the store of the attempt that `request` is about; None if that is over."""
        attempt = request.get("attempt")
        if not isinstance(attempt, int):
            raise WireError("a request without an attempt")
        if attempt > self._last_ended and attempt not in self._stores:
            self._stores[attempt] = KeyStore()
        return self._stores.get(attempt)

    def relay_to(self, client: ChannelClient, *, attempt: int) -> None:
        """Relay the requests of the ranks of `attempt` to the coordinator, to which `client` is connected."""
        # If that connection breaks, those of the ranks are closed too: what they have set may not have arrived.

        def begin() -> None:
            self._end_relay()
            sock, reader, authenticator = client.detach()
            sock.setblocking(False)
            self._upstream = Connection(self, sock, lambda _, message: relay.receive(message), reader, authenticator)
            self.add(self._upstream)
            relay = self._relay = StoreRelay(attempt, self._upstream.reply)

        self.call(begin)

    def end_relay(self) -> None:
        """Answer the requests of ranks here, as the coordinator does."""
        self.call(self._end_relay)

    def _end_relay(self) -> None:
        if self._upstream is not None:
            self._upstream.close()
        self._relay = self._upstream = None
        self._relayed.clear()

    def answer(self, connection: Connection, request: Record) -> None:
        name = str(request.get("op"))
        if name == "exchange":
            self._exchange(connection, request)
        elif name == RELAY:
            answers = self._answers_to.get(connection)
            if answers is None:
                answers = self._answers_to[connection] = RelayAnswers(connection.reply, self._unsent)
            if not isinstance(requests := request.get("requests"), list) or not all(map(is_relayed, requests)):
                raise WireError("a message of a relay without requests")
            answers.answer(requests, self._store_of(request), client=connection, now=time.monotonic())
        elif (operation := self.operations.get(name)) is not None:
            try:
                connection.reply(operation(request))
            except (OSError, ValueError) as error:
                connection.reply({"error": str(error)})
        elif (stream := self.streams.get(name)) is not None:
            threading.Thread(target=stream, args=(connection.detach(),), name="channel-stream", daemon=True).start()
        elif self._relay is not None and self._upstream is not None:
            if self._upstream.is_open:
                self._relayed.add(connection)
                self._relay.answer(request, connection.reply)
            else:
                connection.close()
        elif (store := self._store_of(request)) is not None:
            store.answer(request, connection.reply, client=connection, now=time.monotonic())
        else:
            connection.reply({"error": "over"})

    def note_urgent_served(self, until: float) -> None:
        self._read_until = until  # nodes are urgent: if not answered in time, they take the coordinator for lost

    def end_turn(self, now: float) -> None:
        for store in self._stores.values():
            store.expire(now)
        if self._relay is not None:
            self._relay.flush()
        while self._unsent:
            self._unsent.pop().flush()

    def longest_wait(self) -> float:
        """See `ConnectionServer`. The wait is short if nodes take part."""
        longest = WAIT_SECONDS_WITH_NODES if self.mailboxes else WAIT_SECONDS
        timeouts = [each for store in self._stores.values() if (each := store.next_timeout()) is not None]
        return min([longest, *(max(0.0, each - time.monotonic()) for each in timeouts)])

    def forget(self, connection: Connection) -> None:
        for store in self._stores.values():
            store.drop_client(connection)
        self._answers_to.pop(connection, None)
        if (mailbox := self._mailbox_of.pop(connection, None)) is not None:
            mailbox.broken = True
            mailbox.changed.set()
        self._relayed.discard(connection)
        if connection is self._upstream:  # what the ranks have set may not have arrived there
            for rank in [*self._relayed]:
                rank.close()

    def _exchange(self, connection: Connection, request: Record) -> None:
        """Take a node's messages and reply with those for it. A new session of a node gets a new mailbox."""
        name, session, messages = request.get("node"), request.get("session"), request.get("messages")
        if not isinstance(name, str) or not isinstance(session, str) or not isinstance(messages, list):
            raise WireError("an exchange without a node, a session or messages")
        mailbox = self.mailboxes.get(name)
        is_alive = mailbox is not None and not mailbox.broken and mailbox.silent_seconds < SILENT_SECONDS
        if name == self._own_node or (mailbox is not None and mailbox.session != session and is_alive):
            connection.reply({"error": "another node of this name takes part"})
            return
        if mailbox is None or mailbox.session != session:
            mailbox = Mailbox(session, time.monotonic(), read_until=lambda: self._read_until)
            self.mailboxes[name] = mailbox
        if mailbox.given_up:  # the node was suspended for a while, and knows nothing of its loss
            connection.close()
            return
        self._mailbox_of[connection], connection.is_urgent = mailbox, True
        mailbox.heard = time.monotonic()
        mailbox.inbox.extend(messages)
        if messages:
            mailbox.changed.set()
        outgoing = [mailbox.outbox.popleft() for _ in range(len(mailbox.outbox))]
        seconds = SECONDS_PER_NODE * len(self.mailboxes)
        connection.reply({"messages": outgoing} | ({"seconds": seconds} if seconds > EXCHANGE_SECONDS else {}))
