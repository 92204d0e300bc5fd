"""The places that hold states of a run: the memory of its nodes, their disks, and an object store."""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from trimaran.checkpoint.disk_source import DiskSource
from trimaran.checkpoint.durable import DurableDisk
from trimaran.checkpoint.fetch_copies import CopyFetcher, CopyFinder
from trimaran.checkpoint.file_parts import num_io_threads
from trimaran.checkpoint.load_state import PartLoader, fill_matched, has_parts, match_shards
from trimaran.checkpoint.manifest import MANIFEST, DamagedError, Manifest, read_manifest
from trimaran.checkpoint.memory_copies import RankMemory
from trimaran.checkpoint.rank_layout import RankLayout, barrier
from trimaran.checkpoint.step_dirs import complete_steps, refuse, step_path
from trimaran.checkpoint.verify_checkpoint import verify
from trimaran.core import Recipe, UserError, fixed_field_changes, parse_recipe
from trimaran.parallel.comm.json_exchange import all_gather_json, broadcast_json
from trimaran.parallel.tensor_shards import CheckpointSource, CheckpointState, TensorShard
from trimaran.train.checkpointing.inputs import Base

if TYPE_CHECKING:
    from trimaran.checkpoint.store.store_fetch import StoreFetcher

log = logging.getLogger(__name__)

TierName = Literal["memory", "disk", "store"]
Report = Callable[[], None]
"""Is called after each chunk that was verified and each tensor that was read."""


class OpenedState:
    """A saved state and the shards to fill from it. `incarnation` is that of the memory slots that hold it."""

    def __init__(
        self,
        source: CheckpointSource,
        shards: Sequence[TensorShard],
        *,
        num_threads: int,
        incarnation: tuple[int, int] | None = None,
    ) -> None:
        self.source, self.shards, self.incarnation = source, shards, incarnation
        self._num_threads = num_threads

    def fill(self, report_progress: Report) -> str:
        """Fill the shards, and return the damage that was found, or an empty text. Every rank must call it."""
        matched = match_shards(self.shards, self.source)
        fill_matched(matched, self.source, report_progress, num_threads=self._num_threads)
        return ""


class Tier(Protocol):
    """A place that holds states. Every rank makes the same calls, and gets the same answers."""

    name: TierName

    def next_step(self) -> int | None:
        """Return the step of the next state to try, or None after the last one."""
        ...

    def open(self, report_progress: Report) -> OpenedState | str:
        """Open that state, and return it, or why it cannot be used. In both cases it is not offered again."""
        ...


class MemoryTier:
    """The complete copies in the memory of the nodes, of at most `newest` steps.

    `reported` is the last step with metrics. Metrics are written one step late, so a kill may lose those of the last
    copy: an older copy is preferred then, so that the step is computed again and its metrics are written.
    """

    name: TierName = "memory"

    def __init__(
        self,
        state: CheckpointState,
        memories: Sequence[RankMemory],
        rank_layout: RankLayout,
        base: Base,
        *,
        newest: int,
        reported: int,
    ) -> None:
        self._state, self._rank_layout, self._base = state, rank_layout, base
        self._finder = CopyFinder(memories, rank_layout)
        keys = [key for key in self._finder.complete_copies() if key[1] <= newest]
        self._keys = sorted(keys, key=lambda key: key[1] > reported)  # a stable sort

    def next_step(self) -> int | None:
        return self._keys[0][1] if self._keys else None

    def open(self, report_progress: Report) -> OpenedState | str:
        key = self._keys.pop(0)
        copies = self._finder.verify(key)
        if copies is None:
            return "a copy in memory does not match its checksum"
        fetcher = CopyFetcher(self._finder, copies, self._rank_layout)
        shards = self._state.shards_from(fetcher.index)
        source = fetcher.fetch(shards)
        if not self._base.is_named_in(source.progress):
            return "the base of the adapter had not been hashed when this copy was made"
        threads = num_io_threads(self._rank_layout.local_size)
        return OpenedState(source, shards, num_threads=threads, incarnation=key[0])


