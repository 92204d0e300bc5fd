"""Forked ranks and collectives: how long they take on one message, and whether their results are right."""

import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from trimaran.core import DEVICE_TRAITS

START_SECONDS = 60.0  # ranks may take this long to meet, on a busy machine
MAX_EXACT_RANKS = 64  # whose sum of integers up to 4 is exact in bf16

# The new names of torch 2.13.
gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommGroup:
    """The ranks of a process group, in order, and this rank's place among them."""

    group: dist.ProcessGroup | None
    ranks: tuple[int, ...]
    place: int

    def __len__(self) -> int:
        return len(self.ranks)


@dataclass(slots=True)
class Message:
    """Two tensors of equal length, a multiple of the number of ranks. `calls` counts how often they were sent."""

    first: torch.Tensor
    second: torch.Tensor
    calls: int = 0


def make_message(num_bytes: int, ranks: int, *, device: torch.device, dtype: torch.dtype) -> Message:
    """Return a message of at most `num_bytes`, at least one element for each rank."""
    length = max(num_bytes // dtype.itemsize // ranks, 1) * ranks
    first, second = (torch.zeros(length, device=device, dtype=dtype) for _ in range(2))
    return Message(first=first, second=second)


def all_reduce(message: Message, group: CommGroup) -> None:
    dist.all_reduce(message.first, group=group.group)


def all_gather(message: Message, group: CommGroup) -> None:
    gather_single(message.first, _part(message.second, group), group=group.group)


def reduce_scatter(message: Message, group: CommGroup) -> None:
    scatter_single(_part(message.first, group), message.second, group=group.group)


def all_to_all(message: Message, group: CommGroup) -> None:
    dist.all_to_all_single(message.first, message.second, group=group.group)


def broadcast(message: Message, group: CommGroup) -> None:
    """Broadcast from each rank in turn: a root that sends again and again would not wait for the others."""
    dist.broadcast(message.first, group.ranks[message.calls % len(group)], group=group.group)


def send_recv(message: Message, group: CommGroup) -> None:
    """Send the message to the next rank of the ring and receive that of the previous one, at the same time."""
    following, previous = (group.ranks[(group.place + step) % len(group)] for step in (1, -1))
    both = [
        dist.P2POp(dist.isend, message.second, following, group=group.group),
        dist.P2POp(dist.irecv, message.first, previous, group=group.group),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()


Call = Callable[[Message, CommGroup], None]
CALLS: dict[str, Call] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "broadcast": broadcast,
    "send_recv": send_recv,
}


def timed(call: Call, message: Message, group: CommGroup, *, repeats: int) -> float:
    """Return the seconds of one call here, the mean of `repeats` calls without a pause."""
    device = message.first.device
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        call(message, group)
        message.calls += 1
    synchronize(device)
    return (time.perf_counter() - start) / repeats


def count_wrong(name: str, group: CommGroup, *, device: torch.device, dtype: torch.dtype) -> int:
    """Return how many values of a small collective are wrong on this rank.

    Each rank sends a small integer of its own. Sums over 64 ranks are still exact in bf16; above that, only fp32 is
    checked.
    """
    ranks = len(group)
    if ranks > MAX_EXACT_RANKS and dtype != torch.float32:
        return 0
    length = 4
    message = make_message(length * ranks * dtype.itemsize, ranks, device=device, dtype=dtype)
    own, every = _value(group.place), [_value(place) for place in range(ranks)]
    message.first.fill_(own)
    message.second.fill_(own)
    CALLS[name](message, group)
    synchronize(device)
    got = message.first.double().cpu()
    blocks = torch.tensor(every, dtype=torch.float64).repeat_interleave(length)
    wanted = {
        "all_reduce": torch.full_like(got, sum(every)),
        "all_gather": blocks,
        "all_to_all": blocks,
        "broadcast": torch.full_like(got, every[0]),
        "send_recv": torch.full_like(got, every[group.place - 1]),
    }
    if name == "reduce_scatter":
        place = group.place * length
        return int((got[place : place + length] != sum(every)).sum())
    return int((got != wanted[name]).sum())


def _value(place: int) -> float:
    return 1.0 + place % 4


def _part(tensor: torch.Tensor, group: CommGroup) -> torch.Tensor:
    size = len(tensor) // len(group)
    return tensor[group.place * size : (group.place + 1) * size]


def take_device(kind: str, index: int) -> torch.device:
    """Return the device that a rank works on, as torch's current one. Ranks beyond the number of GPUs share them."""
    if DEVICE_TRAITS[kind].shares_cores:
        return torch.device(kind)
    device = torch.device(kind, index % max(1, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if DEVICE_TRAITS[device.type].runs_async:
        torch.cuda.synchronize(device)


def open_store(address: str, seconds: float, *, is_master: bool = False) -> dist.TCPStore:
    """Return the store at `host:port`, which all ranks or nodes share."""
    host, _, port = address.rpartition(":")
    limit = timedelta(seconds=seconds)
    return dist.TCPStore(host.strip("[]"), int(port), is_master=is_master, timeout=limit, wait_for_workers=False)


def write_line(**fields: object) -> None:
    """Tell the caller of this process, as a line of JSON."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def run_forked(function: Callable[..., Any], arguments: list[tuple[Any, ...]], *, seconds: float) -> list[Any]:
    """Return `function(*each)` for each of `arguments`, each run in a forked process.

    `{"error": ...}` stands for one that died or raised, None for one that did not end within `seconds`.
    """
    context = multiprocessing.get_context("fork")
    pipes: dict[Connection, int] = {}
    workers = []
    for number, each in enumerate(arguments):
        receiver, sender = context.Pipe(duplex=False)
        worker = context.Process(target=_child, args=(sender, function, each), daemon=True)
        worker.start()
        sender.close()  # so that the pipe closes when the child dies
        pipes[receiver] = number
        workers.append(worker)
    answers: list[Any] = [None] * len(arguments)
    end = time.monotonic() + seconds
    try:
        while pipes and (ready := wait(list(pipes), max(0.0, end - time.monotonic()))):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                number = pipes.pop(pipe)
                try:
                    answers[number] = pipe.recv()
                except EOFError:
                    answers[number] = {"error": "a rank died without an error message"}
        return answers
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def _child(pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        pipe.send(function(*arguments))
    except Exception as error:  # the parent reports it
        pipe.send({"error": f"{type(error).__name__}: {error}".splitlines()[0]})
    pipe.close()
    time.sleep(START_SECONDS)  # until the parent ends all children: others may still need this one's connections
