"""`python -m trimaran.machine.probe.calibrate`: measures how fast this machine is, as JSON lines on stdout.

It is a separate process because its caller does not import torch. While it works, each line is `{"doing", "share"}`,
where `share` is the fraction done. The last line is `{"measured": {...}}` with the fields of
`trimaran.machine.Calibration`. It also measures the collectives of the ranks of a machine, and a local disk.
"""

import argparse
import itertools
import mmap
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from trimaran.core import DEVICE_TRAITS
from trimaran.machine.comm_result import BUS_FACTORS
from trimaran.machine.probe.collective_calls import (
    START_SECONDS,
    Call,
    CommGroup,
    Message,
    all_gather,
    all_reduce,
    all_to_all,
    make_message,
    run_forked,
    synchronize,
    take_device,
    timed,
    write_line,
)

NUM_THREADS = 16  # as many requests at a time as `parallel/disk/disk_store.py` makes
REQUEST_BYTES = 8 << 20
FILE_BYTES = 1 << 30


def measure_disk(folder: Path, *, seconds: float) -> dict[str, float]:
    """Return the bytes that the disk of `folder` reads and writes in a second, in 1e9, in about `seconds`.

    `both` is how many it reads, and writes, while half of the requests are reads and half are writes.

    The file has no name and ends with this function. A filesystem without direct I/O is measured through the page
    cache. The first pass over the file also allocates its blocks, so it is not counted.
    """
    flags = os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC
    try:
        descriptor = os.open(folder, flags | os.O_DIRECT, mode=0o600)
    except OSError:
        descriptor = os.open(folder, flags, mode=0o600)
    try:
        os.posix_fallocate(descriptor, 0, FILE_BYTES)
        offsets, half = range(0, FILE_BYTES, REQUEST_BYTES), FILE_BYTES // 2
        one_way = {call: [(call, offset) for offset in offsets] for call in (os.pwritev, os.preadv)}
        # As in an update, which reads some chunks while it writes others.
        mixed = [(call, offset + part) for offset in range(0, half, REQUEST_BYTES)
                 for call, part in ((os.preadv, 0), (os.pwritev, half))]  # fmt: skip
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            write, read, both = (
                _rate(pool, requests, descriptor, seconds / 3) for requests in (*one_way.values(), mixed)
            )
    finally:
        os.close(descriptor)
    return {f"{way}_gb_per_second": rate / 1e9 for way, rate in (("read", read), ("write", write), ("both", both / 2))}


def _rate(
    pool: ThreadPoolExecutor, requests: Sequence[tuple[Callable[..., int], int]], descriptor: int, seconds: float
) -> float:
    """Return the bytes a second of these requests, after an uncounted pass. No thread waits for another."""
    list(pool.map(partial(_move, descriptor), requests))
    following = itertools.cycle(requests)  # a thread at a time takes one: it is a single call of C
    began = time.perf_counter()

    def make_requests(_: int) -> int:
        count = 0
        while not count or time.perf_counter() - began < seconds:
            _move(descriptor, next(following))
            count += 1
        return count

    count = sum(pool.map(make_requests, range(NUM_THREADS)))
    return count * REQUEST_BYTES / (time.perf_counter() - began)


BUFFERS = threading.local()


def _move(descriptor: int, request: tuple[Callable[..., int], int]) -> None:
    """Make one request from the memory of this thread, which is used again: new pages would take as long as a disk."""
    (call, offset), done = request, 0
    if not hasattr(BUFFERS, "memory"):
        BUFFERS.memory = mmap.mmap(-1, REQUEST_BYTES)  # a whole number of pages
        BUFFERS.memory[:] = os.urandom(REQUEST_BYTES)  # not zeros, which a virtual disk may not store
    while done < REQUEST_BYTES:
        done += call(descriptor, [memoryview(BUFFERS.memory)[done:]], offset + done)


# Message sizes: one so small that only latency counts, and two whose difference in time gives the bandwidth.
SMALL_BYTES = 1 << 12
MIDDLE_BYTES = {"cpu": 1 << 20, "cuda": 1 << 24}
LARGE_BYTES = {"cpu": 1 << 24, "cuda": 1 << 28}
ROUND_SECONDS = 0.01  # of calls between two readings of the clock; short, so that some rounds are not interrupted


