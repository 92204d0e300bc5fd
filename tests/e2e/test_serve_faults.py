"""`trimaran serve` when something goes wrong: a killed engine, clients that vanish, a full queue, a stop."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving import ANSWER_SECONDS, TOKEN, RunningServer, running_server, save_tiny_model, wait_for

HEADERS = {"Authorization": f"Bearer {TOKEN}"}
LONG = {"max_tokens": 300, "temperature": 0.9, "seed": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serve-faults")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    """A server that works on two requests at once, and lets two wait."""
    model = save_tiny_model(folder / "model")
    with running_server(model, "--max-running", "2", "--max-queue", "2", log=folder / "log") as running:
        yield running


async def texts_of(client: httpx.AsyncClient, started: asyncio.Event | None = None, **fields: Any) -> str:
    """Return the text of a streamed completion. `started` is set when the first part is there."""
    body = {"prompt": "stream", "stream": True, **LONG, **fields}
    text = ""
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for part in parts_of(answer):
            text += part["choices"][0]["text"]
            if started is not None:
                started.set()
    return text


async def parts_of(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.aiter_lines():
        if line and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def new_client(server: RunningServer) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, headers=HEADERS, timeout=ANSWER_SECONDS)


def test_a_full_queue_answers_429_and_the_rest_is_answered(server: RunningServer) -> None:
    async def work() -> list[httpx.Response]:
        async with new_client(server) as client:
            body = {"prompt": "q", **LONG}
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(12)))

    answers = asyncio.run(work())
    refused = [each for each in answers if each.status_code == 429]
    texts = {each.json()["choices"][0]["text"] for each in answers if each.status_code == 200}
    assert refused
    assert len(texts) == 1
    assert {each.status_code for each in answers} == {200, 429}
    assert refused[0].json()["error"]["code"] == "U008"
    assert int(refused[0].headers["retry-after"]) >= 1
    server.wait_idle()


def test_a_client_that_vanishes_frees_its_pages_and_its_place(server: RunningServer) -> None:
    gone_before = server.metrics()["disconnects_total"]
    for stream in (True, False):
        body = json.dumps({"prompt": "x", **LONG, "stream": stream}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n"
        address = httpx.URL(server.url)
        with socket.create_connection((address.host, address.port or 80)) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            if stream:
                assert connection.recv(100).startswith(b"HTTP/1.1 200")
            else:
                wait_for(lambda: server.metrics()["running_requests"] == 1, "it runs")
    wait_for(lambda: server.metrics()["disconnects_total"] == gone_before + 2, "both are noticed")
    server.wait_idle()


def test_a_reader_that_does_not_read_blocks_nobody(server: RunningServer) -> None:
    body = json.dumps({"prompt": "slow", **LONG, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n"
    address = httpx.URL(server.url)
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        slow.connect((address.host, address.port or 80))
        slow.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_for(lambda: server.metrics()["running_requests"] == 1, "it runs")
        server.wait_idle()  # it is generated, although nobody has read it
        assert server.complete("quick", max_tokens=3)["choices"][0]["finish_reason"] == "length"


def test_answers_go_on_when_the_engine_is_killed_in_the_middle(server: RunningServer) -> None:
    async def work(*, kill: bool) -> list[str]:
        async with new_client(server) as client:
            started = [asyncio.Event() for _ in range(2)]
            streams = [
                asyncio.create_task(texts_of(client, event, prompt=f"p{number}", seed=number, logprobs=1))
                for number, event in enumerate(started)
            ]
            waiting = asyncio.create_task(client.post("/v1/completions", json={"prompt": "w", **LONG, "n": 2}))
            await asyncio.gather(*(event.wait() for event in started))
            if kill:
                (engine,) = server.engines()
                os.kill(engine.pid, signal.SIGKILL)
            answer = await waiting
            assert answer.status_code == 200, answer.text
            return [*await asyncio.gather(*streams), *(each["text"] for each in answer.json()["choices"])]

    undisturbed = asyncio.run(work(kill=False))
    restarts = server.metrics()["engine_restarts_total"]
    assert asyncio.run(work(kill=True)) == undisturbed
    assert server.metrics()["engine_restarts_total"] == restarts + 1
    server.wait_idle()


@pytest.mark.slow  # tests/unit/test_serve_parts.py has the same of the queue alone
def test_a_request_that_runs_in_two_deaths_fails_and_the_server_lives(server: RunningServer) -> None:
    async def work() -> httpx.Response:
        async with new_client(server) as client:
            asked = asyncio.create_task(
                client.post("/v1/completions", json={"prompt": "unlucky", **LONG, "max_tokens": 4000})
            )
            for _ in range(2):
                while not asked.done() and server.metrics()["running_requests"] < 1:
                    await asyncio.sleep(0.01)
                (engine,) = server.engines()
                engine.suspend()  # so that it cannot finish before it is killed
                os.kill(engine.pid, signal.SIGKILL)
                while server.metrics()["running_requests"]:
                    await asyncio.sleep(0.01)
            return await asked

    answer = asyncio.run(work())
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "U010")
    assert server.complete("lives", max_tokens=2)["usage"]["completion_tokens"] == 2
