"""The places that hold states of a run (memory, disks, an object store), and restoring the newest intact state."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from trimaran.checkpoint import (
    MANIFEST,
    DamagedError,
    DiskSource,
    DurableDisk,
    Manifest,
    PartLoader,
    RankLayout,
    RankMemory,
    barrier,
    complete_steps,
    fill_matched,
    match_shards,
    read_manifest,
    refuse,
    refuse_unused_tensors,
    step_path,
    verify,
)
from trimaran.checkpoint.checkpoint_list import list_checkpoints
from trimaran.checkpoint.file_parts import num_io_threads
from trimaran.checkpoint.load_state import has_parts
from trimaran.checkpoint.peer_copies import CopyFetcher, CopyFinder
from trimaran.checkpoint.rank_layout import exchange_rank_layout
from trimaran.core import ModelSection, Plan, Recipe, UserError, fixed_field_changes, parse_recipe
from trimaran.models import model_folder
from trimaran.nets import Network
from trimaran.parallel import (
    CheckpointSource,
    CheckpointState,
    TensorShard,
    all_gather_int64,
    all_gather_json,
    broadcast_json,
)
from trimaran.runs import Journal, RunDirectory, read_json_lines
from trimaran.train.checkpointing.training_state import MAY_BE_UNUSED
from trimaran.train.process.rank_setup import RankInfo
from trimaran.train.process.supervisor_link import SupervisorLink

if TYPE_CHECKING:
    from trimaran.checkpoint.store.store_uploads import StoreFetcher


class Base:
    """The base of an adapter, of which checkpoints hold a digest: here none. `is_apart`: it is not in checkpoints."""

    is_apart = False

    def known(self) -> dict[str, Any]:
        """Return the fields that name the base in a copy of the state; none while it is being hashed."""
        return {}

    def name(self) -> dict[str, Any]:
        """Return these fields once the base is hashed. Raises UserError if a file has changed since the start."""
        return {}

    def is_named_in(self, progress: Mapping[str, Any]) -> bool:
        """Return whether a saved state names its base. Every rank must call it; rank 0 decides for all."""
        return True

    def refuse_other(self, progress: Mapping[str, Any], report_progress: Callable[[], None]) -> None:
        """Raise UserError if a saved state names another base. Every rank must call it; rank 0 decides for all."""

    def reload(self) -> None:
        """Read the base again, in place."""

    def model_writer(
        self, section: ModelSection, network: Network, report_progress: Callable[[], None]
    ) -> Callable[..., None]:
        """Return what writes the trained model; its arguments are those of `save_network`."""
        from trimaran.checkpoint.convert.export_hf import save_network  # noqa: PLC0415  nothing needs it before the end

        return partial(save_network, origin=model_folder(section.path) if section.path else None)

    def of_networks(self, reload: Callable[[], None]) -> "Base":
        """Return the same base for other networks, which `reload` reads it into."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInputs:
    """A rank of a run, and its state. A state is restored only with the same `data` (a digest) and base."""

    run: RunDirectory
    rank_info: RankInfo
    journal: Journal
    link: SupervisorLink
    state: CheckpointState
    recipe: Recipe
    plan: Plan
    data: str = ""
    base: Base = field(default_factory=Base)

    def progress(self) -> dict[str, Any]:
        data = {"data": self.data} if self.data else {}
        return {**self.state.progress(), **data, **self.base.known()}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemories:
    """The memory for copies that this rank can read, by local rank, and its own.

    `layout` says which ranks are on which node; `shared_layout` says which can read each other's memory. The supervisor
    owns the memory of a node. Without one, `shared_layout` has each rank on a node of its own.
    """

    layout: RankLayout
    shared_layout: RankLayout
    readable: tuple[RankMemory, ...]
    mine: RankMemory
    outlive_ranks: bool

    def read_again(self) -> "RankMemories":
        """Return the memories with the slots that other ranks have made in theirs meanwhile."""
        memories = tuple(RankMemory(each.fd) for each in self.readable)
        return replace(self, readable=memories, mine=memories[self.readable.index(self.mine)])


def find_memories(inputs: CheckpointInputs) -> RankMemories:
    """Return the memories of this rank's node. Every rank must call it."""
    rank, link = inputs.rank_info.rank, inputs.link
    layout = exchange_rank_layout(rank, inputs.rank_info.local_rank)
    if link.rank_memories:
        memories = tuple(RankMemory(fd) for fd in link.rank_memories)
        mine = memories[link.local_rank]
        return RankMemories(layout=layout, shared_layout=layout, readable=memories, mine=mine, outlive_ranks=True)
    mine = RankMemory(os.memfd_create("trimaran-rank-memory"))
    alone = RankLayout(rank=rank, local_rank=0, nodes=tuple(range(layout.world_size)))
    return RankMemories(layout=layout, shared_layout=alone, readable=(mine,), mine=mine, outlive_ranks=False)


@dataclass(slots=True)
class SaveTotals:
    """The cost of saving the state so far. A change of the plan goes on counting."""

    checkpoints: int = 0
    copies: int = 0
    stall_seconds: float = 0.0
    failed: int = 0


log = logging.getLogger(__name__)