def measure_collectives(kind: str, ranks: int, *, seconds: float) -> dict[str, float]:
    """Return bus bandwidths and the latency of a hop among `ranks` forked processes, as fields of `Collectives`."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, kind, ranks, f"{folder}/store", seconds) for rank in range(ranks)]
        answers = run_forked(_run_rank, arguments, seconds=START_SECONDS + 2 * seconds)
    failed = next((each for each in answers if each is None or "error" in each), {})
    if failed != {}:
        raise RuntimeError(failed["error"] if failed else "the ranks did not finish their collectives")
    return answers[0]


def _run_rank(rank: int, kind: str, ranks: int, store_path: str, seconds: float) -> dict[str, float]:
    """Return bus bandwidths from the extra time of the large message, and the latency of a hop from the small one.

    A ring all-gather of n ranks has n - 1 hops, which the planner counts too; an all-reduce goes round twice. Where
    noise made the large message faster than the middle one, the bandwidth is left out.
    """
    torch.set_num_threads(1)
    device = take_device(kind, rank)
    store = dist.FileStore(store_path, ranks)
    backend, timeout = DEVICE_TRAITS[kind].backend, timedelta(seconds=START_SECONDS)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    sizes = (SMALL_BYTES, MIDDLE_BYTES[kind], LARGE_BYTES[kind])
    each = seconds / (len(CALLS) * len(sizes))
    took = {name: [_seconds(call, size, device, seconds=each) for size in sizes] for name, call in CALLS.items()}
    dist.destroy_process_group()
    fitted = {"devices": ranks, "latency_us": took["all_gather"][0] / (ranks - 1) * 1e6}
    for name, (_, middle, large) in took.items():
        if large > middle:
            moved = BUS_FACTORS.get(name, BUS_FACTORS["send_recv"])(ranks) * (sizes[2] - sizes[1])
            fitted[f"{name}_gb_per_second"] = moved / (large - middle) / 1e9
    return fitted


def _seconds(call: Call, size: int, device: torch.device, *, seconds: float) -> float:
    """Return how long the call takes on a message of `size` bytes, in the fastest of many rounds."""
    ranks = dist.get_world_size()
    world = CommGroup(group=None, ranks=tuple(range(ranks)), place=dist.get_rank())
    message = make_message(size, ranks, device=device, dtype=torch.float32)

    def once(repeats: int) -> float:
        _broadcast(0, device)  # so that all ranks start together
        return timed(call, message, world, repeats=repeats)

    once(1)
    first = max(once(1), 1e-6)
    repeats = _broadcast(min(max(int(ROUND_SECONDS / first), 1), 1000), device)
    rounds = _broadcast(min(max(int(seconds / (first * repeats)), 3), 200), device)
    return min(once(repeats) for _ in range(rounds))


def _broadcast(number: int, device: torch.device) -> int:
    tensor = torch.tensor([number], device=device)
    dist.broadcast(tensor, 0)
    return int(tensor.item())


def _send(message: Message, world: CommGroup) -> None:
    """Send half of the message from rank 0 to rank 1 and the other half back; other ranks do nothing."""
    half = len(message.first) // 2
    if world.place == 0:
        dist.send(message.first[:half], 1)
        dist.recv(message.second[:half], 1)
    elif world.place == 1:
        dist.recv(message.second[:half], 0)
        dist.send(message.first[:half], 0)


CALLS: dict[str, Call] = {"all_reduce": all_reduce, "all_gather": all_gather, "all_to_all": all_to_all, "send": _send}


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
    """Return this machine's rates. Collectives come first: a process that has used threads or its GPU cannot fork."""
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
        pinned = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        gpu = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
        copies = (lambda: gpu.copy_(pinned, non_blocking=True), lambda: pinned.copy_(gpu, non_blocking=True))
        slower = max(seconds_per_call(copy, device, seconds=seconds / 2) for copy in copies)
        measured["pcie_gb_per_second"] = COPY_BYTES / slower / 1e9
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
    """Return the rate of a matmul of random numbers, as zeros cost less power; None without a kernel for it."""
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


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trimaran.machine.probe.calibrate")
    parser.add_argument("--kind", choices=list(SHAPES), required=True)
    parser.add_argument("--cores", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--disk", default="")
    options = parser.parse_args()

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
