"""Limits on heads and on the number of connections, with real sockets, for `trimaran serve` and `trimaran ui`."""

import asyncio
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.http.h11_impl import H11Protocol

from trimaran.serve import (
    AccessMiddleware,
    ConnectionGuard,
    ConnectionLimits,
    error_response,
    guarded_http,
    http_config,
)

SECONDS = 30.0  # until something that comes at once has failed
HEAD = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"
WHOLE = HEAD + b"\r\n"
SMALL = ConnectionLimits(head_bytes=16 << 10, head_seconds=0.2)


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answer /unread at once, and everything else with the length of its body."""
    size, more = 0, scope["path"] != "/unread"
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    body = str(size).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


Connect = Callable[[], socket.socket]


@contextmanager
def listening(
    limits: ConnectionLimits, protocol: Any = AutoHTTPProtocol, make: Any = http_config, app: Any = echo
) -> Iterator[Connect]:
    """Serve `app` in a thread; yield what opens a connection to it."""
    config = make(app, ConnectionGuard(limits, error_response))
    config.http = guarded_http(ConnectionGuard(limits, error_response), protocol)
    server, open_socket = uvicorn.Server(config), socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([open_socket])))
    thread.start()
    with ExitStack() as stack:

        def connect() -> socket.socket:
            found = socket.create_connection(open_socket.getsockname(), timeout=SECONDS)
            return stack.enter_context(found)

        try:
            yield connect
        finally:
            stack.close()
            server.should_exit = True
            thread.join()
            open_socket.close()


def rest_of(connection: socket.socket) -> bytes:
    """Return all that comes until the server closes."""
    found = b""
    while part := connection.recv(1 << 16):
        found += part
    return found


def answer_of(connection: socket.socket, request: bytes = WHOLE) -> str:
    """Return the body of the answer to a request."""
    connection.sendall(request)
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    assert answer.status == 200
    return answer.read().decode()


def sent_until_closed(connection: socket.socket, part: bytes, pause: float = 0.0) -> int:
    """Return how many bytes can be sent, part by part, before the server closes."""
    sent, end = 0, time.monotonic() + SECONDS
    try:
        while time.monotonic() < end:
            connection.sendall(part)
            sent += len(part)
            time.sleep(pause)
    except ConnectionError:
        return sent
    raise AssertionError("it is not closed")


PROTOCOLS = list(dict.fromkeys((AutoHTTPProtocol, H11Protocol)))  # in one order, in every process


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_endless_head_is_refused_and_delays_nobody(protocol: Any) -> None:
    with listening(SMALL, protocol) as connect:
        endless, other = connect(), connect()
        endless.sendall(HEAD + b"X: ")
        assert sent_until_closed(endless, b"a" * (1 << 20)) < 64 << 20, "what a refused client sends is not read on"
        assert answer_of(other) == "0"
        polite = connect()
        polite.sendall(HEAD + b"X: " + b"a" * (40 << 10))
        refused = rest_of(polite)
        assert refused.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
        assert b"connection: close" in refused
        assert b'"code":"U021"' in refused


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_heads_up_to_the_limit_and_long_bodies_pass(protocol: Any) -> None:
    with listening(SMALL, protocol) as connect:
        connection = connect()
        filling = b"X: %s\r\n\r\n" % (b"a" * (SMALL.head_bytes - len(HEAD) - len(b"X: \r\n\r\n")))
        assert answer_of(connection, HEAD + filling) == "0"
        body = b"b" * (3 << 20)
        head = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(body)
        assert answer_of(connection, head + body) == str(len(body))
        chunks = b"".join(b"%x\r\n%s\r\n" % (1 << 10, b"c" * (1 << 10)) for _ in range(100))
        head = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
        assert answer_of(connection, head + chunks + b"0\r\n\r\n") == "102400"
        one, two = WHOLE * 2, b""
        connection.sendall(one)
        while two.count(b"HTTP/1.1 200") < 2:
            two += connection.recv(1 << 16)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_endless_trailer_is_refused(protocol: Any) -> None:
    with listening(SMALL, protocol) as connect:
        connection = connect()
        connection.sendall(b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: ")
        assert sent_until_closed(connection, b"a" * (1 << 20)) < 64 << 20


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_half_a_head_gets_408_and_silence_is_closed(protocol: Any) -> None:
    with listening(SMALL, protocol) as connect:
        many = [connect() for _ in range(20)]
        for each in many:
            each.sendall(b"GET / HTTP/1.1\r\nHo")
        used = connect()
        assert answer_of(used) == "0"
        used.sendall(b"GET / ")  # the second request of a connection
        for each in (*many, used):
            refused = rest_of(each)
            assert refused.startswith(b"HTTP/1.1 408 ")
            assert b"U022" in refused


def test_a_slow_head_that_comes_byte_by_byte_gets_408() -> None:
    with listening(SMALL) as connect:
        connection, end = connect(), time.monotonic() + SECONDS
        connection.settimeout(0.02)
        answer = b""
        for byte in WHOLE * 1000:
            assert time.monotonic() < end
            connection.sendall(bytes([byte]))
            try:
                answer = connection.recv(1 << 16)
                break
            except TimeoutError:
                continue
        assert answer.startswith(b"HTTP/1.1 408 ")


def test_a_body_that_nobody_reads_does_not_hold_a_connection() -> None:
    with listening(SMALL) as connect:
        connection = connect()
        head = b"POST /unread HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000000\r\n\r\n"
        assert answer_of(connection, head) == "0"
        assert sent_until_closed(connection, b"b", pause=0.02) < 1_000_000


@pytest.mark.parametrize(("per_client", "total"), [(4, 100), (100, 4)])
def test_the_oldest_waiting_connection_of_a_client_makes_room(per_client: int, total: int) -> None:
    with listening(ConnectionLimits(per_client=per_client, total=total)) as connect:
        silent = [connect() for _ in range(4)]
        for each in silent:
            each.sendall(b"GET / HTTP/1.1\r\nHo")
        late = connect()
        assert answer_of(late) == "0"
        with suppress(ConnectionResetError):  # if it is closed before what it sent is read
            assert rest_of(silent[0]) == b""
        assert answer_of(silent[3], b"st: 127.0.0.1\r\n\r\n") == "0", "newer ones stay"


def test_a_connection_is_refused_while_all_others_are_answered() -> None:
    with listening(ConnectionLimits(per_client=2, total=100)) as connect:
        busy = [connect(), connect()]
        for each in busy:
            each.sendall(b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\n")
            assert each.recv(100).startswith(b"HTTP/1.1 100 ")
        refused = rest_of(connect())
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"U023" in refused
        for each in busy:
            assert answer_of(each, b"x") == "1"


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(("size", "token", "status"), [(33 << 10, "t", 413), (33 << 10, "wrong", 401), (9, "t", 200)])
def test_a_refused_body_is_read_so_that_the_answer_arrives(protocol: Any, size: int, token: str, status: int) -> None:
    app = AccessMiddleware(echo, token="t", hosts=None, max_body_bytes=32 << 10)
    with listening(SMALL, protocol, app=app) as connect:
        for fields in (b"Content-Length: %d" % size, b"Transfer-Encoding: chunked"):
            connection = connect()
            head = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer %s\r\n%s\r\n\r\n"
            connection.sendall(head % (token.encode(), fields))
            if b"chunked" in fields:
                connection.sendall(b"%x\r\n" % size)
            for begin in range(0, size, 1 << 10):
                connection.sendall(b"b" * min(1 << 10, size - begin))
            if b"chunked" in fields:
                connection.sendall(b"\r\n0\r\n\r\n")
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            assert answer.status == status
            assert answer.read()
            if status != 200:
                assert rest_of(connection) == b""  # it is closed, and not reset


def test_the_web_page_has_the_same_limits() -> None:
    pages = pytest.importorskip("trimaran.ui.web.server", exc_type=ImportError)
    with listening(SMALL, make=pages.http_config) as connect:
        connection = connect()
        connection.sendall(b"GET / HTTP/1.1\r\nHo")
        assert rest_of(connection).startswith(b"HTTP/1.1 408 ")
