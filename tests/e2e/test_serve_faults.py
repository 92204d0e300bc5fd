"""`trimaran serve` when something changes or goes wrong: deaths, clients that vanish, new checkpoints, a stop."""

import asyncio
import json
import os
import shutil
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving import (
    ANSWER_SECONDS,
    MODEL,
    TOKEN,
    RunningServer,
    add_checkpoint,
    greedy_text,
    new_tiny_run,
    running_server,
    wait_for,
)
from trimaran.checkpoint import step_path
from trimaran.runs import RunDirectory

HEADERS = {"Authorization": f"Bearer {TOKEN}"}
LONG = {"max_tokens": 300, "temperature": 0.9, "seed": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serve-faults")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    """A server of a run that works on two requests at once, and lets two wait. At its end it is asked to stop."""
    run = new_tiny_run(folder / "run")
    add_checkpoint(run, 1)
    options = ("--follow", "--max-running", "2", "--max-queue", "2")
    with running_server(run.path, *options, log=folder / "log") as running:
        yield running
        _stop_in_a_stream(running)


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


def test_a_call_that_can_never_fit_is_400_and_one_that_fits_an_idle_server_is_answered(server: RunningServer) -> None:
    small = {"max_tokens": 1, "temperature": 0}
    assert server.client.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2, **small}).status_code == 200
    for path, body in [
        ("/v1/completions", {"prompt": ["a"] * 5, **small}),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 3, **small}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 5, **small}),
        ("/v1/embeddings", {"input": ["a"] * 2048}),
    ]:
        answer = server.client.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "U024")
        assert "at most 4 fit" in answer.text


def test_prompts_that_are_much_too_long_are_refused_with_their_size(server: RunningServer) -> None:
    text = "a" * (3 << 20)
    messages = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    for path, body in [
        ("/v1/completions", {"prompt": ["a", text]}),
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/embeddings", {"input": text}),
    ]:
        answer = server.client.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "U003")
        assert "3,145,728 characters" in answer.json()["error"]["what"]


def test_a_body_that_is_too_large_gets_413(server: RunningServer) -> None:
    body = b"x" * (33 << 20)
    answer = httpx.post(f"{server.url}/v1/completions", content=body, headers=HEADERS, timeout=ANSWER_SECONDS)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "U007")


def test_an_endless_head_and_half_heads_leave_the_server_to_others(server: RunningServer) -> None:
    address = httpx.URL(server.url)
    with ExitStack() as stack:
        connections = [
            stack.enter_context(socket.create_connection((address.host, address.port or 80))) for _ in range(100)
        ]
        for each in connections:
            each.sendall(b"GET / HTTP/1.1\r\nHo")
        endless = connections[0]
        endless.sendall(b"st: a\r\nX: " + b"a" * (40 << 10))
        assert endless.recv(100).startswith(b"HTTP/1.1 431 ")
        assert httpx.get(f"{server.url}/health").status_code == 200
    assert server.metrics()['errors_total{code="U021"}'] == 1


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
        server.wait_idle()  # the whole answer is generated, although the client has not read it
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


def test_new_checkpoints_answer_without_a_dropped_request(server: RunningServer, folder: Path) -> None:
    run = RunDirectory(folder / "run")
    assert fingerprint(server) == f"{MODEL}@step-1"
    restarts = server.metrics()["engine_restarts_total"]
    asyncio.run(_change_in_a_stream(server, run))
    expected = greedy_text(step_path(run.checkpoints, 2), "x", 20, run=run, step=2)
    answer = server.complete("x", max_tokens=20, ignore_eos=True)
    assert (answer["choices"][0]["text"], answer["system_fingerprint"]) == (expected, f"{MODEL}@step-2")
    _add_damaged_checkpoint(run, 3, folder / "elsewhere")
    wait_for(lambda: "step 3 is damaged" in (folder / "log").read_text(), "it is noticed", seconds=60)
    assert server.complete("x", max_tokens=20, ignore_eos=True)["choices"][0]["text"] == expected
    add_checkpoint(run, 4)
    wait_for(lambda: fingerprint(server) == f"{MODEL}@step-4", "the next one answers", seconds=60)
    assert server.metrics()["engine_restarts_total"] == restarts


def fingerprint(server: RunningServer) -> str:
    return server.complete("a", max_tokens=1)["system_fingerprint"]


async def _change_in_a_stream(server: RunningServer, run: RunDirectory) -> None:
    """Add a checkpoint while an answer is streamed: it is all from the weights before, and nothing fails."""
    async with new_client(server) as client:
        prints: set[str] = set()
        body = {"prompt": "stream", "stream": True, **LONG, "max_tokens": 400}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            parts = parts_of(answer)
            prints.add((await anext(parts))["system_fingerprint"])
            await asyncio.to_thread(add_checkpoint, run, 2)
            later = [asyncio.create_task(client.post("/v1/completions", json={"prompt": "l"})) for _ in range(2)]
            async for part in parts:
                prints.add(part["system_fingerprint"])
        assert prints == {f"{MODEL}@step-1"}
        assert {(await each).status_code for each in later} == {200}
    wait_for(lambda: fingerprint(server) == f"{MODEL}@step-2", "the new weights answer", seconds=60)


def _add_damaged_checkpoint(run: RunDirectory, step: int, elsewhere: Path) -> None:
    """Add a checkpoint whose weights are not those that were written; it appears at once, as a whole."""
    other = RunDirectory(elsewhere)
    shutil.copytree(run.path, elsewhere, ignore=shutil.ignore_patterns("checkpoints"))
    add_checkpoint(other, step)
    file = max(step_path(other.checkpoints, step).iterdir(), key=lambda each: each.stat().st_size)
    file.write_bytes(bytes(file.stat().st_size))
    step_path(other.checkpoints, step).rename(step_path(run.checkpoints, step))


def _stop_in_a_stream(server: RunningServer) -> None:
    """Send SIGTERM while an answer is streamed: it is finished, what comes later is refused."""
    (engine,) = server.engines()

    async def work() -> tuple[str, httpx.Response, httpx.Response]:
        async with new_client(server) as client:
            started = asyncio.Event()
            stream = asyncio.create_task(texts_of(client, started))
            await started.wait()
            engine.suspend()  # so that the stream is still open
            server.process.send_signal(signal.SIGTERM)
            while (probe := await client.get("/ready")).status_code == 200:
                await asyncio.sleep(0.02)
            refused = await client.post("/v1/completions", json={"prompt": "late"})
            engine.resume()
            return await stream, refused, probe

    undisturbed = server.complete("stream", **LONG)["choices"][0]["text"]
    text, refused, probe = asyncio.run(work())
    assert text == undisturbed
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "U009")
    assert probe.json() == {"status": "draining"}
    assert server.process.wait(60) == 0
    wait_for(lambda: not engine.is_running(), "the engine ends with its server")
