"""`python -m trimaran.machine.probe.calibrate`: measures how fast this machine is, as JSON lines on stdout.

It is a separate process because its caller does not import torch. While it works, each line is `{"doing", "share"}`,
where `share` is the fraction done. The last line is `{"measured": {...}}` with the fields of
`trimaran.machine.Calibration`.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from trimaran.core.traits import DEVICE_TRAITS
from trimaran.machine.probe.calibrate_disk import measure_disk
from trimaran.machine.probe.calibrate_links import measure_collectives
from trimaran.machine.probe.collective_calls import synchronize

MIN_BATCH_SECONDS = 0.01  # of calls between two readings of the clock; reading it and waiting for the device take less

# Rows, inner size and columns of the matmuls. The first two are large enough to reach a device's peak. The others are
# as narrow as in a small micro-batch, with many tensor-parallel ranks, or in low-rank adapters.
SHAPES = {
    "cuda": ((8192, 8192, 8192), (4096, 16384, 4096), (256, 8192, 8192), (8192, 8192, 256), (8192, 128, 8192)),
    "cpu": ((1024, 1024, 1024), (512, 2048, 512), (32, 1024, 1024), (1024, 1024, 32), (1024, 32, 1024)),
}
PRECISIONS = {
    "cuda": {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn, "fp32": torch.float32},
    "cpu": {"fp32": torch.float32, "bf16": torch.bfloat16},
}
MAIN_PRECISION = {"cuda": "bf16", "cpu": "fp32"}  # is measured in every shape, others only in the first two
# Bytes of one tensor. On a GPU larger than its caches. On a CPU the size of an activation that malloc still reuses:
# glibc returns allocations above 32 MiB to the kernel. The host's own memory is measured with more than most caches.
STREAM_BYTES = {"cuda": 1 << 29, "cpu": 1 << 24}
HOST_BYTES = 1 << 27
COPY_BYTES = 1 << 28
COLLECTIVE_TIME_FRACTION = 0.4
DISK_SECONDS = 4.0
NUM_MEMORY_MEASUREMENTS = 4  # host, device, copies between them, kernel launch

Report = Callable[[str, float], None]


def measure(kind: str, *, cores: int, ranks: int, seconds: float, report: Report) -> dict[str, object]:
    """Return the measured rates of a `cuda` or a `cpu` machine, in about `seconds`.

    Collectives come first, since their ranks are forked: a process that has used threads or its GPU cannot fork.
    """
    measured: dict[str, object] = {}
    collectives = COLLECTIVE_TIME_FRACTION if ranks > 1 else 0.0
    if ranks > 1:
        report("collectives", 0.0)
        measured["collectives"] = measure_collectives(kind, ranks, seconds=seconds * collectives)
    torch.set_num_threads(cores)
    device, shapes = torch.device(kind), SHAPES[kind]
    dtypes = PRECISIONS[kind]
    matmuls = [(each, shape) for each in dtypes for shape in (shapes if each == MAIN_PRECISION[kind] else shapes[:2])]
    fraction = (1 - collectives) / (len(matmuls) + NUM_MEMORY_MEASUREMENTS)  # of the time, for one measurement
    rates: dict[str, float] = {}
    for number, (precision, shape) in enumerate(matmuls):
        report(f"matmuls in {precision}", collectives + number * fraction)
        if flops := matmul_flops(dtypes[precision], shape, device, seconds=seconds * fraction):
            rates[f"{precision} {'x'.join(map(str, shape))}"] = flops / 1e12
            measured[f"{precision}_tflops"] = max(rates[key] for key in rates if key.startswith(precision))
    report("memory", 1 - fraction * NUM_MEMORY_MEASUREMENTS)
    return {**measured, **measure_memory(device, seconds=seconds * fraction), "shapes": rates}


def measure_memory(device: torch.device, *, seconds: float) -> dict[str, float]:
    """Return the bandwidths of host and device memory and between them, and the time of a kernel launch."""
    host = torch.device("cpu")
    host_rate = stream_bandwidth(host, HOST_BYTES, seconds=seconds, fresh=False)
    # Training on a CPU writes into new memory; on a GPU the caching allocator reuses it.
    is_gpu = DEVICE_TRAITS[device.type].has_own_memory
    rate = stream_bandwidth(device, STREAM_BYTES[device.type], seconds=seconds, fresh=not is_gpu)
    measured = {"host_gb_per_second": host_rate / 1e9, "memory_gb_per_second": rate / 1e9}
    if is_gpu:
        measured["pcie_gb_per_second"] = copy_bandwidth(device, seconds=seconds) / 1e9
    tiny = torch.zeros(8, device=device)
    measured["launch_us"] = seconds_per_call(lambda: tiny.add_(1.0), device, seconds=seconds / 4) * 1e6
    return measured


def seconds_per_call(call: Callable[[], object], device: torch.device, *, seconds: float) -> float:
    """Return how long one call takes, measured over many batches of calls.

    On a GPU this is the median batch: the first batches run before power and heat limit the clock, and training runs
    longer than they do. On a CPU it is the fastest batch: the one that no other process interrupted.
    """
    call()
    synchronize(device)
    batches: list[float] = []
    repeats, now = 1, time.perf_counter()
    end = now + seconds
    while now < end or not batches:
        start = now
        for _ in range(repeats):
            call()
        synchronize(device)
        now = time.perf_counter()
        batches.append((now - start) / repeats)
        repeats = repeats * 2 if now - start < MIN_BATCH_SECONDS else repeats
    return min(batches) if DEVICE_TRAITS[device.type].shares_cores else statistics.median(batches)


def matmul_flops(
    dtype: torch.dtype, shape: tuple[int, int, int], device: torch.device, *, seconds: float
) -> float | None:
    """Return the rate of a matmul of random numbers, or None if the device has no kernel for it.

    Zeros would be faster on a GPU, because flipping bits costs power.
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
        return 2.0 * rows * inner * columns / seconds_per_call(call, device, seconds=seconds)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return None  # no fp8 before Ada, no bf16 before Ampere


def stream_bandwidth(device: torch.device, num_bytes: int, *, seconds: float, fresh: bool) -> float:
    """Return the bytes per second that adding two large tensors reads and writes. `fresh`: into a new tensor."""
    left, right, out = (torch.ones(num_bytes // 4, device=device) for _ in range(3))
    target = None if fresh else out
    moved = 3 * left.numel() * left.element_size()
    return moved / seconds_per_call(lambda: torch.add(left, right, out=target), device, seconds=seconds)


def copy_bandwidth(device: torch.device, *, seconds: float) -> float:
    """Return the bytes per second between pinned host memory and the GPU, in the slower direction."""
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    gpu = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    copies = (lambda: gpu.copy_(host, non_blocking=True), lambda: host.copy_(gpu, non_blocking=True))
    return COPY_BYTES / max(seconds_per_call(copy, device, seconds=seconds / 2) for copy in copies)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trimaran.machine.probe.calibrate")
    parser.add_argument("--kind", choices=list(SHAPES), required=True)
    parser.add_argument("--cores", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--disk", default="")
    options = parser.parse_args()

    def write_line(**fields: object) -> None:
        sys.stdout.write(json.dumps(fields) + "\n")
        sys.stdout.flush()

    measured = measure(
        options.kind,
        cores=options.cores,
        ranks=options.ranks,
        seconds=options.seconds,
        report=lambda doing, fraction: write_line(doing=doing, share=fraction),
    )
    if options.disk:
        write_line(doing="the disk", share=0.99)
        measured["disk"] = measure_disk(Path(options.disk), seconds=DISK_SECONDS)
    write_line(measured=measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
