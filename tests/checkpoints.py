"""Small states on simulated ranks, and disks that fail, for the tests of checkpoints."""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Barrier, Condition, Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimaran.checkpoint import (
    DiskSource,
    DurableDisk,
    Manifest,
    commit,
    draft_path,
    fill_shards,
    step_path,
    write_share,
)
from trimaran.parallel import RankShare, TensorShard, assign_rows, build_share, copy_to_memory

MANIFEST = Manifest(step=0, time=1.5, term=3, world_size=2, plan={"mesh": {"dp_shard": 2}}, recipe="name: x\n")


class UnsyncedDisk(DurableDisk):
    """A disk without syncs, for tests without a power cut."""

    def sync(self, fd: int) -> None:
        pass

    def sync_folder(self, path: Path) -> None:
        pass


def on_ranks(world_size: int, function: Callable[..., Any]) -> list[Any]:
    """Return the results of `function(rank, gather)` on each of `world_size` ranks, which are threads."""
    rows: list[Any] = [None] * world_size
    results: list[Any] = [None] * world_size
    barrier = Barrier(world_size, timeout=60)

    def work(rank: int) -> None:
        def gather(row: np.ndarray) -> np.ndarray:
            rows[rank] = row
            barrier.wait()
            matrix = np.stack(rows)
            barrier.wait()
            return matrix

        try:
            results[rank] = function(rank, gather)
        except BaseException as error:
            results[rank] = error

    threads = [Thread(target=work, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


class LocalStore:
    """A `KeyValueStore` within one process."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self._changed = Condition()

    def set(self, key: str, text: str) -> None:
        with self._changed:
            self.texts[key] = text
            self._changed.notify_all()

    def wait_get(self, keys: Sequence[str], timeout_seconds: float) -> list[str]:
        with self._changed:
            if not self._changed.wait_for(lambda: all(key in self.texts for key in keys), min(timeout_seconds, 30)):
                raise TimeoutError(", ".join(key for key in keys if key not in self.texts))
            return [self.texts[key] for key in keys]

    def has(self, keys: Sequence[str]) -> bool:
        return all(key in self.texts for key in keys)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.texts.pop(key, None)


def rows_of(tensors: dict[str, Tensor], rank: int, world_size: int, *, frozen: str = "frozen") -> list[TensorShard]:
    """Return the shards of a rank if dimension 0 is split as evenly as possible; scalars are replicated."""
    shards = []
    for key, tensor in tensors.items():
        first, end = 0, 0
        if tensor.ndim:
            first, end = (tensor.shape[0] * each // world_size for each in (rank, rank + 1))
        held = tensor[first:end].clone() if tensor.ndim else tensor.clone()
        start = (first, *(0 for _ in tensor.shape[1:])) if tensor.ndim else ()
        shards.append(TensorShard(key=key, tensor=held, shape=tuple(tensor.shape), start=start, frozen=frozen in key))
    return shards


def plain_tensor(shard: TensorShard) -> Tensor:
    """Return the tensor of a shard whose rank stores it in the format of the checkpoint."""
    assert isinstance(shard.tensor, Tensor)
    return shard.tensor


def copy_share(
    shards: Sequence[TensorShard], rank: int, world_size: int, gather: Any, **sizes: int
) -> tuple[RankShare, memoryview]:
    """Return the share of a rank and the memory that it is copied to."""
    share = build_share(shards, assign_rows(shards, rank=rank, world_size=world_size, gather=gather, **sizes))
    memory = torch.zeros(share.num_bytes, dtype=torch.uint8)
    copy_to_memory(share, shards, memory)
    return share, memoryview(memory.numpy())  # pyrefly: ignore[bad-argument-type]


def tensors_of(step: int) -> dict[str, Tensor]:
    """Return an unsharded state, different for every step except for its frozen tensors."""
    generator = torch.Generator().manual_seed(step)
    frozen = torch.Generator().manual_seed(1)
    return {
        "model/weight": torch.randn(6, 5, generator=generator),
        "model/half": torch.randn(4, 3, generator=generator).to(torch.bfloat16),
        "model/frozen.weight": torch.randn(8, 3, generator=frozen),
        "model/frozen.bias": torch.randn(8, generator=frozen).to(torch.float16),
        "optimizer/exp_avg/weight": torch.randn(6, 5, generator=generator),
        "optimizer/step/weight": torch.tensor(float(step)),
        "optimizer/codes/weight": torch.randint(256, (7, 3), generator=generator).to(torch.uint8),
    }


def save_checkpoint(
    folder: Path, step: int, *, world_size: int = 2, previous: Path | None = None, disk: DurableDisk | None = None
) -> list[Any]:
    """Write the checkpoint of `step` as `world_size` ranks would, one after the other, and return their reports."""
    shares = on_ranks(world_size, lambda rank, gather: copy_share(
        rows_of(tensors_of(step), rank, world_size), rank, world_size, gather))  # fmt: skip
    draft, disk = draft_path(folder, step, "abc123"), disk or UnsyncedDisk()
    manifest = Manifest(step=step, world_size=world_size, progress={"step": step, "loss_scale": 1024.0})
    reports = [
        write_share(draft, rank, share, memory, previous=previous, disk=disk)
        for rank, (share, memory) in enumerate(shares)
    ]
    commit(draft, step_path(folder, step), reports, manifest, disk)
    return reports


def loads(path: Path, step: int) -> bool:
    """Return whether three ranks load the state of `step` from the checkpoint, bit for bit."""
    source = DiskSource(path)
    for rank in range(3):
        wanted = rows_of(tensors_of(step), rank, 3)
        zeros = [torch.zeros_like(plain_tensor(each)) for each in wanted]
        held = [TensorShard(key=each.key, tensor=zero, shape=each.shape, start=each.start)
                for each, zero in zip(wanted, zeros, strict=True)]  # fmt: skip
        fill_shards(held, source)
        if not all(torch.equal(plain_tensor(a), plain_tensor(b)) for a, b in zip(held, wanted, strict=True)):
            return False
    return source.step == step and source.progress["step"] == step


class Crash(BaseException):
    """The process is killed here."""


CALLS = ("make_folder", "create", "write", "sync", "sync_folder", "link", "rename", "remove", "remove_folder")


class CrashingDisk(UnsyncedDisk):
    """A disk that crashes the process at its n-th call, from 0; a write is done by half."""

    def __init__(self, crash_at: int = -1) -> None:
        self.crash_at, self.done = crash_at, []

    def count_call(self, name: str, *args: Any) -> None:
        if len(self.done) == self.crash_at:
            if name == "write":
                fd, data = args
                os.write(fd, data[: len(data) // 2])
            raise Crash(name)
        self.done.append(name)


def _counted(name: str) -> Callable[..., Any]:
    def call(self: CrashingDisk, *args: Any) -> Any:
        self.count_call(name, *args)
        return getattr(UnsyncedDisk, name)(self, *args)

    return call


for _name in CALLS:
    setattr(CrashingDisk, _name, _counted(_name))


class PowerCutDisk(CrashingDisk):
    """A disk that loses everything that is not synced when the power fails at its n-th call."""

    def __init__(self, crash_at: int = -1) -> None:
        super().__init__(crash_at)
        self.names: list[tuple[str, Path, Path]] = []
        self.files: dict[int, Path] = {}
        self.unsynced: set[Path] = set()

    def make_folder(self, path: Path) -> None:
        missing = [each for each in (path, *path.parents) if not each.exists()]
        super().make_folder(path)
        self.names += [("folder", each, each) for each in reversed(missing)]

    def create(self, path: Path) -> int:
        fd = super().create(path)
        self.names.append(("file", path, path))
        self.files[fd] = path
        self.unsynced.add(path)
        return fd

    def link(self, old: Path, new: Path) -> None:
        super().link(old, new)
        self.names.append(("file", new, new))

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        moved = {each: new / each.relative_to(old) for each in self._under(old)}
        self.names = [(kind, moved.get(a, a), moved.get(b, b)) for kind, a, b in self.names]
        self.unsynced = {moved.get(each, each) for each in self.unsynced}
        self.names.append(("rename", old, new))

    def _under(self, folder: Path) -> list[Path]:
        """Return what is in `folder` and not synced yet; the name of `folder` itself does not count."""
        return [each for each in (*self.unsynced, *(name[2] for name in self.names)) if folder in each.parents]

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self.unsynced.remove(self.files[fd])

    def sync_folder(self, path: Path) -> None:
        super().sync_folder(path)
        self.names = [each for each in self.names if each[2].parent != path]

    def lose(self) -> None:
        """Change the files to what the machine finds after the power cut."""
        for path in self.unsynced:
            if path.exists():
                path.write_bytes(b"")
        for kind, old, new in reversed(self.names):
            if kind == "rename" and new.exists():
                new.rename(old)
            elif kind == "file":
                old.unlink(missing_ok=True)
            elif kind == "folder":
                shutil.rmtree(old, ignore_errors=True)
