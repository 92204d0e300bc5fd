"""Measures collectives between real processes: gloo between cores, NCCL between GPUs."""

import multiprocessing
import tempfile
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from trimaran.core.traits import DEVICE_TRAITS
from trimaran.machine.probe.collective_calls import (
    Call,
    CommGroup,
    Message,
    all_gather,
    all_reduce,
    all_to_all,
    make_message,
    take_device,
    timed,
)

# Message sizes: one so small that only latency counts, and two whose difference in time gives the bandwidth.
SMALL_BYTES = 1 << 12
MIDDLE_BYTES = {"cpu": 1 << 20, "cuda": 1 << 24}
LARGE_BYTES = {"cpu": 1 << 24, "cuda": 1 << 28}
ROUND_SECONDS = 0.01  # of calls between two readings of the clock; short, so that some rounds are not interrupted
START_SECONDS = 60.0  # the ranks may take this long to meet, on a busy machine


def measure_collectives(kind: str, ranks: int, *, seconds: float) -> dict[str, float]:
    """Return the bus bandwidth of each collective and the latency of a hop, among `ranks` forked processes.

    The fields are those of `trimaran.machine.calibration.Collectives`.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (kind, ranks, str(Path(folder) / "store"), seconds, sender)
        workers = [context.Process(target=_run_rank, args=(rank, *arguments), daemon=True) for rank in range(ranks)]
        for worker in workers:
            worker.start()
        sender.close()
        try:
            if not receiver.poll(START_SECONDS + 2 * seconds):
                raise RuntimeError("the ranks did not finish their collectives")
            return receiver.recv()
        finally:
            for worker in workers:
                worker.join(timeout=10)
                worker.kill()


def _run_rank(rank: int, kind: str, ranks: int, store_path: str, seconds: float, sender: Connection) -> None:
    torch.set_num_threads(1)
    device = take_device(kind, rank)
    store = dist.FileStore(store_path, ranks)
    backend, timeout = DEVICE_TRAITS[kind].backend, timedelta(seconds=START_SECONDS)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    sizes = (SMALL_BYTES, MIDDLE_BYTES[kind], LARGE_BYTES[kind])
    each = seconds / (len(CALLS) * len(sizes))
    took = {name: [_seconds(call, size, device, seconds=each) for size in sizes] for name, call in CALLS.items()}
    if rank == 0:
        sender.send(_fit(took, ranks, extra_bytes=sizes[2] - sizes[1]))
    sender.close()
    dist.destroy_process_group()


def _fit(took: dict[str, list[float]], ranks: int, *, extra_bytes: int) -> dict[str, float]:
    """Return bus bandwidths from the extra time of the large message, and the latency of a hop from the small one.

    A ring all-gather of n ranks has n - 1 hops, which the planner counts too; an all-reduce goes round twice. Where
    noise made the large message faster than the middle one, the bandwidth is left out.
    """
    factors = {"all_reduce": 2 * (ranks - 1) / ranks, "send": 1.0}
    fitted = {"devices": ranks, "latency_us": took["all_gather"][0] / (ranks - 1) * 1e6}
    for name, (_, middle, large) in took.items():
        if large > middle:
            moved = factors.get(name, (ranks - 1) / ranks) * extra_bytes
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
    """Return rank 0's number on every rank."""
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
