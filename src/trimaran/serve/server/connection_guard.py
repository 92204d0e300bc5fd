"""Limits on connections before their request is known: how large and slow its head may be, and how many there may be.

uvicorn has no limit on any of them: a head without an end is parsed again with each part, and one that never comes
holds a descriptor for ever. Both `trimaran serve` and `trimaran ui` listen behind this.
"""

import asyncio
import resource
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import h11
from starlette.responses import Response
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.http.h11_impl import H11Protocol

from trimaran.core import UserError

MAX_CONNECTIONS = 8192
MAX_CLIENT_CONNECTIONS = 1024
RESERVED_DESCRIPTORS = 64  # of the process, for anything but connections
LINGER_BYTES = 8 << 20  # read and dropped after a refusal: closing a connection with unread data resets it


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """The limits of a server. `per_client` is for one address: all that come through one proxy share it."""

    head_bytes: int = 32 << 10
    head_seconds: float = 10.0
    per_client: int = MAX_CLIENT_CONNECTIONS
    total: int = MAX_CONNECTIONS
    linger_seconds: float = 2.0

    @property
    def h11_bytes(self) -> int:
        """The limit for h11: more than ours, which has the clearer answer."""
        return 2 * self.head_bytes


def limits_of_process(per_client: int = MAX_CLIENT_CONNECTIONS) -> ConnectionLimits:
    """Return the limits that fit the descriptors of this process, of which one client gets half at most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + RESERVED_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with suppress(ValueError, OSError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    found = MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, soft - RESERVED_DESCRIPTORS)
    total = max(2, found)
    return ConnectionLimits(per_client=min(per_client, total // 2), total=total)


class ConnectionGuard:
    """The connections of one server. `answer` makes the response to a refused one."""

    def __init__(
        self,
        limits: ConnectionLimits,
        answer: Callable[[UserError], Response],
        on_refusal: Callable[[UserError], None] = lambda error: None,
    ) -> None:
        self.limits, self.answer, self.on_refusal = limits, answer, on_refusal
        self._clients: dict[str, dict[GuardedProtocol, None]] = {}  # the oldest connection of a client comes first
        self._count = 0

    def add(self, connection: "GuardedProtocol") -> bool:
        """Count a connection; return whether there is room. A client's oldest waiting one makes room for its own."""
        own = self._clients.setdefault(connection.address, {})
        own[connection] = None
        self._count += 1
        if len(own) <= self.limits.per_client and self._count <= self.limits.total:
            return True
        most = own if len(own) > self.limits.per_client else max(self._clients.values(), key=len)
        waiting = next((each for each in most if each is not connection and each.waits), None)
        if waiting is None:
            return False
        self.remove(waiting)
        waiting.transport.close()
        return True

    def remove(self, connection: "GuardedProtocol") -> None:
        """Count a connection no more: it has ended, or became a websocket, which has a session."""
        own = self._clients.get(connection.address, {})
        if connection in own:
            del own[connection]
            self._count -= 1
        if not own:
            self._clients.pop(connection.address, None)


