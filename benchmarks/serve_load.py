"""Loads a server of a tiny model with many clients, of which some misbehave, and kills its engine now and then.

Every answer is compared with the one that the same request got alone. At the end no request, page, file descriptor or
memory may be left. Prints one JSON object; the exit code is 1 if anything is wrong.

    python benchmarks/serve_load.py --requests 10000 --clients 256 --kills 5
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from tests.serving import TOKEN, RunningServer, running_server, save_tiny_model

NUM_QUESTIONS = 48
STUCK_SECONDS = 600.0
HUGE = b"[" + b"1," * (1 << 20)
KINDS = {"whole": 40, "stream": 34, "slow": 6, "disconnect": 10, "bad-json": 3, "too-long": 3, "huge": 2, "unknown": 2}
REFUSALS = {"bad-json": 400, "too-long": 400, "huge": 413, "unknown": 404}


@dataclass(slots=True)
class LoadReport:
    """What happened. `wrong` are answers that differ; `unexpected` statuses that a request must not get."""

    answers: Counter[str] = field(default_factory=Counter)
    retries: int = 0
    wrong: int = 0
    unexpected: Counter[str] = field(default_factory=Counter)
    stuck: int = 0
    kills: int = 0
    first_seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Resources:
    """What the server's front end holds: memory in MiB, file descriptors, threads."""

    rss_mib: float
    files: int
    threads: int


def resources_of(server: RunningServer) -> Resources:
    process = psutil.Process(server.process.pid)
    return Resources(round(process.memory_info().rss / 2**20, 1), process.num_fds(), process.num_threads())


def questions(seed: int) -> list[dict[str, Any]]:
    """Return requests with answers of different lengths, greedy and drawn."""
    chosen = random.Random(seed)
    return [
        {
            "prompt": "".join(chosen.choice("abcdef ()=\n") for _ in range(chosen.randint(1, 60))),
            "max_tokens": chosen.randint(1, 24),
            "temperature": chosen.choice((0, 0.8)),
            "seed": number,
            "ignore_eos": True,
        }
        for number in range(NUM_QUESTIONS)
    ]


class LoadClients:
    """Clients that ask until all requests are done."""

    def __init__(self, server: RunningServer, expected: list[str], asked: list[dict[str, Any]], seed: int) -> None:
        self._server, self._expected, self._asked = server, expected, asked
        self._random, self.report = random.Random(seed), LoadReport()
        self._left = 0

    async def run(self, num_requests: int, num_clients: int, kills: int) -> None:
        """Ask all requests. The engine is killed after equal shares of them."""
        self._left = num_requests
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=num_clients)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with httpx.AsyncClient(base_url=self._server.url, headers=headers, limits=limits, timeout=STUCK_SECONDS
                                     ) as client:  # fmt: skip
            killer = asyncio.create_task(self._kill(num_requests, kills))
            await asyncio.gather(*(self._ask(client) for _ in range(num_clients)))
            killer.cancel()

    async def _kill(self, num_requests: int, kills: int) -> None:
        for number in range(kills):
            while self._left > num_requests * (1 - (number + 1) / (kills + 1)):
                await asyncio.sleep(0.05)
            for engine in self._server.engines()[:1]:
                os.kill(engine.pid, signal.SIGKILL)
                self.report.kills += 1

    async def _ask(self, client: httpx.AsyncClient) -> None:
        while self._left > 0:
            self._left -= 1
            kind = self._random.choices([*KINDS], [*KINDS.values()])[0]
            try:
                async with asyncio.timeout(STUCK_SECONDS):
                    await self._one(client, kind, self._random.randrange(NUM_QUESTIONS))
            except TimeoutError:
                self.report.stuck += 1
            except httpx.HTTPError as error:
                self.report.unexpected[f"{kind}: {type(error).__name__}"] += 1

    async def _one(self, client: httpx.AsyncClient, kind: str, number: int) -> None:
        if kind in REFUSALS:
            await self._misbehave(client, kind)
            return
        body = self._asked[number] | {"stream": kind != "whole"}
        while True:
            began = time.monotonic()
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code == 429:
                    await answer.aread()
                    self.report.retries += 1
                    await asyncio.sleep(float(answer.headers["retry-after"]) * self._random.random())
                    continue
                self.report.first_seconds.append(time.monotonic() - began)
                if answer.status_code != 200:
                    self._count_failure(kind, answer.status_code, await answer.aread())
                    return
                text = await self._text(answer, kind)
            self.report.answers[kind] += 1
            if text is not None and text != self._expected[number]:
                self.report.wrong += 1
            return

    async def _text(self, answer: httpx.Response, kind: str) -> str | None:
        """Return the text of an answer; None if the client goes away before its end."""
        if kind == "whole":
            return json.loads(await answer.aread())["choices"][0]["text"]
        text, parts = "", 0
        async for line in answer.aiter_lines():
            if not line or line == "data: [DONE]":
                continue
            part = json.loads(line.removeprefix("data: "))
            if "error" in part:
                self.report.unexpected[f"{kind}: {part['error']['code']}"] += 1
                return None
            text += part["choices"][0]["text"]
            parts += 1
            if kind == "disconnect" and parts == 2:
                return None
            if kind == "slow":
                await asyncio.sleep(0.2)
        return text

    def _count_failure(self, kind: str, status: int, body: bytes) -> None:
        code = json.loads(body)["error"]["code"]
        self.report.unexpected[f"{kind}: {status} {code}"] += 1

    async def _misbehave(self, client: httpx.AsyncClient, kind: str) -> None:
        content = {
            "bad-json": b'{"prompt": ',
            "too-long": json.dumps({"prompt": "x" * 9000}).encode(),
            "huge": HUGE,
            "unknown": b'{"prompt": "a", "model": "nobody"}',
        }[kind]
        try:
            answer = await client.post("/v1/completions", content=content)
        except (httpx.WriteError, httpx.ReadError):
            if kind != "huge":  # the server closes the connection while a body that is too large is sent
                raise
            self.report.answers[kind] += 1
            return
        if answer.status_code == REFUSALS[kind]:
            self.report.answers[kind] += 1
        else:
            self.report.unexpected[f"{kind}: {answer.status_code}"] += 1