TierName = Literal["memory", "disk", "store"]
Report = Callable[[], None]  # is called after each chunk that was verified and each tensor that was read


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

    def open(self, report_progress: Report) -> OpenedState | str:
        """Open that state, and return it, or why it cannot be used. In both cases it is not offered again."""


class MemoryTier:
    """The complete copies in the memory of the nodes, of at most `newest` steps.

    `reported` is the last step with metrics. Metrics are written one step late, so a kill may lose those of the last
    copy. An older copy is preferred then: the step is repeated and its metrics are written.
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
    `open_on_nodes`. Files that no node has come from copies in `memory` and the store (`fetcher`).
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
        """Return a checkpoint's state, or why not. Each rank verifies some files; those with parts as they are read."""
        manifest, damages = manifest_of(path)
        if broadcast_json(manifest is not None and (self.own_disk or bool(manifest.nodes))):  # as rank 0 has it
            from trimaran.train.checkpointing.remote_states import open_on_nodes  # noqa: PLC0415  few runs have several

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
                raise UserError("K041.checkpoint-run", where=str(path), name=name, saved=saved, wanted=wanted)


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


ANY_STEP = 10**17  # no run has as many steps
MAX_NAMED_CHECKPOINTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredState:
    """The state that was restored; none if `tier` is None. `refused` lists what could not be used, and why.

    `incarnation` is that of the memory slots that hold the same state. `store_failed` says why the object store was not
    asked.
    """

    step: int = 0
    tier: TierName | None = None
    incarnation: tuple[int, int] | None = None
    refused: list[dict[str, Any]] = field(default_factory=list)
    store_failed: str = ""


def restore(
    state: CheckpointState,
    tiers: Sequence[Tier],
    folder: Path,
    report_progress: Report,
    *,
    data: str = "",
    base: Base | None = None,
) -> RestoredState:
    """Restore the newest intact state of all tiers; of equal steps, that of the first tier.

    Damaged states are skipped. `data` is the digest of the training data, see `TokenShards.digest`; it and `base` are
    compared with what the state was saved with. `folder` is named in errors. Raises UserError if no state could be
    restored, but a damaged one has overwritten some of `state`.
    """
    base, refused, is_partly_filled = base or Base(), list[dict[str, Any]](), False
    while found := [(step, tier) for tier in tiers if (step := tier.next_step()) is not None]:
        step, tier = max(found, key=lambda each: each[0])
        opened = tier.open(report_progress)
        if isinstance(opened, str):
            why = opened
        else:
            progress = opened.source.progress
            saved = progress.get("data")
            if saved and data and saved != data:
                raise UserError("K041.data-changed-digest", where=f"data ({folder})", saved=saved[:12], data=data[:12])
            base.refuse_other(progress, report_progress)
            why = opened.fill(report_progress)
            if not why:
                refuse_unused_tensors(opened.shards, opened.source, gather=all_gather_int64, allowed=MAY_BE_UNUSED)
                state.restore(progress)
                barrier()  # no rank may overwrite memory that others still read
                return RestoredState(step=step, tier=tier.name, incarnation=opened.incarnation, refused=refused)
            is_partly_filled = True
        refused.append({"tier": tier.name, "step": step, "why": why})
        log.warning("the state of step %d (%s) is skipped: %s", step, tier.name, why)
    if is_partly_filled or any(each["tier"] == "store" for each in refused):
        raise _no_checkpoint("; ".join(f"step {each['step']}: {each['why']}" for each in refused), folder)
    return RestoredState(refused=refused)


def restore_from_disk(state: CheckpointState, folder: Path, rank_layout: RankLayout) -> RestoredState:
    """Restore the newest intact state in a folder of checkpoints, whatever recipe it is of."""
    copies = MemoryTier(state, (), rank_layout, Base(), newest=ANY_STEP, reported=0)
    disk = DiskTier(state, folder, rank_layout, Recipe(), copies, newest=ANY_STEP)
    return restore(state, [disk], folder, lambda: None)


def refuse_new_start(run: RunDirectory, rank_layout: RankLayout, *, newest: int) -> None:
    """Raise UserError if `run` has had checkpoints but none can be restored: it would silently start from step 0.

    Every rank must call it if no state of at most `newest` steps was found; rank 0 checks for all. A run that died
    before its first checkpoint may start over.
    """
    why = ""
    if rank_layout.rank == 0:
        found = [f"step {row.step}: {row.why or f'it is later than train.steps={newest}'}" for row in
                 list_checkpoints(run.checkpoints)]  # fmt: skip
        events = [] if found else read_json_lines(run.events(0))
        written = [each["step"] for each in events if each["kind"] == "checkpoint" and not each["data"].get("failed")]
        if found:
            more = f"; and {len(found) - MAX_NAMED_CHECKPOINTS} more" if len(found) > MAX_NAMED_CHECKPOINTS else ""
            why = "; ".join(found[::-1][:MAX_NAMED_CHECKPOINTS]) + more
        elif written:
            why = f"that of step {max(written)} was written and has been removed"
    if why := broadcast_json(why):
        raise _no_checkpoint(why, run.checkpoints)


def _no_checkpoint(why: str, folder: Path) -> UserError:
    return UserError("K047.run-cannot-resume", where=str(folder), why=why)
