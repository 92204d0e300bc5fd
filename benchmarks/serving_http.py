"""Tokens a second of `trimaran serve` over HTTP, with many users at once, on this machine's GPU.

usage: python benchmarks/serving_http.py OUT.jsonl [--shape 1b] [--users 64] [--tokens 256] [--rounds 2]

Saves a model with random weights, serves it, and sends `--users` requests at once, each with that many tokens in its
prompt and in its answer, which comes as a whole. An answer may end earlier with a stop id; only its tokens count. One
user alone follows. A first round compiles what no graph has.
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

import httpx
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).absolute().parents[1]))

from benchmarks.serving import SPECS, machine
from tests.serving import MODEL, TOKEN, running_server

from trimaran.checkpoint.export_hf import write_hf_folder
from trimaran.data import ByteTokenizer
from trimaran.infer.generate import save_tokenizer
from trimaran.nets import decoder_network, initialise


def save_model(shape: str, folder: Path) -> Path:
    spec = replace(SPECS[shape], max_seq_len=4096)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        network = decoder_network(spec)
    initialise(network.module, seed=0, spec=spec)
    network.module.bfloat16()
    write_hf_folder(folder, network.disk_config(), network.disk_tensors(), origin=None,
                    add_files=lambda draft: save_tokenizer(ByteTokenizer(), draft))  # fmt: skip
    return folder


async def answered(url: str, users: int, tokens: int, seed: int) -> dict[str, float]:
    """Return what all users together get."""
    prompts = np.random.default_rng(seed).integers(0, 256, (users, tokens)).tolist()
    limits = httpx.Limits(max_connections=users)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=300, limits=limits) as client:

        async def one(prompt: list[int]) -> int:
            body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()["usage"]["completion_tokens"]

        start = time.perf_counter()
        counts = await asyncio.gather(*(one(prompt) for prompt in prompts))
        seconds = time.perf_counter() - start
    return {"seconds": seconds, "tokens": sum(counts), "tokens_per_second": sum(counts) / seconds}


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
            asyncio.run(answered(server.url, options.users, min(options.tokens, 64), seed=99))
            for number, users in [*((each, options.users) for each in range(options.rounds)), (0, 1)]:
                found = asyncio.run(answered(server.url, users, options.tokens, seed=number))
                line = {"shape": options.shape, "way": "trimaran serve", "load": "equal, HTTP", "round": number,
                        "users": users, "rate": None, "ready_seconds": ready, **found,
                        **machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"))}  # fmt: skip
                print(json.dumps(line), flush=True)
                with options.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