class GuardedProtocol(asyncio.Protocol):
    """The part of a connection that keeps the limits, before one of uvicorn's protocols in a class's bases."""

    guard: ConnectionGuard
    # Fields of uvicorn's protocols.
    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    client: tuple[str, int] | None
    cycle: Any
    timeout_keep_alive: float

    address = ""
    _timer: asyncio.TimerHandle | None = None
    _head_bytes = 0  # received since the last complete head and the last part of a body
    _has_progressed = False
    _refused_bytes: int | None = None  # received since the refusal

    @property
    def waits(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        limits = self.guard.limits
        self.address = self.client[0] if self.client else ""
        if not self.guard.add(self):
            self._refuse(UserError("U023.too-many-connections", where="the server"))
            return
        # Clients open connections before they need them: one without a byte may stay as long as an idle one.
        self._start_timer(max(limits.head_seconds, self.timeout_keep_alive))

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.guard.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        limit, begin = self.guard.limits.head_bytes, 0
        while begin < len(data) and not self.transport.is_closing():
            if self._refused_bytes is not None:
                num_bytes = len(data) - begin
                assert self._refused_bytes is not None
                self._refused_bytes += num_bytes
                if self._refused_bytes > LINGER_BYTES:
                    self.transport.abort()
                return
            piece = data[begin : begin + limit + 1 - self._head_bytes]
            begin += len(piece)
            self._has_progressed, before = False, self.cycle
            super().data_received(piece)
            if self._is_past_head(before):
                self._head_bytes = 0
                if self.cycle is None or not (self.waits and self.cycle.more_body):
                    self._stop_timer()
                elif self._timer is None:  # the rest of a body that was answered already
                    self._start_timer(self.guard.limits.head_seconds)
                continue
            if not self._head_bytes:
                self._start_timer(self.guard.limits.head_seconds)
            self._head_bytes += len(piece)
            if self._head_bytes > limit:
                self._refuse(UserError("U021.head-request", where="the headers", limit=limit))

    def handle_websocket_upgrade(self, *event: Any) -> None:
        self._stop_timer()
        self.guard.remove(self)
        super().handle_websocket_upgrade(*event)  # pyrefly: ignore[missing-attribute]

    def _is_past_head(self, before: Any) -> bool:
        """Return whether the last piece ended a head or had a part of a body; the cycle was `before`."""
        return self._has_progressed

    def _refuse(self, error: UserError) -> None:
        """Answer with an error, then close. Read the rest of the request for a moment, so that the client sees it."""
        self._refused_bytes = 0
        self._stop_timer()
        self.guard.on_refusal(error)
        if not self.waits:  # an earlier request on this connection: nothing can be written into its answer
            self.transport.close()
            return
        response = self.guard.answer(error)
        headers = [*response.raw_headers, (b"connection", b"close")]
        lines = [b"HTTP/1.1 %d %s" % (response.status_code, HTTPStatus(response.status_code).phrase.encode())]
        lines += [b"%s: %s" % pair for pair in headers]
        self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + bytes(response.body))
        self.transport.write_eof()
        self._timer = self.loop.call_later(self.guard.limits.linger_seconds, self.transport.abort)

    def _start_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        if not self.waits:  # the next request on this connection may come while one is answered
            self._start_timer(self.guard.limits.head_seconds)
        elif self._head_bytes:
            seconds = self.guard.limits.head_seconds
            self._refuse(UserError("U022.head-request-did", where="the headers", seconds=seconds))
        else:
            self.transport.close()


class GuardedHttpTools(GuardedProtocol):
    """For uvicorn's protocol on httptools."""

    def on_headers_complete(self) -> None:
        self._has_progressed = True
        super().on_headers_complete()  # pyrefly: ignore[missing-attribute]

    def on_body(self, body: bytes) -> None:
        self._has_progressed = True
        super().on_body(body)  # pyrefly: ignore[missing-attribute]

    def on_message_complete(self) -> None:
        self._has_progressed = True
        super().on_message_complete()  # pyrefly: ignore[missing-attribute]


class GuardedH11(GuardedProtocol):
    """For uvicorn's protocol on h11, which itself limits what stands between the parts of a body.

    Set `h11_max_incomplete_event_size` to `h11_bytes`, so that it allows as much.
    """

    conn: h11.Connection

    def _is_past_head(self, before: Any) -> bool:
        return self.conn.their_state is not h11.IDLE or self.cycle is not before


def guarded_http(guard: ConnectionGuard, protocol: type[asyncio.Protocol] = AutoHTTPProtocol) -> type[asyncio.Protocol]:
    limited = GuardedH11 if issubclass(protocol, H11Protocol) else GuardedHttpTools
    return type("GuardedConnection", (limited, protocol), {"guard": guard})
