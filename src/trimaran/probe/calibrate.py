"""`python -m trimaran.probe.calibrate`: how fast this machine is, measured; JSON lines on standard output.

A process of its own, because only the worker's rooms know torch. Each line is `{"doing", "share"}` while it works; the
last is `{"measured": {...}}` with the fields of `trimaran.hardware.Calibration`.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch

from trimaran.probe.calibrate_links import measure_collectives

BATCH_SECONDS = 0.01  # of calls between two looks at the clock: long against the clock and one wait for the device

# Rows, inner and columns of the products: the first two are large enough to show what a device can do, the others are
# as flat or as thin as those of a small micro-batch, of many tensor slices, or of low-rank adapters.
SHAPES = {
    "cuda": ((8192, 8192, 8192), (4096, 16384, 4096), (256, 8192, 8192), (8192, 8192, 256), (8192, 128, 8192)),
    "cpu": ((1024, 1024, 1024), (512, 2048, 512), (32, 1024, 1024), (1024, 1024, 32), (1024, 32, 1024)),
}
PRECISIONS = {
    "cuda": {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn, "fp32": torch.float32},
    "cpu": {"fp32": torch.float32, "bf16": torch.bfloat16},
}
MAIN = {"cuda": "bf16", "cpu": "fp32"}  # the precision that is measured in every shape
# Of one tensor: larger than a GPU's caches, and on a CPU the size of an activation that malloc still keeps for the next
# (glibc gives what is larger than 32 MiB back). A host's own memory is measured past most caches.
STREAM_BYTES = {"cuda": 1 << 29, "cpu": 1 << 24}
HOST_BYTES = 1 << 27
COPY_BYTES = 1 << 28
COLLECTIVE_SHARE = 0.4  # of the time
NUM_MEMORIES = 4  # measurements after the products: host, device, between them, start of a kernel

Report = Callable[[str, float], None]


def measure(kind: str, *, cores: int, ranks: int, seconds: float, report: Report) -> dict[str, object]:
    """Return the measured rates of a `cuda` or a `cpu` machine, in about `seconds`.

    The ranks that talk to each other come first: they are forked, which a process that has used its threads or its GPU
    can no longer do.
    """
    found: dict[str, object] = {}
    talk = COLLECTIVE_SHARE if ranks > 1 else 0.0
    if ranks > 1:
        report("how the ranks talk", 0.0)
        found["collectives"] = measure_collectives(kind, ranks, seconds=seconds * talk)
    torch.set_num_threads(cores)
    device, shapes = torch.device(kind), SHAPES[kind]
    dtypes = PRECISIONS[kind]
    products = [(each, shape) for each in dtypes for shape in (shapes if each == MAIN[kind] else shapes[:2])]
    part = (1 - talk) / (len(products) + NUM_MEMORIES)
    rates: dict[str, float] = {}
    for place, (precision, shape) in enumerate(products):
        report(f"products in {precision}", talk + place * part)
        if flops := product_flops(dtypes[precision], shape, device, seconds=seconds * part):
            rates[f"{precision} {'x'.join(map(str, shape))}"] = flops / 1e12
            found[f"{precision}_tflops"] = max(rates[key] for key in rates if key.startswith(precision))
    report("memory", 1 - part * NUM_MEMORIES)
    return {**found, **measure_memory(device, seconds=seconds * part), "shapes": rates}


def measure_memory(device: torch.device, *, seconds: float) -> dict[str, float]:
    """Return what streams through the memories, and what it takes to start a kernel."""
    host = torch.device("cpu")
    host_rate = stream_bandwidth(host, HOST_BYTES, seconds=seconds, fresh=False)
    # Training on a CPU writes into new memory; on a GPU the allocator has it ready.
    rate = stream_bandwidth(device, STREAM_BYTES[device.type], seconds=seconds, fresh=device.type == "cpu")
    found = {"host_gb_per_second": host_rate / 1e9, "memory_gb_per_second": rate / 1e9}
    if device.type == "cuda":
        found["pcie_gb_per_second"] = copy_bandwidth(device, seconds=seconds) / 1e9
    tiny = torch.zeros(8, device=device)
    found["launch_us"] = usual_seconds(lambda: tiny.add_(1.0), device, seconds=seconds / 4) * 1e6
    return found


def usual_seconds(call: Callable[[], object], device: torch.device, *, seconds: float) -> float:
    """Return how long one call takes among many batches of calls.

    On a GPU the batch in the middle: the first ones run before power and heat have brought the clock down, and training
    lasts longer than that. On a CPU the best: the one that nobody interrupted.
    """
    call()
    wait(device)
    batches: list[float] = []
    repeats, now = 1, time.perf_counter()
    end = now + seconds
    while now < end or not batches:
        start = now
        for _ in range(repeats):
            call()
        wait(device)
        now = time.perf_counter()
        batches.append((now - start) / repeats)
        repeats = repeats * 2 if now - start < BATCH_SECONDS else repeats
    return statistics.median(batches) if device.type == "cuda" else min(batches)


def product_flops(
    dtype: torch.dtype, shape: tuple[int, int, int], device: torch.device, *, seconds: float
) -> float | None:
    """Return the rate of a product with numbers that are not all alike, or None where the device has no such kernel.

    A GPU multiplies zeros faster than it multiplies numbers, because flipping bits costs power.
    """
    rows, inner, columns = shape
    left = torch.randn(rows, inner, device=device).to(dtype)
    right = torch.randn(columns, inner, device=device).to(dtype)
    if dtype == torch.float8_e4m3fn:
        one = torch.ones((), device=device)

        def call() -> object:
            return torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    else:
        out = torch.empty(rows, columns, device=device, dtype=dtype)

        def call() -> object:
            return torch.mm(left, right.t(), out=out)

    try:
        return 2.0 * rows * inner * columns / usual_seconds(call, device, seconds=seconds)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return None  # no fp8 before Ada, no bf16 before Ampere


def stream_bandwidth(device: torch.device, num_bytes: int, *, seconds: float, fresh: bool) -> float:
    """Return the bytes a second that a sum of two large tensors reads and writes, into a new tensor or an old one."""
    left, right, out = (torch.ones(num_bytes // 4, device=device) for _ in range(3))
    target = None if fresh else out
    moved = 3 * left.numel() * left.element_size()
    return moved / usual_seconds(lambda: torch.add(left, right, out=target), device, seconds=seconds)


def copy_bandwidth(device: torch.device, *, seconds: float) -> float:
    """Return the bytes a second between pinned host memory and the GPU: the slower of the two ways."""
    here = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    ways = (lambda: there.copy_(here, non_blocking=True), lambda: here.copy_(there, non_blocking=True))
    return COPY_BYTES / max(usual_seconds(way, device, seconds=seconds / 2) for way in ways)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trimaran.probe.calibrate")
    parser.add_argument("--kind", choices=list(SHAPES), required=True)
    parser.add_argument("--cores", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    asked = parser.parse_args()

    def say(**facts: object) -> None:
        sys.stdout.write(json.dumps(facts) + "\n")
        sys.stdout.flush()

    measured = measure(
        asked.kind,
        cores=asked.cores,
        ranks=asked.ranks,
        seconds=asked.seconds,
        report=lambda doing, share: say(doing=doing, share=share),
    )
    say(measured=measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
