"""Who may talk to the web page: hosts, origins, tokens, cookies, and the headers of every answer."""

import asyncio
import re
from typing import Any

import pytest

from trimaran.ui import Credentials, SecurityMiddleware, content_policy

PORT = 8123
HOST = f"127.0.0.1:{PORT}"
PAGE = b'<html><script>one()</script><script type="module">two()</script><p>text</p></html>'


async def inner(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers everything: what reaches it was let through."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        return
    given = dict(scope["headers"])
    assert b"x-forwarded-prefix" not in given
    is_page = scope["path"] == "/"
    kind = b"text/html; charset=utf-8" if is_page else b"text/javascript"
    body = PAGE if is_page else b"<script>"
    start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]}
    await send(start | {"headers": [*start["headers"], (b"content-length", str(len(body)).encode())]})
    await send({"type": "http.response.body", "body": body[:10], "more_body": True})
    await send({"type": "http.response.body", "body": body[10:]})


@pytest.fixture
def credentials() -> Credentials:
    return Credentials(PORT)


class Answer:
    """The answer to one request."""

    def __init__(self, messages: list[Any]) -> None:
        self.kind, self.status = messages[0]["type"], messages[0].get("status")
        self.headers = {name.decode(): value.decode() for name, value in messages[0].get("headers", [])}
        self.body = b"".join(each.get("body", b"") for each in messages[1:])


def ask(credentials: Credentials, path: str = "/", *, method: str = "GET", body: bytes = b"", kind: str = "http",
        **headers: str) -> Answer:  # fmt: skip
    """Return the answer to a request with these headers; `_` is `-`, and `host` is this machine unless it is given."""
    given = {"host": HOST} | {name.replace("_", "-"): value for name, value in headers.items()}
    pairs = [(name.encode(), value.encode("latin-1")) for name, value in given.items() if value is not None]
    scope = {"type": kind, "path": path, "method": method, "headers": pairs, "query_string": b""}
    messages: list[Any] = []
    requests = [{"type": "http.request", "body": body}] if kind == "http" else [{"type": "websocket.connect"}]

    async def receive() -> Any:
        return requests.pop(0)

    async def send(message: Any) -> None:
        messages.append(message)

    asyncio.run(SecurityMiddleware(inner, credentials)(scope, receive, send))
    return Answer(messages)


def test_a_token_that_does_not_arrive_is_not_waited_for(credentials: Credentials) -> None:
    headers = [(b"host", HOST.encode()), (b"origin", f"http://{HOST}".encode())]
    scope = {"type": "http", "path": "/login", "method": "POST", "headers": headers, "query_string": b""}
    sent: list[Any] = []

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    middleware = SecurityMiddleware(inner, credentials, token_seconds=0.01)
    asyncio.run(asyncio.wait_for(middleware(scope, receive, send), 30))
    assert sent[0]["status"] == 401


def cookie(credentials: Credentials) -> str:
    return f"other=1; {credentials.cookie_name}={credentials.session}"


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/workshop",
        "/_nicegui/3.18.0/static/nicegui.js",
        "/_nicegui_ws/socket.io/",
        "/_nicegui/client/upload/1",
        "/_trimaran/web.js",
        "/runs/../../etc/passwd",
    ],
)
def test_nothing_is_answered_without_the_cookie(credentials: Credentials, path: str) -> None:
    assert ask(credentials, path).status == 401
    assert ask(credentials, path, cookie=f"{credentials.cookie_name}=wrong").status == 401
    assert ask(credentials, path, cookie=f"{credentials.cookie_name}={credentials.token}").status == 401
    assert ask(credentials, path, cookie=cookie(credentials)).status == 200


def test_a_browser_without_the_cookie_gets_the_login_page(credentials: Credentials) -> None:
    answer = ask(credentials, accept="text/html,*/*")
    assert answer.status == 401
    assert b"location.hash" in answer.body
    assert credentials.token.encode() not in answer.body


def test_the_token_is_exchanged_for_a_cookie_that_scripts_cannot_read(credentials: Credentials) -> None:
    answer = ask(credentials, "/login", method="POST", body=credentials.token.encode(), origin=f"http://{HOST}")
    assert answer.status == 200
    set_cookie = answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= {part.strip() for part in set_cookie.split(";")}
    assert credentials.token not in set_cookie
    assert ask(credentials, cookie=set_cookie.split(";")[0]).status == 200


