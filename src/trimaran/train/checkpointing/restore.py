"""Restores the newest intact state, from memory or disk, the same on all ranks."""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trimaran.checkpoint.checkpoint_list import list_checkpoints
from trimaran.checkpoint.disk_source import DiskSource
from trimaran.checkpoint.durable import DurableDisk
from trimaran.checkpoint.fetch_copies import CopyFetcher
from trimaran.checkpoint.fetch_files import (
    gather_held,
    gather_needed,
    plan_transfers,
    share_manifest,
    transfer_files,
)
from trimaran.checkpoint.file_parts import num_io_threads
from trimaran.checkpoint.find_copies import CopyFinder, CopyKey
from trimaran.checkpoint.load_parts import PartLoader, has_parts
from trimaran.checkpoint.load_state import fill_matched, match_shards, refuse_unused_tensors
from trimaran.checkpoint.manifest import INDEX, MANIFEST, DamagedError, FileRecord, Manifest, read_manifest
from trimaran.checkpoint.node_files import MissingFilesError, missing_files_error, nodes_of
from trimaran.checkpoint.rank_layout import RankLayout, barrier
from trimaran.checkpoint.step_dirs import complete_steps, refuse, step_path
from trimaran.checkpoint.tensor_shards import CheckpointSource, CheckpointState, TensorShard
from trimaran.checkpoint.verify_checkpoint import verify
from trimaran.core import Recipe, UserError, fixed_field_changes, parse_recipe
from trimaran.parallel.comm.json_exchange import all_gather_int64, all_gather_json, broadcast_json
from trimaran.run import JsonlFollower, RunDirectory
from trimaran.train.checkpointing.training_state import MAY_BE_UNUSED

if TYPE_CHECKING:
    from trimaran.checkpoint.store_fetch import StoreFetcher
    from trimaran.train.checkpointing.base_hashing import BaseHashing

log = logging.getLogger(__name__)

