"""Tokens a second of `trimaran serve` over HTTP, with many users at once: whole answers, and streams.

usage: python benchmarks/serving_http.py OUT.jsonl [--shape 1b] [--users 64] [--tokens 256] [--rounds 2]
       python benchmarks/serving_http.py OUT.jsonl --shape cpu

Saves a model with random weights, in bf16 on a GPU, serves it, and sends `--users` requests at once, each with that
many tokens in its prompt and in its answer; stop ids are ignored. One user alone follows. Each has whole answers, and
then streams. Every token has a text, so that each of them is an event of a stream, unless several are ready together.
`server_us` and `engine_us` are the CPU time of these processes for each token, in microseconds. That of the engine
includes its waiting for the GPU, or the model on a CPU. Users are connected before the clock starts, and their client
does as little as possible: an HTTP library takes more time for a token than the server. A first round warms up.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

sys.path.insert(0, str(Path(__file__).absolute().parents[1]))

from benchmarks.serving import SPECS, machine
from tests.serving import MODEL, TOKEN, RunningServer, running_server

from trimaran.checkpoint.convert.export_hf import write_hf_folder
from trimaran.data.text.tokenizer import load_tokenizer
from trimaran.nets import decoder_network, initialise
from trimaran.train.generation.generate import save_tokenizer

END = "<end>"
MAX_TAIL = 4096  # bytes of a stream that are kept: the last events


def save_model(shape: str, folder: Path) -> Path:
    """Save a model whose tokens are words, and return its folder."""
    spec = replace(SPECS[shape], max_seq_len=4096)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        network = decoder_network(spec)
    initialise(network.module, seed=0, spec=spec)
    network.module.bfloat16()
    words = {END: 0} | {f"w{number}": number for number in range(1, spec.vocab)}
    file = folder.with_suffix(".json")
    Tokenizer(WordLevel(words, unk_token=END)).save(str(file))
    tokenizer = load_tokenizer(str(file), end_token=END)
    write_hf_folder(folder, network.disk_config() | {"dtype": "bfloat16"}, network.disk_tensors(), origin=None,
                    add_files=lambda draft: save_tokenizer(tokenizer, draft))  # fmt: skip
    return folder


class HttpCall(asyncio.Protocol):
    """One request over its own connection. `answered` is set when the whole answer has come."""

    def __init__(self) -> None:
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.first_time = 0.0
        self._received, self._left = b"", -1  # bytes of the body that are missing; -1: not known, or a stream

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.answered.done():
            self.answered.set_exception(exc or ConnectionResetError(self._received[-MAX_TAIL:].decode()))

    def data_received(self, data: bytes) -> None:
        if not self.first_time:
            self.first_time = time.perf_counter()
            assert data.startswith(b"HTTP/1.1 200"), data.decode()
            head, _, data = data.partition(b"\r\n\r\n")
            lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            self._left = int(lengths[0].split(b":")[1]) if lengths else -1
        self._received += data
        if self._left < 0:
            self._received = self._received[-MAX_TAIL:]
            is_last = self._received.endswith(b"\r\n0\r\n\r\n")
        else:
            self._left -= len(data)
            is_last = not self._left
        if is_last and not self.answered.done():
            self.answered.set_result(None)

    @property
    def num_tokens(self) -> int:
        """How many tokens the answer has, by its usage."""
        last = self._received.rsplit(b"data: ", 2)[1] if b"data: [DONE]" in self._received else self._received
        return json.loads(last.split(b"\n\n")[0])["usage"]["completion_tokens"]


def request_of(prompt: list[int], tokens: int, *, stream: bool) -> bytes:
    fields: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0,
                              "ignore_eos": True}  # fmt: skip
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps(fields)
    return (f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}").encode()  # fmt: skip


async def answered(url: str, users: int, tokens: int, *, seed: int, stream: bool) -> dict[str, float]:
    """Return what all users together get."""
    prompts = np.random.default_rng(seed).integers(1, 256, (users, tokens)).tolist()
    requests = [request_of(prompt, tokens, stream=stream) for prompt in prompts]
    loop, port = asyncio.get_running_loop(), int(url.rpartition(":")[2])
    connections = [await loop.create_connection(HttpCall, "127.0.0.1", port) for _ in prompts]
    start = time.perf_counter()
    for (transport, _), request in zip(connections, requests, strict=True):
        transport.write(request)
    await asyncio.gather(*(call.answered for _, call in connections))
    seconds = time.perf_counter() - start
    count = sum(call.num_tokens for _, call in connections)
    for transport, _ in connections:
        transport.close()
    first_ms = float(np.median([call.first_time - start for _, call in connections])) * 1e3 if stream else None
    return {"seconds": seconds, "tokens": count, "tokens_per_second": count / seconds,
            **({} if first_ms is None else {"first_token_p50_ms": first_ms})}  # fmt: skip


def measured(server: RunningServer, users: int, tokens: int, *, seed: int, stream: bool) -> dict[str, float]:
    """Return what users get, and the CPU time of the server and of its engine, the server's only child."""
    front = psutil.Process(server.process.pid)
    processes = {"server_us": front, "engine_us": front.children()[0]}
    before = {name: _cpu_seconds(each) for name, each in processes.items()}
    found = asyncio.run(answered(server.url, users, tokens, seed=seed, stream=stream))
    spent = {name: (_cpu_seconds(each) - before[name]) * 1e6 / found["tokens"] for name, each in processes.items()}
    return found | spent


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SPECS, default="1b")
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(options.shape, Path(folder) / "model")
        torch.cuda.empty_cache()
        start = time.perf_counter()
        with running_server(model, log=Path(folder) / "log") as server:
            ready = time.perf_counter() - start
            measured(server, options.users, min(options.tokens, 64), seed=99, stream=True)
            for users, number, stream in [
                *((options.users, number, stream) for number in range(options.rounds) for stream in (False, True)),
                (1, 0, False),
                (1, 0, True),
            ]:
                found = measured(server, users, options.tokens, seed=number, stream=stream)
                load = "equal, HTTP, streamed" if stream else "equal, HTTP"
                line = {"shape": options.shape, "way": "trimaran serve", "load": load, "round": number,
                        "users": users, "rate": None, "ready_seconds": ready, **found,
                        **machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"))}  # fmt: skip
                print(json.dumps(line), flush=True)
                with options.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
