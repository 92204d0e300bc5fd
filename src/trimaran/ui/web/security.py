"""Who may talk to the web page: one ASGI application around all others, so that no route is left out.

A request has to name this machine as its host, come from a page of this server, and carry the cookie that is given for
the token in the address. Responses say what a browser may do with them; see docs/guides/ui.md.
"""

import asyncio
import hmac
import re
import secrets
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from importlib.resources import files

from trimaran.serve import (
    LOCAL_NAMES,
    Application,
    Message,
    RawHeaders,
    Receive,
    Send,
    allowed_host,
    is_own_origin,
    read_body,
)

READING = ("GET", "HEAD")
LOGIN = "/login"
MAX_TOKEN_BYTES = 256
TOKEN_SECONDS = 10.0
# NiceGUI puts `X-Forwarded-Prefix` into its pages; there is no proxy that would have to set it.
REMOVED_HEADER = b"x-forwarded-"
SCRIPT = re.compile(rb"<script(?=[\s>])")
SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
PLAIN = "text/plain; charset=utf-8"
HTML = "text/html; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Credentials:
    """The token in the address that is opened, and the cookie that a browser gets for it. They do not follow."""

    port: int
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    session: str = field(default_factory=lambda: secrets.token_urlsafe(32))

    @property
    def cookie_name(self) -> str:
        """Browsers keep one set of cookies for all ports of a host."""
        return f"trimaran-{self.port}"

    @property
    def url(self) -> str:
        """The address to open. A browser sends no fragment to a server: it is in no log and in no referrer."""
        return f"http://127.0.0.1:{self.port}/#token={self.token}"


class SecurityMiddleware:
    """Refuses what does not come from the user's own browser, and adds security headers to all responses."""

    def __init__(self, app: Application, credentials: Credentials, *, token_seconds: float = TOKEN_SECONDS) -> None:
        self._token_seconds = token_seconds
        self.app, self._credentials = app, credentials  # NiceGUI looks for its own application below `app`
        self._login_page = files("trimaran.ui.web").joinpath("login.html").read_bytes()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
            return
        if scope["type"] == "websocket":
            headers, host = scope["headers"], allowed_host(scope["headers"], LOCAL_NAMES)
            if host is None or not is_own_origin(headers, host, required=True) or not self._has_cookie(headers):
                await receive()
                await send({"type": "websocket.close", "code": 1008})  # before it is accepted: the server answers 403
                return
            scope = _forwarded(scope)
        await self.app(scope, receive, send)

    async def _http(self, scope: Message, receive: Receive, send: Send) -> None:
        headers, nonce = scope["headers"], secrets.token_urlsafe(16)
        host = allowed_host(headers, LOCAL_NAMES)
        send = _secured(send, host or "", nonce)
        reads = scope["method"] in READING
        if host is None:
            await _answer(send, 403, "this server answers only to the names of this machine\n")
        elif not is_own_origin(headers, host, required=not reads):
            await _answer(send, 403, "this request comes from another site\n")
        elif scope["path"] == LOGIN and scope["method"] == "POST":
            await self._log_in(receive, send)
        elif not self._has_cookie(headers):
            wants_page = reads and b"text/html" in _header(headers, b"accept")
            body, kind = (self._login_page, HTML) if wants_page else ("the token is missing\n", PLAIN)
            await _answer(send, 401, body, kind=kind)
        else:
            await self.app(_forwarded(scope), receive, send)

    async def _log_in(self, receive: Receive, send: Send) -> None:
        """Give the cookie for the token. The token stays valid: the address may be opened in another browser."""
        try:
            async with asyncio.timeout(self._token_seconds):
                given = await read_body(receive, MAX_TOKEN_BYTES)
        except (TimeoutError, OverflowError):
            given = None
        if given is None or not hmac.compare_digest(given, self._credentials.token.encode()):
            await _answer(send, 401, "this is not the token of this server\n")
            return
        name, value = self._credentials.cookie_name, self._credentials.session
        cookie = f"{name}={value}; Path=/; HttpOnly; SameSite=Strict"
        await _answer(send, 200, "", extra=((b"set-cookie", cookie.encode()),))

    def _has_cookie(self, headers: RawHeaders) -> bool:
        cookies: SimpleCookie = SimpleCookie()
        try:
            cookies.load(_header(headers, b"cookie").decode("latin-1"))
        except CookieError:
            return False
        given = cookies.get(self._credentials.cookie_name)
        return given is not None and hmac.compare_digest(
            given.value.encode("latin-1", "replace"), self._credentials.session.encode()
        )


def content_policy(host: str, nonce: str) -> str:
    """Return the Content-Security-Policy of all pages.

    Scripts are our files and those with the nonce; `eval` and attributes such as `onclick` are refused. Quasar and Vue
    set styles of elements while a page is shown, so that styles cannot have a nonce.
    """
    rules = {
        "default-src": "'none'",
        "script-src": f"'self' 'nonce-{nonce}'",
        "style-src": "'self' 'unsafe-inline'",
        "img-src": "'self' data:",
        "font-src": "'self'",
        "connect-src": f"'self' ws://{host}" if host else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _header(headers: RawHeaders, wanted: bytes) -> bytes:
    return b"; ".join(value for name, value in headers if name == wanted)


def _forwarded(scope: Message) -> Message:
    kept = [(name, value) for name, value in scope["headers"] if not name.startswith(REMOVED_HEADER)]
    return {**scope, "headers": kept}


def _secured(send: Send, host: str, nonce: str) -> Send:
    """Return a `send` that adds the headers, and the nonce to every script element of a page."""
    begun: list[Message] = []  # the start of a page, which waits for its body
    parts: list[bytes] = []

    async def secured(message: Message) -> None:
        if message["type"] == "http.response.start":
            kept = [(name, value) for name, value in message.get("headers", []) if name.lower() != b"server"]
            rules = (b"content-security-policy", content_policy(host, nonce).encode())
            message = {**message, "headers": [*kept, rules, *SECURITY_HEADERS]}
            if _header(kept, b"content-type").startswith(b"text/html"):
                begun.append(message)
                return
        elif message["type"] == "http.response.body" and begun:
            parts.append(message.get("body", b""))
            if message.get("more_body"):
                return
            start, body = begun.pop(), SCRIPT.sub(f'<script nonce="{nonce}"'.encode(), b"".join(parts))
            others = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
            await send({**start, "headers": [*others, (b"content-length", str(len(body)).encode())]})
            message = {"type": "http.response.body", "body": body}
        await send(message)

    return secured


async def _answer(send: Send, status: int, body: str | bytes, *, kind: str = PLAIN, extra: RawHeaders = ()) -> None:
    data = body.encode() if isinstance(body, str) else body
    sizes = [(b"content-type", kind.encode()), (b"content-length", str(len(data)).encode())]
    headers = [*sizes, (b"cache-control", b"no-store"), *extra]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})
