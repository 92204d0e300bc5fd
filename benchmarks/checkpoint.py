"""How long a checkpoint stalls training: ours against torch.save, dcp.save and dcp.async_save, in one run.

`python -m benchmarks.checkpoint [--million 100] [--ranks 2] [--rounds 5] [--json]`: a stack of square layers with
AdamW's moments, sharded by FSDP2 over forked ranks, on the CPU or, with one rank, on a GPU. *Stall* is how long the
call blocks training, *total* is until everything is on disk. Both are of the slowest rank, as medians over the rounds,
in which the four alternate. All are synced to disk, since ours is: torch's writers leave that to the operating system,
so this script syncs their files and counts the time. Ours also computes a SHA-256 of every file, and reads all files
back. *Copy* is the cost of a memory copy in each step.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

from trimaran.checkpoint.copier import Copier, DeviceCopier
from trimaran.checkpoint.manifest import Manifest
from trimaran.checkpoint.memory_copies import CopyMetadata, RankMemory
from trimaran.checkpoint.ownership import assign_rows
from trimaran.checkpoint.rank_layout import barrier, exchange_rank_layout
from trimaran.checkpoint.rank_share import build_share
from trimaran.checkpoint.saver import Saver, SaveRequest, TorchStore
from trimaran.core import CheckpointSection
from trimaran.parallel.comm.json_exchange import all_gather_int64
from trimaran.train.checkpointing.training_state import TrainingState
from trimaran.train.process.rank_info import join_process_group, read_rank_info

WIDTH = 2048
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
        self.rank_memory.create_slots(2, num_bytes=self.share.num_bytes, items_bytes=len(Copier(self.share).items))
        on_gpu = subject.rank_info.device.type == "cuda"
        self.copier = (
            DeviceCopier(self.share, self.rank_memory, subject.rank_info.device) if on_gpu else Copier(self.share)
        )
        shared: Any = dist.distributed_c10d._get_default_store()
        section, store = CheckpointSection(keep=1000), TorchStore(shared.clone())
        self.saver = Saver(folder, rank_layout, store, section, lambda request: Manifest(step=request.step))

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
        slot = self.rank_memory.slots[self.number % 2]
        metadata = CopyMetadata(
            step=self.number, incarnation=(0, 0), rank=self.rank_layout.rank, world_size=self.rank_layout.world_size
        )
        self.copier.copy(slot, metadata, self.subject.state.shards())
        return slot


def sync(path: Path) -> None:
    """Sync all files of the folder to the disk."""
    for each in path.iterdir():
        fd = os.open(each, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def measure(million: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Return the times of this rank: stall and total of each saver and round, and the stall of each copy.

    The first round and the first copies are left out: they use memory that was never touched.
    """
    subject = Subject(million, folder)
    savers: dict[str, Saving] = {
        "torch.save": subject.torch_save,
        "dcp.save": subject.dcp_save,
        "dcp.async_save": subject.dcp_async_save,
        "trimaran": subject.ours.save,
    }
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in savers}
    for number in range(rounds + 1):
        for name, save in savers.items():
            path = folder / f"{name}-{number}"
            _synchronize(subject)
            began = time.perf_counter()
            wait = save(path)
            stall = time.perf_counter() - began
            wait()
            seen[name].append((stall, time.perf_counter() - began))
            barrier()
            if subject.rank_info.rank == 0:
                shutil.rmtree(path, ignore_errors=True)
    copies, steps = _copies(subject, 3 + rounds)
    share = subject.ours.share.num_bytes
    return {"ways": {name: each[1:] for name, each in seen.items()}, "copies": copies, "steps": steps, "bytes": share}


def _copies(subject: Subject, number: int) -> tuple[list[float], list[float]]:
    """Return how long each memory copy stalled a step, and how long a step takes without a copy."""
    copier, stalls, steps = subject.ours.copier, [], []
    for _ in range(number):
        _synchronize(subject)
        began = time.perf_counter()
        subject.step()
        _synchronize(subject)
        steps.append(time.perf_counter() - began)
        subject.ours.copy()
        subject.step(before_update=copier.before_update)
        _synchronize(subject)
        copier.wait()
        if isinstance(copier, DeviceCopier):
            copier._measure_stall(waited=0.0)
        stalls.append(copier.stall_seconds)
    return stalls[3:], steps[3:]


def _synchronize(subject: Subject) -> None:
    if subject.rank_info.device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--million", type=int, default=100, help="parameters, in millions")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write to; a temporary folder without it")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = run_ranks(options.ranks, measure, options.million, options.rounds, Path(folder), timeout=1800.0)
    table = {}
    for name in found[0]["ways"]:
        # A checkpoint takes as long as its slowest rank.
        worst = [[max(rank["ways"][name][number][which] for rank in found) for number in range(options.rounds)]
                 for which in (0, 1)]  # fmt: skip
        table[name] = {"stall": statistics.median(worst[0]), "total": statistics.median(worst[1])}
    copy = max(statistics.median(rank["copies"]) for rank in found)
    step = max(statistics.median(rank["steps"]) for rank in found)
    state_bytes = sum(rank["bytes"] for rank in found)
    if options.json:
        print(json.dumps({"ways": table, "copy": copy, "step": step, "bytes": state_bytes}))
        return
    ours = table["trimaran"]
    size = f"{options.million} M parameters, {state_bytes / 1e9:.2f} GB of state"
    print(f"{size}, {options.ranks} rank(s), torch {torch.__version__}")
    print(f"{'':16}{'stall ms':>10}{'of ours':>10}{'total s':>10}{'of ours':>10}")
    for name, row in table.items():
        ratios = row["stall"] / ours["stall"], row["total"] / ours["total"]
        print(f"{name:16}{1e3 * row['stall']:10.1f}{ratios[0]:10.1f}{row['total']:10.2f}{ratios[1]:10.2f}")
    print(f"copy in memory, each step: {1e3 * copy:.1f} ms of stall; a step of this stack takes {1e3 * step:.1f} ms")


if __name__ == "__main__":
    main()
