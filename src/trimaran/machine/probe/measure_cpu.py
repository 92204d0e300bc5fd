"""`python -m trimaran.machine.probe.cpu_rates`: how fast the ranks of this CPU train, in a fifth of a second.

It measures the operators of a small decoder block, forward and backward, in as many processes at once as the run will
have ranks, with as many threads each: cores, caches and memory are then shared as in the run. It writes one JSON
object with the fields of `trimaran.machine.CpuRates` to standard output. It is a separate process because its caller
does not import torch.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from trimaran.machine.probe.collective_calls import START_SECONDS, run_forked

# The block: positions, hidden size, heads, key-value heads, head size, feed-forward size.
ROWS, FEW_ROWS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN = 512, 32, 256, 8, 4, 32, 768
LENGTH = 128  # of a sequence
NUM_UPDATED = 1 << 19  # parameters of the optimizer step
MESSAGE_BYTES = (1 << 12, 1 << 21)
MIN_CALLS = 4  # of each operator
PROBES = 6
# Bytes that forward and backward of the block's elementwise operators move, as `trimaran.cost` counts them: norms and
# residuals 48 a feature, rotary 62, gate 28, and 1.6 times as much in backward.
COUNTED_BYTES = ROWS * (48 * HIDDEN + 62 * (HEADS + KV_HEADS) * HEAD_DIM + 28 * FFN) * 2.6
UPDATE_BYTES = 40  # a parameter, as `trimaran.cost` counts them
COUNTED_KEYS = (LENGTH + 1) / 2  # that a position attends to, on average
TILE_DEPTH, MAX_EXTRA_ROWS = 32, 1000.0

Measured = dict[str, list[float]]


def measure(ranks: int, threads: int, *, seconds: float, paused: Sequence[int] = ()) -> dict[str, float]:
    """Return the rates of one of `ranks` processes that run at once, while the processes `paused` are stopped."""
    with tempfile.TemporaryDirectory() as folder, stopped(paused):
        arguments = [(rank, ranks, threads, seconds, f"{folder}/store") for rank in range(ranks)]
        answers = run_forked(_measure_rank, arguments, seconds=START_SECONDS + 10 * seconds)
    failed = [answer for answer in answers if answer is None or "error" in answer]
    if failed:
        raise RuntimeError(failed[0]["error"] if failed[0] else "a rank did not finish")
    return rates_of_seconds({name: [each for answer in answers for each in answer[name]] for name in answers[0]}, ranks)


@contextmanager
def stopped(pids: Sequence[int]) -> Iterator[None]:
    """Stop these processes and their children inside the `with` block."""
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    processes = [each for process in processes for each in (process, *process.children(recursive=True))]
    try:
        for each in processes:
            with suppress(psutil.NoSuchProcess):
                each.suspend()
        yield
    finally:
        for each in processes:
            with suppress(psutil.NoSuchProcess):
                each.resume()


def rates_of_seconds(took: Measured, ranks: int) -> dict[str, float]:
    """Return the rates from the seconds of all calls on all ranks."""
    middle = {name: statistics.median(seconds) for name, seconds in took.items()}
    (work, per_row), (little, per_row_of_little) = counted_work(ROWS), counted_work(FEW_ROWS)
    ratio = middle["matmul"] / middle["few_rows"]
    weight = ratio * per_row_of_little - per_row
    extra = min(max((work - ratio * little) / weight, 0.0), MAX_EXTRA_ROWS) if weight > 0 else 0.0
    attention_flops = 4.0 * ROWS * HEADS * HEAD_DIM * COUNTED_KEYS
    rates = {
        "matmul_gflops": 2 * (work + extra * per_row) / middle["matmul"] / 1e9,
        "extra_rows": extra,
        "attention_gflops": attention_flops / middle["attention"] / 1e9,
        "attention_backward_gflops": 2.5 * attention_flops / middle["attention_backward"] / 1e9,
        "elementwise_gb_per_second": COUNTED_BYTES / middle["elementwise"] / 1e9,
        "update_gb_per_second": UPDATE_BYTES * NUM_UPDATED / middle["update"] / 1e9,
        "layer_us": middle["layer"] * 1e6,
    }
    if ranks > 1:
        small, large = middle["small_message"], middle["large_message"]
        moved = 2 * (ranks - 1) / ranks * (MESSAGE_BYTES[1] - MESSAGE_BYTES[0])
        rates["all_reduce_us"] = small * 1e6
        rates["all_reduce_gb_per_second"] = moved / max(large - small, 0.1 * large) / 1e9
    rates["scatter"] = statistics.median(_scatter(seconds) for seconds in took.values())
    return rates


def counted_work(rows: int) -> tuple[int, int]:
    """Return the multiplications of a linear layer's three matmuls, as `trimaran.cost` counts them: those without and
    those for each extra row.
    """
    matmuls = ((rows, FFN, HIDDEN), (rows, HIDDEN, FFN), (HIDDEN, FFN, rows))
    per_row = [columns * (depth + TILE_DEPTH) for _, columns, depth in matmuls]
    return sum(height * each for (height, *_), each in zip(matmuls, per_row, strict=True)), sum(per_row)


def _scatter(seconds: list[float]) -> float:
    """Return how far the calls spread: half of the distance between the quartiles, relative to the median."""
    low, middle, high = statistics.quantiles(seconds, n=4)
    return (high - low) / 2 / middle


def _measure_rank(rank: int, ranks: int, threads: int, seconds: float, store_path: str) -> Measured:
    torch.set_num_threads(threads)
    calls = _calls()
    if ranks > 1:
        store, limit = dist.FileStore(store_path, ranks), timedelta(seconds=START_SECONDS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
        dist.barrier()
    took = {name: _time_calls(call, seconds / PROBES) for name, call in calls.items()}
    took["attention_backward"] = [both - statistics.median(took["attention"]) for both in took["attention_backward"]]
    if ranks > 1:
        for name, size in zip(("small_message", "large_message"), MESSAGE_BYTES, strict=True):
            message, times = torch.zeros(size // 4), []
            for _ in range(2 * MIN_CALLS):
                dist.barrier()
                began = time.perf_counter()
                dist.all_reduce(message)
                times.append(time.perf_counter() - began)
            took[name] = times[1:]
    return took


def _time_calls(call: Callable[[], object], seconds: float) -> list[float]:
    call()
    times: list[float] = []
    now = time.perf_counter()
    end = now + seconds
    while now < end or len(times) < MIN_CALLS:
        before, _ = now, call()
        now = time.perf_counter()
        times.append(now - before)
    return times


def _calls() -> dict[str, Callable[[], object]]:
    """Return what is measured, by name. `attention_backward` runs forward and backward."""
    generator = torch.Generator().manual_seed(0)

    def values(*shape: int, grad: bool = True) -> Tensor:
        return torch.randn(*shape, generator=generator).requires_grad_(grad)

    weight, many, few = values(FFN, HIDDEN), values(ROWS, HIDDEN), values(FEW_ROWS, HIDDEN)
    batch = ROWS // LENGTH
    query, key = values(batch, HEADS, LENGTH, HEAD_DIM), values(batch, KV_HEADS, LENGTH, HEAD_DIM)
    stream, scale, gate, up = values(batch, LENGTH, HIDDEN), values(HIDDEN), values(ROWS, FFN), values(ROWS, FFN)
    cosine = values(batch, 1, LENGTH, HEAD_DIM, grad=False)
    small = [values(8, 32), values(32), *(values(32, 32) for _ in range(7))]
    updated = torch.nn.Parameter(values(NUM_UPDATED, grad=False))
    updated.grad = gradient = values(NUM_UPDATED, grad=False)
    moments, num_updates = (torch.zeros(NUM_UPDATED), torch.zeros(NUM_UPDATED)), torch.ones(())

    def elementwise() -> None:
        after = stream + F.rms_norm(stream, (HIDDEN,), scale)
        after = after + F.rms_norm(after, (HIDDEN,), scale)
        outputs = [after, F.silu(gate) * up, rotate(query, cosine), rotate(key, cosine)]
        torch.autograd.backward(outputs, [stream.detach(), up.detach(), query.detach(), key.detach()])

    def update() -> None:
        torch.nn.utils.clip_grad_norm_([updated], 1.0)
        with torch.no_grad():  # as AdamW(fused=True) calls it; the class would import torch._dynamo, which takes long
            torch._fused_adamw_((updated,), (gradient,), moments[:1], moments[1:], (), (num_updates,), lr=1e-3,
                                beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8, amsgrad=False,
                                maximize=False)  # fmt: skip

    return {
        "matmul": lambda: F.linear(many, weight).backward(gate.detach()),
        "few_rows": lambda: F.linear(few, weight).backward(gate.detach()[:FEW_ROWS]),
        "attention": lambda: attend(query, key),
        "attention_backward": lambda: attend(query, key).backward(query.detach()),
        "elementwise": elementwise,
        "layer": lambda: layer(small).backward(small[0].detach()),
        "update": update,
    }


def attend(query: Tensor, key: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)


def rotate(x: Tensor, cosine: Tensor) -> Tensor:
    """Return rotary embeddings as our decoder computes them."""
    front, back = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-back, front), dim=-1) * cosine


def layer(tensors: list[Tensor]) -> Tensor:
    """Return the output of a block of 8 positions: nearly all of its time is the overhead of its operators."""
    x, scale, *weights = tensors
    inner = F.rms_norm(x, (32,), scale)
    query, key, value = (F.linear(inner, each).view(1, 8, 4, 8).transpose(1, 2) for each in weights[:3])
    cosine = torch.ones(1, 1, 8, 8)
    query, key = rotate(query, cosine), rotate(key, cosine)
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    x = x + F.linear(mixed.transpose(1, 2).flatten(2).view(8, 32), weights[3])
    inner = F.rms_norm(x, (32,), scale)
    return x + F.linear(F.silu(F.linear(inner, weights[4])) * F.linear(inner, weights[5]), weights[6])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trimaran.machine.probe.cpu_rates")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=0.2)
    parser.add_argument("--pause", type=int, action="append", default=[], help="a process to stop meanwhile")
    options = parser.parse_args()
    rates = measure(options.ranks, options.threads, seconds=options.seconds, paused=options.pause)
    sys.stdout.write(json.dumps(rates) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
