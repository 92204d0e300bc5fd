"""The parts of a checkpointer: slots in memory, the copier that fills them, and the saver that writes them to disk."""

import logging
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist

from trimaran.checkpoint.copier import Copier, DeviceCopier
from trimaran.checkpoint.durable import DurableDisk
from trimaran.checkpoint.manifest import Manifest
from trimaran.checkpoint.memory_budget import choose_budget
from trimaran.checkpoint.memory_copies import RankMemory
from trimaran.checkpoint.ownership import assign_rows
from trimaran.checkpoint.peer_copies import PeerCopies
from trimaran.checkpoint.rank_layout import RankLayout, all_true, can_pair
from trimaran.checkpoint.rank_share import build_share
from trimaran.checkpoint.saver import Saver, SaveRequest, TorchStore
from trimaran.checkpoint.slot_pool import SlotPool
from trimaran.checkpoint.step_dirs import newest_step, remove_drafts
from trimaran.checkpoint.tensor_shards import TensorShard
from trimaran.core import Plan, Recipe, Seconds, UserError, show_bytes
from trimaran.core.regular_files import read_regular_text
from trimaran.parallel.comm.json_exchange import all_gather_int64, all_gather_json, broadcast_json
from trimaran.run import RunDirectory
from trimaran.run.lease import newest_term
from trimaran.train.checkpointing.save_interval import (
    CopySchedule,
    LossBound,
    SaveCost,
    SaveSchedule,
    max_repeated_steps,
)
from trimaran.train.process.rank_info import RankInfo
from trimaran.train.process.supervisor_link import SupervisorLink
from trimaran.train.process.token_store import supervisor_store

if TYPE_CHECKING:
    from trimaran.checkpoint.store_uploads import StoreUploads
    from trimaran.train.checkpointing.base_hashing import BaseHashing

log = logging.getLogger(__name__)

COPY_BYTES_PER_SECOND = 4e9  # guesses, until a checkpoint has been measured
DISK_BYTES_PER_SECOND = 2e8


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointBackend:
    """The parts, connected for one rank's share."""

    slot_pool: SlotPool
    copier: Copier
    peer_copies: PeerCopies | None
    saver: Saver
    save_schedule: SaveSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendInputs:
    """What the parts are built from. Saves wait for `base`."""

    run: RunDirectory
    rank_info: RankInfo
    link: SupervisorLink
    rank_layout: RankLayout
    rank_memory: RankMemory
    recipe: Recipe
    plan: Plan
    base: "BaseHashing | None" = None


def build_backend(
    inputs: BackendInputs,
    shards: Sequence[TensorShard],
    before_discard: Callable[[Saver, Copier], None] = lambda saver, copier: None,
    *,
    is_restart: bool = False,
    replaced: CheckpointBackend | None = None,
) -> CheckpointBackend:
    """Return the parts for this rank's shards. Every rank must call it, after all have restored their state.

    A restart is not refused if the disk has no room for a checkpoint: the next save reports that. `before_discard` is
    called on all ranks if the copies in memory do not fit the new slots and are lost. `replaced` are closed parts of
    another plan of this run, whose uploads go on, and whose pinned memory is used if it fits.
    """
    run, rank_info, link, rank_layout = inputs.run, inputs.rank_info, inputs.link, inputs.rank_layout
    section, rank_memory = inputs.recipe.checkpoint, inputs.rank_memory
    rows = assign_rows(shards, rank=rank_layout.rank, world_size=rank_layout.world_size, gather=all_gather_int64)
    share = build_share(shards, rows)
    copier = Copier(share)
    sizes = all_gather_int64(np.array([share.num_bytes, len(copier.items)], dtype=np.int64))
    if not is_restart and not section.is_off:
        _refuse_small_disk(run, rank_layout, sizes[:, 0], own_disk=bool(link.own_disk))
    # A slot must also hold the share that the partner on the previous node sends.
    sender = rank_layout.rank - rank_layout.local_size if can_pair(rank_layout) else rank_layout.rank
    num_bytes, items_bytes = (int(max(each[rank_layout.rank], each[sender])) for each in sizes.T)
    # Without a supervisor copies do not outlive their rank, but a rewind can use them.
    wants_copies = bool(link.rank_memories) or inputs.recipe.faults.not_finite == "rewind"
    budget = choose_budget(
        section,
        rank_layout,
        slot_bytes=num_bytes,
        rank_memory_bytes=rank_memory.allocated_bytes,
        has_rank_memory=wants_copies,
    )
    saver = _build_saver(inputs, replaced.saver.uploads if replaced else None)
    has_layout = rank_memory.has_layout(budget.num_slots, num_bytes=num_bytes, items_bytes=items_bytes)
    if not all_true(has_layout):
        before_discard(saver, copier)
    before = _with_pinned_memory(replaced.copier, has_layout) if replaced else None
    # A partner may write to the peer slots at any time. Else the memory can be allocated until the first copy.
    on_gpu = rank_info.device.type == "cuda"
    slot_pool = SlotPool(
        rank_memory,
        budget,
        num_bytes=num_bytes,
        items_bytes=items_bytes,
        allocate=not on_gpu or budget.peer_slots > 0,
    )
    log.info("checkpoints: %s in each of %d slots", show_bytes(num_bytes), slot_pool.budget.num_slots)
    if on_gpu and slot_pool.budget.num_slots:
        copier = DeviceCopier(share, rank_memory, rank_info.device, before)
    guess = SaveCost(stall=Seconds(num_bytes / COPY_BYTES_PER_SECOND), write=Seconds(num_bytes / DISK_BYTES_PER_SECOND))
    save_schedule = SaveSchedule(section, world_size=rank_layout.world_size, guess=guess, stride=inputs.plan.sync_every)
    peer_copies = PeerCopies(rank_layout, slot_pool.peer_slots, copier.wait) if slot_pool.peer_slots else None
    return CheckpointBackend(
        slot_pool=slot_pool, copier=copier, peer_copies=peer_copies, saver=saver, save_schedule=save_schedule
    )