@pytest.mark.parametrize("body", [b"", b"x", b"y" * 10_000, b"\xff\xfe"])
def test_another_token_is_refused(credentials: Credentials, body: bytes) -> None:
    answer = ask(credentials, "/login", method="POST", body=body, origin=f"http://{HOST}")
    assert answer.status == 401
    assert "set-cookie" not in answer.headers


def test_token_and_cookie_of_an_earlier_server_are_refused(credentials: Credentials) -> None:
    earlier = Credentials(PORT)
    answer = ask(credentials, "/login", method="POST", body=earlier.token.encode(), origin=f"http://{HOST}")
    assert answer.status == 401
    assert ask(credentials, cookie=cookie(earlier)).status == 401


@pytest.mark.parametrize("host", ["evil.example", f"evil.example:{PORT}", "127.0.0.1.evil.example", "10.0.0.1",
                                  "0.0.0.0:8123", "localhost@evil.example", "", "127.0.0.1:x", "[::2]"])  # fmt: skip
def test_a_name_that_is_not_of_this_machine_is_refused(credentials: Credentials, host: str) -> None:
    """With DNS rebinding a site makes its own name point to 127.0.0.1."""
    assert ask(credentials, host=host, cookie=cookie(credentials)).status == 403
    socket = ask(credentials, kind="websocket", host=host, origin=f"http://{host}", cookie=cookie(credentials))
    assert socket.kind == "websocket.close"


@pytest.mark.parametrize("host", ["127.0.0.1:8123", "localhost:8123", "LOCALHOST:9", "[::1]:8123", "127.0.0.1"])
def test_names_of_this_machine_and_ports_of_tunnels_are_accepted(credentials: Credentials, host: str) -> None:
    assert ask(credentials, host=host, cookie=cookie(credentials)).status == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1:8123", "http://127.0.0.1:9999"])
def test_another_site_may_neither_read_nor_write(credentials: Credentials, origin: str) -> None:
    for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS"):
        answer = ask(credentials, "/x", method=method, origin=origin, cookie=cookie(credentials))
        assert answer.status == 403
        assert "access-control-allow-origin" not in answer.headers


def test_a_write_needs_an_origin(credentials: Credentials) -> None:
    assert ask(credentials, "/x", method="POST", cookie=cookie(credentials)).status == 403
    own = ask(credentials, "/x", method="POST", cookie=cookie(credentials), origin=f"http://{HOST}")
    assert own.status == 200


def test_a_websocket_needs_the_cookie_and_the_own_origin(credentials: Credentials) -> None:
    own, given = f"http://{HOST}", cookie(credentials)
    assert ask(credentials, kind="websocket", origin=own, cookie=given).kind == "websocket.accept"
    refused = [
        ask(credentials, kind="websocket", cookie=given),
        ask(credentials, kind="websocket", origin=own),
        ask(credentials, kind="websocket", origin="http://evil.example", cookie=given),
    ]
    assert {each.kind for each in refused} == {"websocket.close"}


def test_every_script_of_a_page_has_the_nonce_of_its_policy(credentials: Credentials) -> None:
    first, second = (ask(credentials, cookie=cookie(credentials), x_forwarded_prefix="/evil") for _ in range(2))
    (nonce,) = re.findall("'nonce-([^']+)'", first.headers["content-security-policy"])
    assert first.body.count(f'<script nonce="{nonce}"'.encode()) == 2
    assert int(first.headers["content-length"]) == len(first.body)
    assert nonce.encode() not in second.body
    assert ask(credentials, "/x.js", cookie=cookie(credentials)).body == b"<script>"


def test_every_answer_says_what_a_browser_may_do_with_it(credentials: Credentials) -> None:
    answers = [ask(credentials), ask(credentials, host="evil.example"), ask(credentials, cookie=cookie(credentials))]
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"


def test_the_policy_allows_no_eval_no_inline_script_and_no_other_host() -> None:
    rules = dict(each.split(" ", 1) for each in content_policy(HOST, "abc").split("; "))
    assert rules["script-src"] == "'self' 'nonce-abc'"
    assert rules["connect-src"] == f"'self' ws://{HOST}"
    assert not re.search(r"eval|https:|http:|\*", str(rules))
