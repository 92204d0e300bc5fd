"""How fast a checkpoint is written and read, and how long it stalls training: ours against torch's and the disk.

`python -m benchmarks.checkpoint [--gb 1] [--ranks 2] [--rounds 5] [--peers torch.save,dcp.save] [--json]`: a stack of
square layers with AdamW's moments, sharded by FSDP2 over forked ranks, on the CPU or, with one rank, on a GPU. *Stall*
is how long the call blocks training, *total* is until everything is on disk. Both are of the slowest rank, as medians
over the rounds, in which all alternate. All are synced to disk, since ours is: torch's writers leave that to the
operating system, so this script syncs their files and counts the time. Ours also computes checksums, and reads all
files back. *Load* verifies and reads our checkpoint from the disk, not from the page cache. *dd* writes and reads as
many bytes with direct I/O in several streams: what the disk can do. *Copy* is the cost of a memory copy in each step.
A state of more than 8 GB has one slot in memory instead of two, so that 40 GB fit into 128 GiB.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

from trimaran.checkpoint.copier import Copier
from trimaran.checkpoint.device_copier import DeviceCopier
from trimaran.checkpoint.manifest import Manifest
from trimaran.checkpoint.memory_copies import CopyMetadata, RankMemory
from trimaran.checkpoint.rank_layout import barrier, exchange_rank_layout
from trimaran.checkpoint.saver import Saver, SaveRequest, TorchStore
from trimaran.checkpoint.step_dirs import step_path
from trimaran.core import CheckpointSection
from trimaran.parallel.comm.json_exchange import all_gather_int64
from trimaran.parallel.tensor_shards import assign_rows, build_share
from trimaran.train.checkpointing.tiers import restore_from_disk
from trimaran.train.checkpointing.training_state import TrainingState
from trimaran.train.process.rank_setup import join_process_group, read_rank_info

WIDTH = 2048
STATE_BYTES = 12  # of a parameter: fp32 weight and two moments
DD_BLOCK_BYTES = 16 << 20
TWO_SLOTS_BYTES = 8e9
PEERS = ("torch.save", "dcp.save", "dcp.async_save")
Saving = Callable[[Path], Callable[[], None]]
"""Blocks while it stalls training, and returns a function that waits for the rest."""


class Subject:
    """A model that was trained for a step, and the functions that save it."""

    def __init__(self, million: int, folder: Path) -> None:
        self.rank_info = read_rank_info(os.environ)
        join_process_group(self.rank_info)
        self.group: Any = dist.new_group(backend="gloo")
        layers = max(1, million * 10**6 // (WIDTH * WIDTH))
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))).to(self.rank_info.device)
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.state = TrainingState([self.model], self.optimizer, counters={}, settings={})
        self.step()
        self.ours = Ours(self, folder)

    def step(self, *, before_update: Callable[[], None] = lambda: None) -> None:
        self.model(torch.randn(8, WIDTH, device=self.rank_info.device)).square().mean().backward()
        before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def torch_save(self, path: Path) -> Callable[[], None]:
        """Save the shards of each rank, as scripts without a library do; loads only under the same plan."""
        path.mkdir(exist_ok=True)
        local = {shard.key: shard.tensor for shard in self.state.shards()}
        torch.save(local, path / f"rank-{self.rank_info.rank}.pt")
        sync(path)
        return lambda: None

    def dcp_save(self, path: Path) -> Callable[[], None]:
        dcp.save(self._dcp_state(), checkpoint_id=path)
        sync(path)
        return lambda: None

    def dcp_async_save(self, path: Path) -> Callable[[], None]:
        future: Any = dcp.async_save(self._dcp_state(), checkpoint_id=path, process_group=self.group)

        def wait() -> None:
            future.result()
            sync(path)

        return wait

    def _dcp_state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


class Ours:
    """The work of the checkpointer for a checkpoint, and for a memory copy."""

    def __init__(self, subject: Subject, folder: Path) -> None:
        self.subject, self.number = subject, 0
        rank_layout = exchange_rank_layout(subject.rank_info.rank, subject.rank_info.local_rank)
        shards = subject.state.shards()
        rows = assign_rows(shards, rank=rank_layout.rank, world_size=rank_layout.world_size, gather=all_gather_int64)
        self.share, self.rank_layout = build_share(shards, rows), rank_layout
        self.rank_memory = RankMemory(os.memfd_create("benchmark"))
        num_slots = 2 if self.share.num_bytes < TWO_SLOTS_BYTES else 1
        items_bytes = len(Copier(self.share).items)
        self.rank_memory.create_slots(num_slots, num_bytes=self.share.num_bytes, items_bytes=items_bytes)
        on_gpu = subject.rank_info.device.type == "cuda"
        self.copier = (
            DeviceCopier(self.share, self.rank_memory, subject.rank_info.device) if on_gpu else Copier(self.share)
        )
        shared: Any = dist.distributed_c10d._get_default_store()
        section, store = CheckpointSection(keep=1000), TorchStore(shared.clone())
        self.folder = folder / "ours"
        self.saver = Saver(self.folder, rank_layout, store, section, lambda request: Manifest(step=request.step))

    def save(self, path: Path) -> Callable[[], None]:
        slot = self.copy()
        memory = slot.data[: self.share.num_bytes]
        request = SaveRequest(step=self.number, share=self.share, memory=memory, wait_ready=self.copier.wait)
        self.saver.start(request)

        def wait() -> None:
            self.saver.wait()
            (result,) = self.saver.results()
            assert not result.failed, result.failed

        return wait

    def copy(self) -> Any:
        self.number += 1
        slot = self.rank_memory.slots[self.number % len(self.rank_memory.slots)]
        metadata = CopyMetadata(
            step=self.number, incarnation=(0, 0), rank=self.rank_layout.rank, world_size=self.rank_layout.world_size
        )
        self.copier.copy(slot, metadata, self.subject.state.shards())
        return slot

    def load(self) -> None:
        """Load the last checkpoint as a resume does: verify it, then fill the state."""
        restored = restore_from_disk(self.subject.state, self.folder, self.rank_layout)
        assert (restored.step, restored.tier) == (self.number, "disk"), restored

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class Dd:
    """`dd` with direct I/O in several streams, as many bytes in all as a checkpoint has."""

    def __init__(self, folder: Path, num_bytes: int, streams: int) -> None:
        self.paths = [folder / f"dd-{number}" for number in range(streams)]
        self.blocks = max(1, round(num_bytes / streams / DD_BLOCK_BYTES))
        self.num_bytes = self.blocks * DD_BLOCK_BYTES * streams

    def write(self) -> float:
        """Return the bytes per second."""
        return self._run("if=/dev/zero", "of={}", "oflag=direct", "conv=fsync")

    def read(self) -> float:
        return self._run("if={}", "of=/dev/null", "iflag=direct")

    def remove(self) -> None:
        for path in self.paths:
            path.unlink()

    def _run(self, *words: str) -> float:
        began = time.perf_counter()
        base = ["dd", f"bs={DD_BLOCK_BYTES}", f"count={self.blocks}", "status=none"]
        started = [subprocess.Popen([*base, *(word.format(path) for word in words)]) for path in self.paths]
        codes = [each.wait() for each in started]
        assert not any(codes), "dd failed: the file system may have no direct I/O"
        return self.num_bytes / (time.perf_counter() - began)


def drop_from_page_cache(path: Path) -> None:
    """Free the page cache of all files of the folder, so that they are read from the disk."""
    for each in path.iterdir():
        fd = os.open(each, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def sync(path: Path) -> None:
    """Sync all files of the folder to the disk."""
    for each in path.iterdir():
        fd = os.open(each, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the times of this rank: stall and total of each saver and round, of each load, and the stall of each copy.

    The first round and the first copies are left out: they use memory that was never touched.
    """
    subject = Subject(options.million, folder)
    ours, is_first = subject.ours, subject.rank_info.rank == 0
    known: dict[str, Saving] = dict(
        zip(PEERS, (subject.torch_save, subject.dcp_save, subject.dcp_async_save), strict=True)
    )
    savers = {name: save for name, save in known.items() if name in options.peers} | {"trimaran": ours.save}
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in (*savers, "load")}
    disk: dict[str, list[float]] = {"dd write": [], "dd read": []}
    sizes = all_gather_int64(np.array([ours.share.num_bytes]))
    dd = Dd(folder, int(sizes.sum()), options.streams)
    for number in range(options.rounds + options.warm_up):
        if is_first and options.streams:
            disk["dd write"].append(dd.write())
            disk["dd read"].append(dd.read())
            dd.remove()
        barrier()
        for name, save in savers.items():
            path = folder / f"{name}-{number}"
            seen[name].append(_time_save(subject, partial(save, path)))
            if is_first:
                shutil.rmtree(path, ignore_errors=True)
        if is_first:
            drop_from_page_cache(step_path(ours.folder, ours.number))
        _synchronize(subject)
        began = time.perf_counter()
        ours.load()
        _synchronize(subject)
        seen["load"].append((time.perf_counter() - began,) * 2)
        if is_first:
            ours.remove()
    copies, steps = _copies(subject, 3 + options.rounds) if options.copies else ([0.0], [0.0])
    ways = {name: each[options.warm_up :] for name, each in seen.items()}
    disk = {name: each[options.warm_up :] for name, each in disk.items()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"ways": ways, "disk": disk, "copies": copies, "steps": steps, "bytes": ours.share.num_bytes, "peak": peak}