def _with_pinned_memory(copier: Copier, has_layout: bool) -> DeviceCopier | None:
    """Return the copier if a new one can use the memory that it has pinned, which takes a second for a gigabyte.

    If not, the memory is released: it is about to be split into other slots.
    """
    if isinstance(copier, DeviceCopier) and has_layout and copier.is_ready:
        return copier
    copier.release()
    return None


def bound_loss(backend: CheckpointBackend, copies: CopySchedule, *, stride: int, has_copies: bool) -> LossBound | None:
    """Return what a fault costs at most; None while that is unknown: no copy or no step is timed.

    `has_copies`: copies outlive their rank.
    """
    step_seconds, every = copies.step_seconds, copies.every if has_copies else 0
    if not step_seconds or (every and not backend.copier.has_committed):
        return None
    node_steps = backend.save_schedule.max_repeated_steps(step_seconds)
    if every and backend.peer_copies is not None:
        round_steps = -(-backend.peer_copies.interval_steps // every) * every
        node_steps = max_repeated_steps(2 * round_steps, stride)
    steps = node_steps
    if every:
        commit_steps = (copies.commit_seconds or backend.copier.commit_seconds) / step_seconds
        steps = max_repeated_steps(copies.max_spacing, stride, commit_steps=commit_steps)
    seconds, node_seconds = (None if each is None else Seconds(each * step_seconds) for each in (steps, node_steps))
    return LossBound(steps=steps, seconds=seconds, node_steps=node_steps, node_seconds=node_seconds)


def _build_saver(inputs: BackendInputs, uploads: "StoreUploads | None") -> Saver:
    run, link, rank_layout, base = inputs.run, inputs.link, inputs.rank_layout, inputs.base
    folder, disk = run.checkpoints, DurableDisk()
    recipe, plan = inputs.recipe, inputs.plan.model_dump(mode="json", exclude={"prediction"})
    text = read_regular_text(run.recipe)
    term = link.term or newest_term(run)  # under an outside launcher there is no lease

    def make_manifest(request: SaveRequest) -> Manifest:
        if newest_term(run) > term:
            raise UserError("K045", "another supervisor has taken over this run", where=str(run.lease),
                            fix="see what it does: trimaran watch RUN")  # fmt: skip
        progress = request.progress | ({"base": base.wait_unchanged()} if base else {})
        fields = {"step": request.step, "progress": progress, "recipe": text, "plan": plan}
        return Manifest(**fields, time=time.time(), term=term, world_size=rank_layout.world_size)

    shared: Any = dist.distributed_c10d._get_default_store()
    store = supervisor_store(link) if link.store else shared.clone()
    nonce, last = broadcast_json([secrets.token_hex(4), newest_step(folder)])
    messages, is_first = TorchStore(store), uploads is None
    if is_first and recipe.checkpoint.store and rank_layout.rank == rank_layout.node:
        from trimaran.train.checkpointing.run_store import open_uploads  # noqa: PLC0415  few runs have a store

        uploads = open_uploads(run, recipe.checkpoint, rank_layout, messages, own_disk=link.own_disk, nonce=nonce)
    saver = Saver(
        folder,
        rank_layout,
        messages,
        recipe.checkpoint,
        make_manifest,
        disk,
        own_disk=link.own_disk,
        uploads=uploads,
        nonce=nonce,
    )
    if rank_layout.rank == (rank_layout.node if link.own_disk else 0):
        with suppress(OSError):  # a read-only disk is reported when the first checkpoint is written
            remove_drafts(folder, disk)
    saver.begin(last)
    if uploads is not None and is_first and last is not None:
        uploads.start(last)  # if the last attempt ended before it was in the store
    return saver


def _refuse_small_disk(
    run: RunDirectory, rank_layout: RankLayout, share_bytes: np.ndarray, *, own_disk: bool = False
) -> None:
    """Raise UserError if the next checkpoint does not fit on the disk. Rank 0 checks for all ranks.

    `share_bytes` are those of each rank. With `own_disk` the fullest disk decides, on which a node writes its shares.
    Whether all checkpoints that the recipe keeps fit is checked before the run, see `app/session/session.py`.
    """
    free, num_bytes = broadcast_json(shutil.disk_usage(run.path).free), int(share_bytes.sum())
    if own_disk:
        here = int(share_bytes[np.array(rank_layout.nodes) == rank_layout.node].sum())
        rows = all_gather_json([shutil.disk_usage(run.path).free, here])
        free, num_bytes = min(rows, key=lambda row: row[0] - row[1])
    if free < num_bytes:
        fix = "free disk space, or choose another disk: --run-dir DIR"
        if newest_step(run.checkpoints) is not None:
            fix = "free disk space: `trimaran checkpoints prune RUN --keep 1`"
        raise UserError("K046", f"a checkpoint takes {show_bytes(num_bytes)}, the disk has {show_bytes(free)} free",
                        where=str(run.checkpoints), fix=fix)  # fmt: skip
