"""Small states on simulated ranks, and disks that break: what the tests of checkpoints are made of."""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Barrier, Condition, Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimaran.checkpoint.disk_source import DiskSource
from trimaran.checkpoint.durable import DurableDisk
from trimaran.checkpoint.load_state import fill
from trimaran.checkpoint.manifest import Manifest
from trimaran.checkpoint.ownership import own
from trimaran.checkpoint.rank_share import RankShare, copy_in, lay_out
from trimaran.checkpoint.step_dirs import draft_path, step_path
from trimaran.checkpoint.tensor_shards import TensorShard
from trimaran.checkpoint.write_checkpoint import commit, write_share

ABOUT = Manifest(step=0, time=1.5, term=3, world_size=2, plan={"mesh": {"dp_shard": 2}}, recipe="name: x\n")


class Quick(DurableDisk):
    """A disk that keeps nothing over a power cut, for tests that do not cut it."""

    def sync(self, fd: int) -> None:
        pass

    def sync_folder(self, path: Path) -> None:
        pass


def on_ranks(world_size: int, function: Callable[..., Any]) -> list[Any]:
    """Return what `function(rank, gather)` answers on each of `world_size` ranks, which are threads."""
    lines: list[Any] = [None] * world_size
    answers: list[Any] = [None] * world_size
    barrier = Barrier(world_size, timeout=60)

    def work(rank: int) -> None:
        def gather(line: np.ndarray) -> np.ndarray:
            lines[rank] = line
            barrier.wait()
            matrix = np.stack(lines)
            barrier.wait()
            return matrix

        try:
            answers[rank] = function(rank, gather)
        except BaseException as error:
            answers[rank] = error

    threads = [Thread(target=work, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


class Board:
    """A `Post` within one process."""

    def __init__(self) -> None:
        self.said: dict[str, str] = {}
        self._changed = Condition()

    def tell(self, key: str, text: str) -> None:
        with self._changed:
            self.said[key] = text
            self._changed.notify_all()

    def hear(self, keys: Sequence[str], seconds: float) -> list[str]:
        with self._changed:
            if not self._changed.wait_for(lambda: all(key in self.said for key in keys), min(seconds, 30)):
                raise TimeoutError(", ".join(key for key in keys if key not in self.said))
            return [self.said[key] for key in keys]


def rows_of(tensors: dict[str, Tensor], rank: int, world_size: int, *, frozen: str = "frozen") -> list[TensorShard]:
    """Return what a rank holds when dimension 0 is split as evenly as it goes; scalars are everywhere."""
    pieces = []
    for key, tensor in tensors.items():
        first, end = 0, 0
        if tensor.ndim:
            first, end = (tensor.shape[0] * each // world_size for each in (rank, rank + 1))
        held = tensor[first:end].clone() if tensor.ndim else tensor.clone()
        start = (first, *(0 for _ in tensor.shape[1:])) if tensor.ndim else ()
        pieces.append(TensorShard(key=key, tensor=held, shape=tuple(tensor.shape), start=start, frozen=frozen in key))
    return pieces


def staged(pieces: Sequence[TensorShard], rank: int, world_size: int, gather: Any) -> tuple[RankShare, memoryview]:
    """Return the share of a rank and the memory that it has been copied to."""
    share = lay_out(pieces, own(pieces, rank=rank, world_size=world_size, gather=gather))
    memory = torch.zeros(share.num_bytes, dtype=torch.uint8)
    copy_in(share, pieces, memory)
    return share, memoryview(memory.numpy())


def tensors_of(step: int) -> dict[str, Tensor]:
    """Return a whole state, another one for every step but for what is frozen in it."""
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


def keep(
    folder: Path, step: int, *, world_size: int = 2, previous: Path | None = None, disk: DurableDisk | None = None
) -> list[Any]:
    """Write the checkpoint of `step` as `world_size` ranks would, one after the other, and return the receipts."""
    shares = on_ranks(world_size, lambda rank, gather: staged(
        rows_of(tensors_of(step), rank, world_size), rank, world_size, gather))  # fmt: skip
    draft, disk = draft_path(folder, step, "abc123"), disk or Quick()
    about = Manifest(step=step, world_size=world_size, progress={"step": step, "loss_scale": 1024.0})
    receipts = [
        write_share(draft, rank, share, memory, previous=previous, disk=disk)
        for rank, (share, memory) in enumerate(shares)
    ]
    commit(draft, step_path(folder, step), receipts, about, disk)
    return receipts


def loads(path: Path, step: int) -> bool:
    """Return whether the checkpoint gives the state of `step`, bit by bit, to three ranks."""
    source = DiskSource(path)
    for rank in range(3):
        wanted = rows_of(tensors_of(step), rank, 3)
        held = [TensorShard(key=each.key, tensor=torch.zeros_like(each.tensor), shape=each.shape, start=each.start)
                for each in wanted]  # fmt: skip
        fill(held, source)
        if not all(torch.equal(a.tensor, b.tensor) for a, b in zip(held, wanted, strict=True)):
            return False
    return source.step == step and source.progress["step"] == step


class Crash(BaseException):
    """The process is killed here."""


CALLS = ("make_folder", "create", "write", "sync", "sync_folder", "link", "rename", "remove", "remove_folder")


class Fragile(Quick):
    """A disk at whose n-th call, from 0, the process dies; half of what it was writing is there."""

    def __init__(self, fuse: int = -1) -> None:
        self.fuse, self.done = fuse, []

    def burn(self, name: str, *args: Any) -> None:
        if len(self.done) == self.fuse:
            if name == "write":
                fd, data = args
                os.write(fd, data[: len(data) // 2])
            raise Crash(name)
        self.done.append(name)


def _through(name: str) -> Callable[..., Any]:
    def call(self: Fragile, *args: Any) -> Any:
        self.burn(name, *args)
        return getattr(Quick, name)(self, *args)

    return call


for _name in CALLS:
    setattr(Fragile, _name, _through(_name))


class Unplugged(Fragile):
    """A disk that loses, when the power goes at the n-th call, everything that it had not been told to sync."""

    def __init__(self, fuse: int = -1) -> None:
        super().__init__(fuse)
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
        """Return what is not on the disk yet and lies in `folder`, whose own name is another matter."""
        return [each for each in (*self.unsynced, *(name[2] for name in self.names)) if folder in each.parents]

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self.unsynced.remove(self.files[fd])

    def sync_folder(self, path: Path) -> None:
        super().sync_folder(path)
        self.names = [each for each in self.names if each[2].parent != path]

    def lose(self) -> None:
        """Make of the folder what a machine finds when it comes back."""
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
