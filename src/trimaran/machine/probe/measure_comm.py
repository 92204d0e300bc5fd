"""`python -m trimaran.machine.probe.measure_comm`: times collectives by size and group, as JSON lines on stdout.

The request is one JSON object on standard input. Ranks are forked here, as `probe_ranks` does; with other nodes they
meet in a TCP store. While it works, rank 0 writes `{"doing", "share"}`. The last line is `{"measured": {...}}` on every
node, or `{"error": ...}`.
"""

import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist

from trimaran.core import DEVICE_TRAITS
from trimaran.machine.probe.collective_calls import (
    CALLS,
    START_SECONDS,
    Call,
    CommGroup,
    Message,
    count_wrong,
    make_message,
    open_store,
    run_forked,
    send_recv,
    take_device,
    timed,
    write_line,
)
from trimaran.machine.probe.probe_ranks import DTYPES

ROUND_SECONDS = 0.01  # of calls between two readings of the clock; short, so that some rounds are not interrupted
MIN_ROUNDS, MAX_ROUNDS, MAX_REPEATS = 3, 200, 1000
PAIR_TIME_FRACTION = 0.1  # of all time, for messages between pairs of ranks
PAIR_BYTES = {"cpu": 1 << 20, "cuda": 1 << 24}
MAX_PAIR_ROUNDS = 20
SUSPECT_FACTOR = 1.3  # times the median: a pair that is measured again
MAX_PAIRS = 120  # all pairs of 16 ranks; with more ranks, only neighbours
SLACK = 0.25  # of its share of the time that a curve may take longer, so that its largest size is not left out

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommRank:
    """One rank: its number, its device, and the request that all ranks share."""

    rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype
    request: Fields

    def agree(self, value: float) -> float:
        """Return the largest `value` of all ranks, on every rank. It goes over gloo, also between GPUs."""
        tensor = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return float(tensor.item())

    def slowest(self, rounds: Sequence[float]) -> list[float]:
        """Return the time of the slowest rank in each round."""
        tensor = torch.tensor(rounds, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.tolist()

    def report(self, doing: str, share: float) -> None:
        if self.rank == 0:
            write_line(doing=doing, share=min(share, 1.0))


def run_rank(request: Fields, rank: int, store_path: str) -> Fields:
    """Join the ranks, measure everything that is requested, and return it."""
    torch.set_num_threads(1)
    kind, world_size, limit = request["kind"], request["world_size"], request["timeout_seconds"]
    if not DEVICE_TRAITS[kind].shares_cores:
        for name, value in request["rank_environments"][rank - request["first_rank"]].items():
            os.putenv(name, value)  # NCCL reads it with getenv
    device = take_device(kind, rank - request["first_rank"] + request["first_device"])
    store = open_store(request["address"], limit) if request["address"] else dist.FileStore(store_path, world_size)
    # Small messages between the ranks, such as the number of rounds, go over gloo, also between GPUs.
    backends = DEVICE_TRAITS[kind].group_backends
    dist.init_process_group(
        backends,
        store=dist.PrefixStore("bench", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=limit),
    )
    this = CommRank(rank=rank, world_size=world_size, device=device, dtype=DTYPES[request["dtype"]], request=request)
    groups = {each["name"]: _open_groups(each["ranks"], this) for each in request["groups"]}
    curves = [(name, collective) for name in groups for collective in request["collectives"]]
    wrong, points, skipped = [], [], []
    has_pairs = this.world_size > 2
    share = (1 - PAIR_TIME_FRACTION * has_pairs) / len(curves)
    for number, (name, collective) in enumerate(curves):
        this.report(f"{collective.replace('_', '-')} of {name}", number * share)
        group = groups[name]  # the check is also a warm-up
        bad = int(this.agree(count_wrong(collective, group, device=this.device, dtype=this.dtype) if group else 0))
        wrong += [{"group": name, "collective": collective, "values": bad}] if bad else []
        curve, left_out = _measure_curve(collective, groups[name], this, seconds=request["seconds"] * share)
        points += [{"group": name, "collective": collective, **point} for point in curve]
        skipped += [{"group": name, "collective": collective, "bytes": size} for size in left_out]
    pairs: list[Fields] = []
    if has_pairs:
        this.report("pairs of ranks", 1 - PAIR_TIME_FRACTION)
        dist.all_reduce(torch.zeros(1, device=this.device))  # NCCL connects all ranks before two of them may talk
        pairs = _measure_pairs(this, seconds=request["seconds"] * PAIR_TIME_FRACTION)
    hosts: list[Any] = [None] * this.world_size
    dist.all_gather_object(hosts, socket.gethostname())
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if this.request["backend"] == "nccl" else ""
    versions = {"torch": torch.__version__, "nccl": nccl}
    dist.barrier()
    return {"points": points, "pairs": pairs, "skipped": skipped, "wrong": wrong, "hosts": hosts, **versions}


def _open_groups(ranks: Sequence[Sequence[int]], this: CommRank) -> CommGroup | None:
    """Return this rank's group of several disjoint ones; None if it is in none. All ranks call this."""
    own: CommGroup | None = None
    for each in ranks:
        group = dist.new_group(list(each))
        if this.rank in each:
            assert isinstance(group, dist.ProcessGroup), "a member of the group gets it"
            own = CommGroup(group=group, ranks=tuple(each), place=list(each).index(this.rank))
    return own


def _measure_curve(
    collective: str, group: CommGroup | None, this: CommRank, *, seconds: float
) -> tuple[list[Fields], list[int]]:
    """Return the times by size, and sizes that take too long. All groups work at once; the slowest rank counts."""
    sizes, points = sorted(this.request["sizes"]), []
    begin = time.monotonic()
    least, before = 0.0, (1, 0.0)  # seconds of the fastest size, and size and seconds of the one before
    for number, size in enumerate(sizes):
        left = this.agree(seconds - (time.monotonic() - begin))
        expected = least + (before[1] - least) * size / before[0]
        if (MIN_ROUNDS + 2) * expected > max(left, 0.0) + SLACK * seconds:
            return points, sizes[number:]
        ranks = len(group) if group else 1
        message = make_message(size, ranks, device=this.device, dtype=this.dtype)
        rounds = _rounds(CALLS[collective], message, group, this, seconds=max(left, 0.0) / (len(sizes) - number))
        # The slowest rank takes part in all groups of this kind, so every rank knows the size that was sent.
        sent = int(this.agree(message.first.numel() * this.dtype.itemsize if group else 0))
        points.append({"bytes": sent, "rounds": rounds})
        before = (size, statistics.median(rounds))
        least = min(least or before[1], before[1])
        del message
    return points, []


def _rounds(call: Call, message: Message, group: CommGroup | None, this: CommRank, *, seconds: float) -> list[float]:
    """Return the seconds of a call in each round, those of the slowest rank."""

    def once(repeats: int) -> float:
        dist.barrier()
        return timed(call, message, group, repeats=repeats) if group else 0.0

    once(1)
    first = max(this.agree(once(1)), 1e-6)
    repeats = min(max(int(ROUND_SECONDS / first), 1), MAX_REPEATS)
    count = min(max(int(seconds / (first * repeats)), MIN_ROUNDS), MAX_ROUNDS)
    return this.slowest([once(repeats) for _ in range(count)])


def _measure_pairs(this: CommRank, *, seconds: float) -> list[Fields]:
    """Return how long a message takes in both directions of each pair; slow-looking ones are measured again."""
    num_bytes = min(PAIR_BYTES[this.device.type], max(this.request["sizes"]))
    world, took = this.world_size, dict[tuple[int, int], float]()
    pairs = list(combinations(range(world), 2))
    if len(pairs) > MAX_PAIRS:
        pairs = [(rank, (rank + 1) % world) for rank in range(world)]
    share = seconds / (2 * len(pairs))
    for pair in pairs:
        took[pair] = _measure_pair(pair, num_bytes, this, seconds=share)
    usual = statistics.median(took.values())
    slow = [pair for pair in pairs if took[pair] > SUSPECT_FACTOR * usual]
    for pair in slow:
        took[pair] = min(took[pair], _measure_pair(pair, num_bytes, this, seconds=seconds / 2 / len(slow)))
    return [{"ranks": pair, "bytes": num_bytes, "seconds": took[pair]} for pair in pairs]


def _measure_pair(pair: tuple[int, int], num_bytes: int, this: CommRank, *, seconds: float) -> float:
    """Return the fastest of several rounds, equal on all ranks."""
    mine, begin = this.rank in pair, time.monotonic()
    group = CommGroup(group=None, ranks=pair, place=int(this.rank == pair[1]))
    message = make_message(num_bytes if mine else 8, 2, device=this.device, dtype=this.dtype)
    rounds: list[float] = []
    while len(rounds) <= MAX_PAIR_ROUNDS:  # the first opens the connection
        dist.barrier()
        rounds.append(this.agree(timed(send_recv, message, group, repeats=1) if mine else 0.0))
        if len(rounds) > MIN_ROUNDS and this.agree(time.monotonic() - begin) > seconds:
            break
    return min(rounds[1:])


def measure(request: Fields) -> Fields:
    """Fork this node's ranks and return what they measured; raise RuntimeError if one of them failed."""
    first, local = request["first_rank"], request["ranks"]
    limit = START_SECONDS + request["timeout_seconds"] + 4 * request["seconds"]
    own_store = None
    if request["address"] and request["hosts_store"]:
        own_store = open_store(request["address"], request["timeout_seconds"], is_master=True)
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(request, rank, f"{folder}/store") for rank in range(first, first + local)]
        answers = run_forked(run_rank, arguments, seconds=limit)
    for rank, answer in enumerate(answers, first):
        if answer is None or "error" in answer:
            reason = answer["error"] if answer else f"did not finish within {limit:.0f} s"
            raise RuntimeError(f"rank {rank}: {reason}")
    if own_store is not None and request["world_size"] > local:
        time.sleep(0.5)  # so that the other nodes have left the store before it ends
    return answers[0]


def main() -> int:
    request = json.loads(sys.stdin.readline())
    try:
        write_line(measured=measure(request))
    except Exception as error:  # is the answer, and the caller prints it
        write_line(error=f"{error}".splitlines()[0] if f"{error}" else type(error).__name__)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
