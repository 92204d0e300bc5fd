"""What a checkpointer holds on to: slots in memory, what copies to them, and what writes them to disk."""

import logging
import secrets
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist

from trimaran.checkpoint.copier import Copier, DeviceCopier
from trimaran.checkpoint.durable import DurableDisk
from trimaran.checkpoint.manifest import Manifest
from trimaran.checkpoint.memory_budget import divide
from trimaran.checkpoint.memory_copies import RankMemory
from trimaran.checkpoint.ownership import own
from trimaran.checkpoint.peer_copies import PeerCopies
from trimaran.checkpoint.rank_layout import RankLayout, can_pair, gather_numbers, told_by_first
from trimaran.checkpoint.rank_share import lay_out
from trimaran.checkpoint.saver import Order, Saver, StorePost
from trimaran.checkpoint.slot_pool import SlotPool
from trimaran.checkpoint.step_dirs import newest, sweep_drafts
from trimaran.checkpoint.tensor_shards import TensorShard
from trimaran.core import Seconds, UserError, show_bytes
from trimaran.run import RunDirectory
from trimaran.run.lease import newest_term
from trimaran.train.checkpointing.save_interval import SaveCost, SavePace
from trimaran.train.process.rank_info import RankInfo
from trimaran.train.process.supervisor_link import SupervisorLink
from trimaran.train.process.token_store import address_store

log = logging.getLogger(__name__)

COPY_BANDWIDTH = 4e9  # bytes a second, guessed until a checkpoint has been measured
DISK_BANDWIDTH = 2e8


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointBackend:
    """The parts, wired for one share."""

    hold: SlotPool
    copier: Copier
    partner: PeerCopies | None
    saver: Saver
    pace: SavePace


def build_backend(
    run: RunDirectory,
    place: RankInfo,
    link: SupervisorLink,
    rank_layout: RankLayout,
    pieces: Sequence[TensorShard],
    rank_memory: RankMemory,
) -> CheckpointBackend:
    """Return the parts for what this rank holds. Every rank calls it, when all have loaded what they resume from."""
    recipe = run.read_recipe()
    rules, stride = recipe.checkpoint, run.read_plan().comm.local_steps
    rectangles = own(pieces, rank=rank_layout.rank, world_size=rank_layout.world_size, gather=gather_numbers)
    share = lay_out(pieces, rectangles)
    copier = Copier(share)
    sizes = gather_numbers(np.array([share.num_bytes, len(copier.items)], dtype=np.int64))
    _refuse_small_disk(run, rank_layout, int(sizes[:, 0].sum()))
    # A slot must also hold what a rank on the node before this one sends.
    before = rank_layout.rank - rank_layout.local_size if can_pair(rank_layout) else rank_layout.rank
    num_bytes, items_bytes = (int(max(each[rank_layout.rank], each[before])) for each in sizes.T)
    # Without a supervisor copies do not outlive their rank, but one can go back to them.
    is_wanted = bool(link.rank_memories) or recipe.faults.not_finite == "rewind"
    room = divide(
        rules, rank_layout, slot_bytes=num_bytes, rank_memory_bytes=rank_memory.taken_bytes, has_rank_memory=is_wanted
    )
    # A partner writes into its slots whenever it likes; else there is time to take the memory until the first copy.
    on_gpu = place.device.type == "cuda"
    hold = SlotPool(
        rank_memory, room, num_bytes=num_bytes, items_bytes=items_bytes, take=not on_gpu or room.foreign > 0
    )
    log.info("checkpoints: %s in each of %d slots of memory", show_bytes(num_bytes), hold.room.num_slots)
    if on_gpu and hold.room.num_slots:
        copier = DeviceCopier(share, rank_memory, place.device)
    guess = SaveCost(stall=Seconds(num_bytes / COPY_BANDWIDTH), write=Seconds(num_bytes / DISK_BANDWIDTH))
    pace = SavePace(rules, world_size=rank_layout.world_size, guess=guess, stride=stride)
    partner = PeerCopies(rank_layout, hold.foreign, copier.settle) if hold.foreign else None
    return CheckpointBackend(hold=hold, copier=copier, partner=partner, saver=_saver(run, link, rank_layout), pace=pace)


def _saver(run: RunDirectory, link: SupervisorLink, rank_layout: RankLayout) -> Saver:
    folder, disk = run.checkpoints, DurableDisk()
    recipe, plan = run.read_recipe(), run.read_plan().model_dump(mode="json", exclude={"prediction"})
    text = run.recipe.read_text(encoding="utf-8")
    term = link.term or newest_term(run)  # under somebody else's launcher there is no lease

    def about(order: Order) -> Manifest:
        if newest_term(run) > term:
            raise UserError("K045", "another supervisor has taken this run over", where=str(run.lease),
                            fix="look at what it does: trimaran watch RUN")  # fmt: skip
        facts = {"step": order.step, "progress": order.progress, "recipe": text, "plan": plan}
        return Manifest(**facts, time=time.time(), term=term, world_size=rank_layout.world_size)

    shared: Any = dist.distributed_c10d._get_default_store()
    store = address_store(link) if link.store else shared.clone()
    saver = Saver(folder, rank_layout, StorePost(store), recipe.checkpoint, about, disk)
    if rank_layout.rank == 0:
        with suppress(OSError):  # a disk that nothing can be removed from says so when something is written to it
            sweep_drafts(folder, disk)
    saver.nonce, last = told_by_first([secrets.token_hex(4), newest(folder)])
    saver.begin(last)
    return saver


def _refuse_small_disk(run: RunDirectory, rank_layout: RankLayout, num_bytes: int) -> None:
    """Raise when not even the next checkpoint fits on the disk: better now than in an hour. Rank 0 looks for all.

    Whether all that are to be kept fit is asked before the run, see `app/session/session.py`.
    """
    free = told_by_first(shutil.disk_usage(run.path).free if rank_layout.rank == 0 else 0)
    if free < num_bytes:
        fix = "make room, or choose another disk: --run-dir DIR"
        if newest(run.checkpoints) is not None:
            fix = "make room: `trimaran checkpoints prune RUN --keep 1`"
        raise UserError("K046", f"a checkpoint takes {show_bytes(num_bytes)}, the disk has {show_bytes(free)} free",
                        where=str(run.checkpoints), fix=fix)  # fmt: skip