Tier = Literal["memory", "disk", "store"]
MAX_NAMED_CHECKPOINTS = 5
Loading = tuple[CheckpointSource, Sequence[TensorShard]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredState:
    """The state that was restored; none if `tier` is None. `refused` lists what could not be used, and why.

    `incarnation` is that of the memory slots that hold the same state. `store_failed` says why the object store was not
    asked.
    """

    step: int = 0
    tier: Tier | None = None
    incarnation: tuple[int, int] | None = None
    refused: list[dict[str, Any]] = field(default_factory=list)
    store_failed: str = ""


def refuse_new_start(run: RunDirectory, rank_layout: RankLayout, *, newest: int) -> None:
    """Raise UserError if `run` has had checkpoints but none can be restored: it would silently start from step 0.

    Every rank must call it if no state of at most `newest` steps was found; rank 0 checks for all. A run that died
    before its first checkpoint may start over.
    """
    why = broadcast_json(_lost_checkpoints(run, newest) if rank_layout.rank == 0 else "")
    if why:
        raise _no_checkpoint(why, run.checkpoints)


def _no_checkpoint(why: str, folder: Path) -> UserError:
    return UserError("K047", f"this run cannot resume from any of its checkpoints: {why}", where=str(folder),
                     fix="list them with `trimaran checkpoints RUN` and restore one, or start over in another folder: "
                     "--run-dir DIR")  # fmt: skip


def _lost_checkpoints(run: RunDirectory, newest: int) -> str:
    """Return why the checkpoints that were written cannot be used; an empty text if none was ever written."""
    found = [f"step {row.step}: {row.why or f'it is later than train.steps={newest}'}" for row in
             list_checkpoints(run.checkpoints)]  # fmt: skip
    if found:
        more = f"; and {len(found) - MAX_NAMED_CHECKPOINTS} more" if len(found) > MAX_NAMED_CHECKPOINTS else ""
        return "; ".join(found[::-1][:MAX_NAMED_CHECKPOINTS]) + more
    events = JsonlFollower(run.events(0)).new()
    written = [each["step"] for each in events if each["kind"] == "checkpoint" and not each["data"].get("failed")]
    return f"that of step {max(written)} was written and has been removed" if written else ""


class Restorer:
    """Finds and loads the newest state of a run. Every rank has one, and all make the same calls together."""

    def __init__(
        self,
        state: CheckpointState,
        folder: Path,
        rank_layout: RankLayout,
        recipe: Recipe,
        *,
        data: str = "",
        base: "BaseHashing | None" = None,
        own_disk: bool = False,
        open_store: "Callable[[], StoreFetcher] | None" = None,
    ) -> None:
        """`data` is the digest of the training data, see `TokenShards.digest`, `base` that of an adapter's base.

        Without them they are not compared. `own_disk`: every node has its own files in its own `folder`. `open_store`
        returns the checkpoints in the run's object store.
        """
        self._own_disk, self._open_store = own_disk, open_store
        self._fetcher: StoreFetcher | None = None
        self._node_files: list[str] | None = None  # those that this rank verifies, if not every node has all
        self._state, self._folder, self._rank_layout = state, folder, rank_layout
        self._recipe, self._data, self._base = recipe, data, base
        self._num_threads, self._is_partly_filled = num_io_threads(rank_layout.local_size), False

    def load(
        self,
        finder: CopyFinder,
        *,
        newest: int,
        reported: int = 0,
        report_progress: Callable[[], None] = lambda: None,
    ) -> RestoredState:
        """Load the newest verified state of at most `newest` steps.

        Damaged states are skipped, and renamed if they are on disk. `reported` is the last step with metrics, as rank 0
        knows it. Metrics are written one step late, so a kill may lose those of the last copy: an older copy in memory
        is preferred then, so that the step is computed again and its metrics are written. `report_progress` is called
        after each chunk that was verified and each tensor that was read. Raises UserError if there is none but a
        damaged one has overwritten some of the state.
        """
        self._fetcher = self._open_store() if self._open_store else None
        try:
            return self._load_newest(finder, newest, reported, report_progress)
        finally:
            if self._fetcher is not None:
                self._fetcher.close()

    def _load_newest(
        self, finder: CopyFinder, newest: int, reported: int, report_progress: Callable[[], None]
    ) -> RestoredState:
        saved_steps, reported = broadcast_json(
            [complete_steps(self._folder), reported] if self._rank_layout.rank == 0 else []
        )
        in_memory = [key for key in finder.complete_copies() if key[1] <= newest]
        in_memory.sort(key=lambda key: key[1] > reported)  # a stable sort
        on_disk, in_store = {step for step in saved_steps if step <= newest}, set[int]()
        refused: list[dict[str, Any]] = []
        is_asked = self._fetcher is None
        while True:
            if not is_asked and not in_memory:  # a restart from memory does not wait for the store
                in_store, is_asked = {step for step in self._names_in_store() if step <= newest}, True
            if not (in_memory or on_disk or in_store):
                break
            last_saved = max(on_disk | in_store, default=0)
            tier: Tier = "disk" if last_saved in on_disk else "store"
            incarnation, step = None, last_saved
            if in_memory and in_memory[0][1] >= last_saved:
                tier = "memory"
                incarnation, step, _ = in_memory[0]
                loading = self._from_memory(finder, in_memory.pop(0))
            elif tier == "disk":
                on_disk.remove(step)
                loading = self._from_disk_or_older(step, on_disk, report_progress, has_copies=bool(in_memory))
            else:
                in_store.remove(step)
                loading = self._from_store(step, report_progress)
            why = loading if isinstance(loading, str) else self._load(*loading, report_progress)
            failed = self._fetcher.failed if self._fetcher else ""
            if not why:
                return RestoredState(
                    step=step, tier=tier, incarnation=incarnation, refused=refused, store_failed=failed
                )
            refused.append({"tier": tier, "step": step, "why": why})
            log.warning("the state of step %d (%s) is skipped: %s", step, tier, why)
        if self._own_disk and not refused and not reported:
            self._refuse_lost_head()
        if self._is_partly_filled or any(each["tier"] == "store" for each in refused):
            raise _no_checkpoint("; ".join(f"step {each['step']}: {each['why']}" for each in refused), self._folder)
        return RestoredState(refused=refused)

    def _from_disk_or_older(
        self, step: int, older: set[int], report_progress: Callable[[], None], *, has_copies: bool
    ) -> Loading | str:
        """See `_from_memory`. Raises if files are on nodes that are not here, unless there are copies in memory."""
        try:
            return self._from_disk(step_path(self._folder, step), report_progress)
        except MissingFilesError as error:
            if has_copies:
                return error.what
            raise self._name_complete_step(error, step, sorted(older, reverse=True)) from None

    def _names_in_store(self) -> dict[int, str]:
        return self._fetcher.names() if self._fetcher else {}

    def _from_store(self, step: int, report_progress: Callable[[], None]) -> Loading | str:
        """See `_from_memory`. The checkpoint is put on the disk, and loaded from there."""
        assert self._fetcher is not None
        if why := self._fetcher.fetch(step, report_progress):
            return why
        return self._from_disk(step_path(self._folder, step), report_progress)

    def _from_memory(self, finder: CopyFinder, key: CopyKey) -> Loading | str:
        """Return the source and the shards to fill from it, or why it cannot be used."""
        copies = finder.verify(key)
        if copies is None:
            return "a copy in memory does not match its checksum"
        fetcher = CopyFetcher(finder, copies, self._rank_layout)
        shards = self._state.shards_from(fetcher.index)
        source = fetcher.fetch(shards)
        if self._base is not None and not broadcast_json(source.progress.get("base")):
            return "the base of the adapter had not been hashed when this copy was made"
        return source, shards

    def _from_disk(self, path: Path, report_progress: Callable[[], None]) -> Loading | str:
        """See `_from_memory`. Each rank verifies some of the files; if one is damaged, all skip the checkpoint.

        Files with parts are verified by `_fill`, which reads them.
        """
        manifest, damages = _read_manifest(path)
        self._node_files = None
        if broadcast_json(manifest is not None and (self._own_disk or bool(manifest.nodes))):  # as rank 0 has it
            return self._from_node_disks(path, report_progress)
        if manifest is not None:
            whole = [name for name in self._my_files(manifest) if not has_parts(manifest.files[name])]
            found = verify(path, files=whole, report_progress=report_progress, num_threads=self._num_threads)
            damages = [str(damage) for damage in found]
        if why := self._refuse_damaged(path, damages):
            return why
        assert manifest is not None
        _refuse_other_recipe(manifest, self._recipe, path)
        source = DiskSource(path)
        return source, self._state.shards_from(source.index)

    def _from_node_disks(self, path: Path, report_progress: Callable[[], None]) -> Loading | str:
        """See `_from_disk`. First every node gets the files that its ranks need and that only other nodes have.

        Raises MissingFilesError if no node has a file that is needed.
        """
        layout = self._rank_layout
        if not share_manifest(path, layout):
            return f"{MANIFEST} cannot be written on all nodes"
        source = DiskSource(path)
        manifest = source.manifest
        _refuse_other_recipe(manifest, self._recipe, path)
        shards = self._state.shards_from(source.index)
        needed = gather_needed(manifest, match_shards(shards, source), layout)
        transfers, missing = plan_transfers(gather_held(path, manifest, layout), needed)
        if missing and self._fetcher is not None and self._fetcher.has(manifest.step, path):
            wanted = {node: names & missing for node, names in needed.items()}
            if why := self._fetcher.fetch_files(path, manifest, wanted, report_progress):
                return why
            missing = set[str]()
        if missing:
            raise missing_files_error(path, manifest.step, nodes_of(manifest, missing))
        failed = transfer_files(path, manifest, transfers, layout, report_progress)
        local = [rank for rank, node in enumerate(layout.nodes) if node == layout.node]
        self._node_files = sorted(needed[layout.node])[local.index(layout.rank) :: len(local)]
        whole = [name for name in self._node_files if not has_parts(manifest.files[name])]
        found = verify(path, files=whole, report_progress=report_progress, num_threads=self._num_threads)
        if why := self._refuse_damaged(path, [str(damage) for damage in found] + ([failed] if failed else [])):
            return why
        return source, shards

    def _refuse_lost_head(self) -> None:
        """Raise if other nodes have checkpoints of this run, but the head has neither checkpoints nor metrics."""
        steps = sorted({step for row in all_gather_json(complete_steps(self._folder)) for step in row})
        if steps:
            what = f"the head has no checkpoint of this run, and other nodes have files of step {steps[-1]}"
            raise UserError("L025", what, where=str(self._folder),
                            fix="start the head with the disk that it had, or use another run directory")  # fmt: skip

    def _name_complete_step(self, error: MissingFilesError, step: int, older: list[int]) -> UserError:
        """Return the error with the newest step whose files are all on the nodes that are here."""
        complete: list[int] = []
        for each in older:
            path = step_path(self._folder, each)
            files = _read_manifest(path)[0] if self._rank_layout.rank == 0 else None
            sizes = broadcast_json({name: record.bytes for name, record in files.files.items()} if files else {})
            manifest = Manifest(step=each, files={name: FileRecord(size) for name, size in sizes.items()})
            held = gather_held(path, manifest, self._rank_layout)
            if sizes and set[str]().union(*held.values()) == sizes.keys() - {INDEX}:
                complete = [each]
                break
        return missing_files_error(step_path(self._folder, step), step, error.missing, complete=complete)

    def _my_files(self, manifest: Manifest) -> list[str]:
        """Return the files that this rank verifies."""
        if self._node_files is not None:
            return self._node_files
        return sorted(manifest.files)[self._rank_layout.rank :: self._rank_layout.world_size]

    def _refuse_damaged(self, path: Path, damages: list[str]) -> str:
        """Rename a checkpoint if a rank found damage, and return what all found; an empty text if it is intact."""
        all_damages = sorted({each for row in all_gather_json(damages) for each in row})
        if not all_damages:
            return ""
        layout = self._rank_layout
        if layout.rank == (layout.node if self._own_disk else 0) and path.exists():
            with suppress(OSError):  # on a read-only disk it is skipped without being renamed
                refuse(path, "; ".join(all_damages), DurableDisk())
        barrier()  # no rank continues before this one is renamed
        return "; ".join(all_damages)

    def _load(
        self, source: CheckpointSource, shards: Sequence[TensorShard], report_progress: Callable[[], None]
    ) -> str:
        """Fill the state, and return why it cannot be used; an empty text if it is complete."""
        _refuse_other_data(source.progress.get("data"), self._data, self._folder)
        if self._base is not None:
            _refuse_other_base(source, self._base, f"model.path ({self._recipe.model.path})", report_progress)
        if why := self._fill(source, shards, report_progress):
            return why
        refuse_unused_tensors(shards, source, gather=all_gather_int64, allowed=MAY_BE_UNUSED)
        self._state.restore(source.progress)
        barrier()  # no rank may overwrite memory that others still read
        return ""

    def _fill(
        self, source: CheckpointSource, shards: Sequence[TensorShard], report_progress: Callable[[], None]
    ) -> str:
        """Fill the shards, and return what is damaged. Files with parts are read once, to verify and to fill."""
        matched = match_shards(shards, source)
        if isinstance(source, DiskSource) and any(map(has_parts, source.manifest.files.values())):
            loader = PartLoader(source, matched)
            damages = loader.run(self._my_files(source.manifest), report_progress, num_threads=self._num_threads)
            self._is_partly_filled = True
            if why := self._refuse_damaged(source.path, [str(damage) for damage in damages]):
                return why
            matched = loader.rest
        fill_matched(matched, source, report_progress, num_threads=self._num_threads)
        self._is_partly_filled = False
        return ""


def _read_manifest(path: Path) -> tuple[Manifest | None, list[str]]:
    try:
        return read_manifest(path), []
    except DamagedError as error:
        return None, [str(damage) for damage in error.damages]
    except UserError:
        if (path / MANIFEST).exists():  # a later format, not damage
            raise
        return None, [f"{MANIFEST} is missing"]


def _refuse_other_recipe(manifest: Manifest, recipe: Recipe, path: Path) -> None:
    if not manifest.recipe:
        return  # an imported checkpoint
    changed = fixed_field_changes(parse_recipe(manifest.recipe, name=str(path)), recipe)
    for name, (saved, wanted) in changed.items():
        what = f"this checkpoint is from a run with {name}={saved}, this run has {wanted}"
        raise UserError("K041", what, where=str(path), fix=f"use the same {name}, or a new run directory")


def _refuse_other_base(
    source: CheckpointSource, base: "BaseHashing", where: str, report_progress: Callable[[], None]
) -> None:
    """Raise UserError if the adapter was trained on another base. Every rank must call it; rank 0 decides for all."""
    from trimaran.models.base_digest import base_difference, changed_base  # noqa: PLC0415  few runs have a base

    saved = broadcast_json(source.progress.get("base"))
    now = base.wait_unchanged(report_progress)
    if saved and (difference := base_difference(saved, now)):
        raise changed_base(where, difference)


def _refuse_other_data(saved: str | None, wanted: str, folder: Path) -> None:
    """Raise UserError if the digest of the data has changed since the state was saved."""
    if saved and wanted and saved != wanted:
        what = f"the data has changed: its digest was {saved[:12]} and is {wanted[:12]} now"
        raise UserError("K041", what, where=f"data ({folder})",
                        fix="restore the original data, or start a new run: --run-dir DIR")  # fmt: skip