class DiskTier:
    """The checkpoints in `folder`, of at most `newest` steps. Damaged ones are renamed.

    `recipe` is compared with that of each checkpoint. `own_disk`: every node has its own files in its own `folder`, see
    `open_on_nodes`; for files that no node has, there are the copies in `memory` and the store (`fetcher`).
    """

    name: TierName = "disk"

    def __init__(
        self,
        state: CheckpointState,
        folder: Path,
        rank_layout: RankLayout,
        recipe: Recipe,
        memory: Tier,
        *,
        newest: int,
        own_disk: bool = False,
        fetcher: "StoreFetcher | None" = None,
    ) -> None:
        self.state, self.folder, self.rank_layout, self.recipe = state, folder, rank_layout, recipe
        self.memory, self.own_disk, self.fetcher = memory, own_disk, fetcher
        self.num_threads = num_io_threads(rank_layout.local_size)
        found = broadcast_json(complete_steps(folder) if rank_layout.rank == 0 else [])
        self.steps = sorted(step for step in found if step <= newest)

    def next_step(self) -> int | None:
        return self.steps[-1] if self.steps else None

    def open(self, report_progress: Report) -> OpenedState | str:
        return self.open_folder(step_path(self.folder, self.steps.pop()), report_progress)

    def open_folder(self, path: Path, report_progress: Report) -> OpenedState | str:
        """Return the state of a checkpoint, or why it cannot be used. Each rank verifies some of the files.

        Files with parts are verified as they are read, see `StateOnDisk.fill`.
        """
        manifest, damages = manifest_of(path)
        if broadcast_json(manifest is not None and (self.own_disk or bool(manifest.nodes))):  # as rank 0 has it
            from trimaran.train.checkpointing.node_disks import open_on_nodes  # noqa: PLC0415  few runs have several

            return open_on_nodes(self, path, report_progress)
        layout = self.rank_layout
        files = sorted(manifest.files)[layout.rank :: layout.world_size] if manifest is not None else []
        if manifest is not None:
            damages = self.verify(path, manifest, files, report_progress)
        if why := self.refuse_damaged(path, damages):
            return why
        assert manifest is not None
        self.refuse_other_recipe(manifest)
        source = DiskSource(path)
        return StateOnDisk(self, source, self.state.shards_from(source.index), files)

    def verify(self, path: Path, manifest: Manifest, files: Sequence[str], report_progress: Report) -> list[str]:
        """Return the damage that this rank finds in these files, except those with parts."""
        whole = [name for name in files if not has_parts(manifest.files[name])]
        found = verify(path, files=whole, report_progress=report_progress, num_threads=self.num_threads)
        return [str(damage) for damage in found]

    def refuse_damaged(self, path: Path, damages: list[str]) -> str:
        """Rename a checkpoint if a rank found damage, and return what all found; an empty text if it is intact."""
        all_damages = sorted({each for row in all_gather_json(damages) for each in row})
        if not all_damages:
            return ""
        layout = self.rank_layout
        if layout.rank == (layout.node if self.own_disk else 0) and path.exists():
            with suppress(OSError):  # on a read-only disk it is skipped without being renamed
                refuse(path, "; ".join(all_damages), DurableDisk())
        barrier()  # no rank continues before this one is renamed
        return "; ".join(all_damages)

    def refuse_other_recipe(self, manifest: Manifest) -> None:
        """Raise UserError if the checkpoint is from a run whose fixed fields differ. An imported one has no recipe."""
        if manifest.recipe:
            path = step_path(self.folder, manifest.step)
            changed = fixed_field_changes(parse_recipe(manifest.recipe, name=str(path)), self.recipe)
            for name, (saved, wanted) in changed.items():
                what = f"this checkpoint is from a run with {name}={saved}, this run has {wanted}"
                raise UserError("K041", what, where=str(path), fix=f"use the same {name}, or a new run directory")


class StateOnDisk(OpenedState):
    """The state of a checkpoint on disk. `files` are those that this rank verifies."""

    def __init__(self, tier: DiskTier, source: DiskSource, shards: Sequence[TensorShard], files: Sequence[str]) -> None:
        super().__init__(source, shards, num_threads=tier.num_threads)
        self._tier, self._disk_source, self._files = tier, source, files

    def fill(self, report_progress: Report) -> str:
        """See `OpenedState.fill`. Files with parts are read once, to verify and to fill."""
        source = self._disk_source
        if not any(map(has_parts, source.manifest.files.values())):
            return super().fill(report_progress)
        loader = PartLoader(source, match_shards(self.shards, source))
        damages = loader.run(self._files, report_progress, num_threads=self._num_threads)
        if why := self._tier.refuse_damaged(source.path, [str(damage) for damage in damages]):
            return why
        fill_matched(loader.rest, source, report_progress, num_threads=self._num_threads)
        return ""


class StoreTier:
    """The checkpoints in the object store, of at most `newest` steps. They are fetched to disk, and opened there."""

    name: TierName = "store"

    def __init__(self, fetcher: "StoreFetcher", folder: Path, disk: DiskTier, memory: Tier, *, newest: int) -> None:
        self._fetcher, self._folder, self._disk, self._memory, self._newest = fetcher, folder, disk, memory, newest
        self._taken = set[int]()

    def next_step(self) -> int | None:
        """See `Tier.next_step`. A restart from memory does not wait for the store."""
        if self._memory.next_step() is not None:
            return None
        steps = {step for step in self._fetcher.names() if step <= self._newest}
        return max(steps - self._taken, default=None)

    def open(self, report_progress: Report) -> OpenedState | str:
        step = self.next_step()
        assert step is not None
        self._taken.add(step)
        if why := self._fetcher.fetch(step, report_progress):
            return why
        return self._disk.open_folder(step_path(self._folder, step), report_progress)


def manifest_of(path: Path) -> tuple[Manifest | None, list[str]]:
    """Return the manifest of a checkpoint, or None and what is wrong with it."""
    try:
        return read_manifest(path), []
    except DamagedError as error:
        return None, [str(damage) for damage in error.damages]
    except UserError:
        if (path / MANIFEST).exists():  # a later format, not damage
            raise
        return None, [f"{MANIFEST} is missing"]