def _time_save(subject: Subject, save: Callable[[], Callable[[], None]]) -> tuple[float, float]:
    """Return how long a save stalls training, and how long it takes until everything is on disk."""
    _synchronize(subject)
    began = time.perf_counter()
    wait = save()
    stall = time.perf_counter() - began
    wait()
    total = time.perf_counter() - began
    barrier()
    return stall, total


def _copies(subject: Subject, number: int) -> tuple[list[float], list[float]]:
    """Return how long each memory copy stalled a step, and how long a step takes without a copy."""
    copier, stalls, steps = subject.ours.copier, [], []
    for _ in range(number):
        _synchronize(subject)
        began = time.perf_counter()
        subject.step()
        _synchronize(subject)
        steps.append(time.perf_counter() - began)
        began = time.perf_counter()
        subject.ours.copy()
        host_seconds = time.perf_counter() - began
        subject.step(before_update=copier.before_update)
        _synchronize(subject)
        copier.wait()
        stalls.append(host_seconds + copier.device_waits()[-1])
    return stalls[3:], steps[3:]


def _synchronize(subject: Subject) -> None:
    if subject.rank_info.device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--million", type=int, default=100, help="parameters, in millions")
    parser.add_argument("--gb", type=float, help="size of the state in GB, instead of --million")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=1, help="rounds that are not counted")
    parser.add_argument("--peers", default=",".join(PEERS), help="which others to measure; empty: none")
    parser.add_argument("--streams", type=int, default=4, help="of dd; 0: no dd")
    parser.add_argument("--copies", action=argparse.BooleanOptionalAction, default=True, help="measure memory copies")
    parser.add_argument("--folder", type=Path, help="where to write to; a temporary folder without it")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.gb:
        options.million = round(1e3 * options.gb / STATE_BYTES)
    options.peers = [name for name in options.peers.split(",") if name]
    if unknown := set(options.peers) - set(PEERS):
        parser.error(f"--peers: {', '.join(sorted(unknown))} are not of {', '.join(PEERS)}")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = run_ranks(options.ranks, measure, options, Path(folder), timeout=1800.0)
    _show(options, found)


