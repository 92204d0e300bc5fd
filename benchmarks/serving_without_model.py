"""What `trimaran serve` itself costs for a token: its HTTP server before an engine that computes nothing, on any CPU.

usage: python benchmarks/serving_without_model.py OUT.jsonl [--users 64] [--tokens 512] [--step-ms 1.9] [--rounds 2]

The engine's process has the real loop and protocol, but a step only waits until its time has come and returns any
token for each request. The load and the figures are those of `serving_http.py`. The rate that the engine allows is
`--users` tokens in each step; `server_us` and `engine_us` are CPU time for each token.
"""

import argparse
import asyncio
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).absolute().parents[1]))

import torch
from benchmarks.serving import machine
from benchmarks.serving_http import measured, save_model
from tests.serving import MODEL, TOKEN, RunningServer

from trimaran.serve.engine.batching_engine import BatchingEngine, EngineStats
from trimaran.serve.engine.engine_loop import EngineLoop, EngineSocket
from trimaran.serve.engine.engine_request import MAX_MESSAGE_BYTES, EngineRequest, TokenOutput
from trimaran.serve.server.engine_client import EngineProcess
from trimaran.serve.server.run_server import Server
from trimaran.serve.settings import EngineConfig, ServerSettings, TrainedWeights

VOCABULARY = 257


@dataclass
class FixedRateEngine:
    """What the loop needs of an engine. A step ends `step_seconds` after the one before."""

    step_seconds: float
    max_length: int = 4096
    settings: Any = field(default_factory=lambda: SimpleNamespace(max_running=256))
    runner: Any = field(default_factory=lambda: SimpleNamespace(num_pages=4096, page_size=16, vocabulary=VOCABULARY))
    missing: dict[str, int] = field(default_factory=dict)  # tokens, by request
    step_end: float = 0.0
    num_generated: int = 0

    @property
    def has_work(self) -> bool:
        return bool(self.missing)

    def add(self, request: EngineRequest) -> None:
        self.missing[request.id] = request.max_tokens

    def abort(self, request_id: str) -> None:
        self.missing.pop(request_id, None)

    def step(self) -> list[TokenOutput]:
        now = time.perf_counter()
        self.step_end = max(self.step_end + self.step_seconds, now)
        time.sleep(self.step_end - now)
        outputs = []
        for name, missing in list(self.missing.items()):
            self.num_generated += 1
            token = 1 + self.num_generated * 7 % (VOCABULARY - 1)
            outputs.append(TokenOutput(name, token, finish=None if missing > 1 else "length"))
            self.missing[name] = missing - 1
            if missing == 1:
                del self.missing[name]
        return outputs

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self.missing), waiting=0, used_pages=0, num_pages=4096, prefix_hit_tokens=0,
                           preemptions=0, prompt_tokens=0, generated_tokens=self.num_generated)  # fmt: skip


class ServerWithoutModel(Server):
    """A server whose engine is this program with `--engine`."""

    step_ms = 1.9

    async def _start_engine(self, weights: TrainedWeights) -> EngineProcess:
        ours, theirs = socket.socketpair()
        command = [sys.executable, __file__, "--engine", str(theirs.fileno()), "--step-ms", str(self.step_ms)]
        process = await asyncio.create_subprocess_exec(*command, pass_fds=[theirs.fileno()])
        theirs.close()
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=MAX_MESSAGE_BYTES)
        return EngineProcess([process], reader, writer)


def serve_folder(folder: Path, step_ms: float) -> None:
    """Serve the tokenizer of a folder until SIGTERM, and print the address."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"

    async def run() -> None:
        config = EngineConfig(weights=TrainedWeights(path=folder))
        server = ServerWithoutModel(config, ServerSettings(name=MODEL, token=TOKEN))
        server.step_ms = step_ms
        await server.run(listening, lambda weights: print(url, flush=True))

    import uvicorn  # noqa: PLC0415

    with asyncio.Runner(loop_factory=uvicorn.Config("").get_loop_factory()) as runner:
        runner.run(run())


def measure(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = save_model("cpu", Path(folder) / "model")
        command = [sys.executable, __file__, "--serve", str(model), "--step-ms", str(options.step_ms)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            server = RunningServer(process, process.stdout.readline().strip())
            measured(server, options.users, 64, seed=99, stream=True)
            for number in range(options.rounds):
                for stream in (False, True):
                    found = measured(server, options.users, options.tokens, seed=number, stream=stream)
                    line = {"way": "server without a model", "load": "streamed" if stream else "whole",
                            "round": number, "users": options.users, "step_ms": options.step_ms, **found,
                            **machine(torch.device("cpu"))}  # fmt: skip
                    print(json.dumps(line), flush=True)
                    with options.out.open("a") as file:
                        file.write(json.dumps(line) + "\n")
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--step-ms", type=float, default=1.9)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine is not None:
        engine = cast(BatchingEngine, FixedRateEngine(options.step_ms / 1e3))
        EngineLoop(engine, EngineSocket(socket.socket(fileno=options.engine)), lambda weights: None).run()
    elif options.serve is not None:
        serve_folder(options.serve, options.step_ms)
    elif options.out is None:
        parser.error("name the file that results are appended to")
    else:
        measure(options)


if __name__ == "__main__":
    main()
