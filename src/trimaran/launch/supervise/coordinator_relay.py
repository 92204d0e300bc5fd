"""A node's connection to the coordinator for the store requests of its ranks."""

from trimaran.launch.supervise.connection_server import Connection, ConnectionServer
from trimaran.launch.supervise.store_relay import StoreRelay
from trimaran.runs.wire import ChannelClient, Record


class CoordinatorRelay:
    """Answers the ranks of `attempt` by passing what they ask to the coordinator, to which `client` is connected.

    If that connection breaks, those of the ranks are closed too: what they have set may not have arrived. Make and use
    it in the thread of `server`.
    """

    def __init__(self, server: ConnectionServer, client: ChannelClient, *, attempt: int) -> None:
        self._upstream = server.adopt(client, self._receive)
        self._relay = StoreRelay(attempt, self._upstream.reply)
        self._ranks: set[Connection] = set()

    def answer(self, connection: Connection, request: Record) -> None:
        """Reply to a rank now, or when the coordinator has answered."""
        if not self._upstream.is_open:
            connection.close()
            return
        self._ranks.add(connection)
        self._relay.answer(request, connection.reply)

    def flush(self) -> None:
        """Send the requests that wait, unless an earlier message is still on its way."""
        self._relay.flush()

    def forget(self, connection: Connection) -> None:
        """Forget a rank whose connection is closed; close those of all ranks if it is the one to the coordinator."""
        self._ranks.discard(connection)
        if connection is self._upstream:
            for rank in [*self._ranks]:
                rank.close()

    def close(self) -> None:
        self._upstream.close()

    def _receive(self, connection: Connection, message: Record) -> None:
        self._relay.receive(message)
