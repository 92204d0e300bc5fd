"""A user's own loop through `trimaran.prepare` against the same loop in plain PyTorch, both compiled, on GPUs.

    python benchmarks/own_loop.py
    torchrun --nproc-per-node 2 benchmarks/own_loop.py --layers 4    # against DDP

Prints one JSON line: milliseconds of a step of each loop, their ratio, the largest difference of their losses, and the
time of the first steps, in which `prepare` runs its checks.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).absolute().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "examples" / "nanogpt")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import trimaran  # noqa: E402

ROWS, LENGTH, CLIP = 16, 1024, 1.0
CHECKED_STEPS, BLOCK, BLOCKS = 8, 10, 6  # the two loops take turns, a block of steps each
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def make(layers: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a GPT and its optimizer; 24 layers are about 350M parameters."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=LENGTH, vocab_size=50304, n_layer=layers, n_head=16, n_embd=1024))
    model = model.cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)


def get_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(50304, (ROWS, LENGTH + 1), generator=draw)
    return tokens[:, :-1].contiguous().cuda(), tokens[:, 1:].contiguous().cuda()


def plain_loop(layers: int) -> Callable[[int], torch.Tensor]:
    """Return the step of a plain loop: with DDP if there are several ranks."""
    model, optimizer = make(layers)
    compiled = torch.compile(DistributedDataParallel(model) if RANKS > 1 else model)

    def step(number: int) -> torch.Tensor:
        x, y = (each.tensor_split(RANKS)[RANK] for each in get_batch(number))
        with torch.autocast("cuda", torch.bfloat16):
            logits = compiled(x)[0]
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        if RANKS > 1:
            dist.all_reduce(loss, dist.ReduceOp.AVG)
        return loss

    return step


def prepared_loop(layers: int) -> Callable[[int], torch.Tensor]:
    """Return the step of the same loop, converted as docs/guides/own-loop.md says."""
    model, optimizer = make(layers)
    loop = trimaran.prepare(model, optimizer)
    compiled = torch.compile(model)

    def step(number: int) -> torch.Tensor:
        x, y = loop.local_rows(get_batch(number))
        with torch.autocast("cuda", torch.bfloat16):
            logits = compiled(x)[0]
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        loop.backward(loss, num_tokens=y.numel(), reduction="mean")
        return loop.step(clip_norm=CLIP).loss

    return step


def timed(step: Callable[[int], torch.Tensor], first: int, count: int) -> tuple[float, list[torch.Tensor]]:
    """Return the seconds of a step, and the losses."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    losses = [step(number) for number in range(first, first + count)]
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / count, losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=24)
    layers = parser.parse_args().layers
    torch.set_float32_matmul_precision("high")
    if RANKS > 1:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")
    loops = {"plain": plain_loop(layers), "trimaran": prepared_loop(layers)}
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "ranks": RANKS,
        "layers": layers,
    }
    losses: dict[str, list[torch.Tensor]] = {}
    seconds: dict[str, list[float]] = {}
    for name, step in loops.items():
        each, losses[name] = timed(step, 0, CHECKED_STEPS)
        result[f"{name}_first_steps_s"] = round(CHECKED_STEPS * each, 2)
    for block in range(BLOCKS):
        for name, step in loops.items():
            each, more = timed(step, CHECKED_STEPS + block * BLOCK, BLOCK)
            seconds.setdefault(name, []).append(each)
            losses[name] += more
    for name, found in seconds.items():
        result[f"{name}_ms"] = round(1e3 * sorted(found)[len(found) // 2], 2)
    result["ratio"] = round(result["trimaran_ms"] / result["plain_ms"], 3)
    result["loss_difference"] = max(
        abs(float(a) - float(b)) for a, b in zip(losses["plain"], losses["trimaran"], strict=True)
    )
    result["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    if RANK == 0:
        print(json.dumps(result))
    if RANKS > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