def _show(options: argparse.Namespace, found: list[dict[str, Any]]) -> None:
    state_bytes = sum(rank["bytes"] for rank in found)
    disk = {name: statistics.median(each) for name, each in found[0]["disk"].items() if each}
    table: dict[str, dict[str, float]] = {}
    for name in found[0]["ways"]:
        # A checkpoint takes as long as its slowest rank.
        worst = [[max(rank["ways"][name][number][which] for rank in found) for number in range(options.rounds)]
                 for which in (0, 1)]  # fmt: skip
        row = {"stall": statistics.median(worst[0]), "total": statistics.median(worst[1])}
        row["bytes_per_second"] = state_bytes / row["total"]
        if dd := disk.get("dd read" if name == "load" else "dd write"):
            row["of_dd"] = row["bytes_per_second"] / dd
        table[name] = row
    copy, step = (max(statistics.median(rank[which]) for rank in found) for which in ("copies", "steps"))
    peak = max(rank["peak"] for rank in found)
    if options.json:
        facts = {"copy": copy, "step": step, "bytes": state_bytes, "peak_host_bytes": peak}
        print(json.dumps({"ways": table, "disk": disk, **facts}))
        return
    ours = table["trimaran"]
    print(f"{options.million} M parameters, {state_bytes / 1e9:.2f} GB of state, {options.ranks} rank(s), "
          f"torch {torch.__version__}, peak host memory of a rank {peak / 1e9:.2f} GB")  # fmt: skip
    for name, rate in disk.items():
        print(f"{name:16}{rate / 1e9:10.2f} GB/s, {options.streams} streams")
    print(f"{'':16}{'stall ms':>10}{'of ours':>10}{'total s':>10}{'of ours':>10}{'GB/s':>10}{'of dd':>10}")
    for name, row in table.items():
        ratios = row["stall"] / ours["stall"], row["total"] / ours["total"]
        print(f"{name:16}{1e3 * row['stall']:10.1f}{ratios[0]:10.1f}{row['total']:10.2f}{ratios[1]:10.2f}"
              f"{row['bytes_per_second'] / 1e9:10.2f}{row.get('of_dd', float('nan')):10.2f}")  # fmt: skip
    if options.copies:
        steps = f"a step of this stack takes {1e3 * step:.1f} ms"
        print(f"copy in memory, each step: {1e3 * copy:.1f} ms of stall; {steps}")


if __name__ == "__main__":
    main()