def percentile(values: list[float], fraction: float) -> float:
    return round(sorted(values)[int(fraction * (len(values) - 1))], 4) if values else 0.0


def measure(num_requests: int, num_clients: int, kills: int, *, seed: int = 0, max_queue: int = 128) -> dict[str, Any]:
    """Return the figures of one run, with `ok` if nothing is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        model, log = save_tiny_model(Path(folder) / "model"), Path(folder) / "log"
        options = ("--max-body-mb", "1", "--max-queue", str(max_queue))
        with running_server(model, *options, log=log) as server:
            asked = questions(seed)
            expected = [server.complete(**each)["choices"][0]["text"] for each in asked]
            warm = LoadClients(server, expected, asked, seed + 1)
            asyncio.run(warm.run(max(num_requests // 10, num_clients), num_clients, 0))
            server.wait_idle()
            before, counted = resources_of(server), server.metrics()
            clients = LoadClients(server, expected, asked, seed + 2)
            began = time.monotonic()
            asyncio.run(clients.run(num_requests, num_clients, kills))
            seconds = time.monotonic() - began
            server.wait_idle()
            server.client.get("/health")
            return figures(clients.report, seconds, num_requests, (before, resources_of(server)),
                           (counted, server.metrics()))  # fmt: skip


def figures(
    report: LoadReport,
    seconds: float,
    num_requests: int,
    held: tuple[Resources, Resources],
    metrics: tuple[dict[str, float], dict[str, float]],
) -> dict[str, Any]:
    before, after = held
    generated = metrics[1]["generated_tokens_total"] - metrics[0]["generated_tokens_total"]
    names = ("running_requests", "waiting_requests", "used_pages")
    left = {name: metrics[1][name] for name in names}
    answered = sum(report.answers.values())
    ok = not (report.wrong or report.stuck or report.unexpected or any(left.values())) and (
        answered == num_requests and after.files <= before.files + 16
    )
    return {
        "ok": ok,
        "requests": num_requests,
        "answered": dict(report.answers),
        "wrong": report.wrong,
        "stuck": report.stuck,
        "unexpected": dict(report.unexpected),
        "retries_after_429": report.retries,
        "kills": report.kills,
        "restarts": metrics[1]["engine_restarts_total"],
        "disconnects": metrics[1]["disconnects_total"] - metrics[0]["disconnects_total"],
        "left": left,
        "seconds": round(seconds, 1),
        "requests_per_second": round(num_requests / seconds, 1),
        "generated_tokens_per_second": round(generated / seconds, 1),
        "first_byte_p50_p99_seconds": [percentile(report.first_seconds, each) for each in (0.5, 0.99)],
        "before": asdict(before),
        "after": asdict(after),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = measure(options.requests, options.clients, options.kills, seed=options.seed)
    print(json.dumps(found, indent=2))
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
