"""Who may talk to the server, and how much: one ASGI application around the API.

A request has to name an allowed host, must not come from a page of another site, has to carry the token, and its body
is limited in size and time. Probes (/health, /ready) need no token: they say nothing about the model. The web page
(`ui/web/security.py`) has the same rules for hosts, origins and bodies.
"""

import asyncio
import contextlib
import hmac
import re
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from trimaran.core import UserError
from trimaran.serve.server.api_error import error_response

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]
RawHeaders = Sequence[tuple[bytes, bytes]]

LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")
HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::(?P<port>[0-9]{1,5}))?", re.ASCII)
OPEN_PATHS = ("/health", "/ready")
BODY_SECONDS = 60.0
DRAIN_SECONDS = 10.0
DRAIN_BODIES = 4  # of a refused body, as many bytes are read and dropped as so many of the largest bodies have


class AccessMiddleware:
    """Refuses what may not come in. `hosts` are the names that a request may use; None: any."""

    def __init__(
        self, app: Application, *, token: str, hosts: Sequence[str] | None, max_body_bytes: int,
        on_refusal: Callable[[UserError], None] = lambda error: None,
    ) -> None:  # fmt: skip
        self._app, self._token = app, token.encode()
        self._hosts, self._max_body_bytes, self._on_refusal = hosts, max_body_bytes, on_refusal

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        incoming = _Incoming(receive)
        try:
            headers = scope["headers"]
            host = allowed_host(headers, self._hosts)
            if host is None:
                raise UserError("U006.server-not-answer", where="the header Host")
            if not is_own_origin(headers, host):
                raise UserError("U006.request-comes-page", where="the header Origin")
            given = [value for name, value in headers if name == b"authorization"]
            kind, _, token = (given[0] if len(given) == 1 else b"").partition(b" ")
            has_token = hmac.compare_digest(token.strip(), self._token) and kind.lower() == b"bearer"
            if scope["path"] not in OPEN_PATHS and not has_token:
                raise UserError("U005.token-missing-wrong", where="the header Authorization")
            lengths = [value for name, value in headers if name == b"content-length"]
            try:
                if lengths and lengths[0].isdigit() and int(lengths[0]) > self._max_body_bytes:
                    raise OverflowError
                async with asyncio.timeout(BODY_SECONDS):
                    body = await read_body(incoming.receive, self._max_body_bytes)
            except OverflowError:
                raise UserError("U007.body-more-bytes", where="the body", max_body_bytes=self._max_body_bytes) from None
            except TimeoutError:
                raise UserError("U018.body-did", where="the body", body_seconds=BODY_SECONDS) from None
        except UserError as error:
            self._on_refusal(error)
            await self._refuse(error, incoming, send)
            return
        if body is not None:
            await self._app(scope, _replayed(body, receive), send)

    async def _refuse(self, error: UserError, incoming: "_Incoming", send: Send) -> None:
        """Answer with an error, read the rest of the request, within bounds, and close the connection.

        A connection that is closed with unread data is reset, and the client may never see the answer.
        """
        response = error_response(error)
        headers = [*response.raw_headers, (b"connection", b"close")]
        await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        dropped = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                while not incoming.is_over and dropped <= DRAIN_BODIES * self._max_body_bytes:
                    dropped += len((await incoming.receive()).get("body", b""))
        await send({"type": "http.response.body"})


class _Incoming:
    """What a client sends, and whether it was all."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self.is_over = receive, False

    async def receive(self) -> Message:
        message = await self._receive()
        self.is_over = message["type"] != "http.request" or not message.get("more_body")
        return message


def allowed_host(headers: RawHeaders, hosts: Sequence[str] | None) -> str | None:
    """Return the Host of a request if it is allowed.

    A site that makes its own name point to this machine (DNS rebinding) is refused: its name is in the header. The port
    may be another one, that of a tunnel.
    """
    found = [value.decode("latin-1").lower() for name, value in headers if name == b"host"]
    match = HOST.fullmatch(found[0]) if len(found) == 1 else None
    return found[0] if match and (hosts is None or match["name"] in hosts) else None


def is_own_origin(headers: RawHeaders, host: str, *, required: bool = False) -> bool:
    """Return whether a request comes from a page of this server. One without Origin does, unless it is required."""
    found = [value for name, value in headers if name == b"origin"]
    return found == [f"http://{host}".encode()] if found or required else True


async def read_body(receive: Receive, max_bytes: int) -> bytes | None:
    """Return the body of a request; None if the client has gone. Raise OverflowError if the body is longer."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > max_bytes:
            raise OverflowError(size)
        if not message.get("more_body"):
            return b"".join(parts)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the whole body first, and then what comes from the client: that it has gone."""
    waiting = [body]

    async def replayed() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return replayed
