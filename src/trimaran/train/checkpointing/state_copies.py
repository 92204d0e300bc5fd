"""Copies of the state in memory: they are made while training continues, and outlive a rank that is killed."""

import logging
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trimaran.checkpoint import Copier, CopyMetadata, MemoryBudget, MemorySlot, MemorySource, Saver, barrier
from trimaran.checkpoint.memory_copies import SlotPool, choose_budget
from trimaran.checkpoint.peer_copies import PeerCopies, open_node_copy
from trimaran.checkpoint.rank_layout import all_true, can_pair
from trimaran.core import DEVICE_TRAITS, Seconds, show_bytes
from trimaran.parallel import all_gather_int64, assign_rows, build_share
from trimaran.train.checkpointing import save_interval
from trimaran.train.checkpointing.tiers import CheckpointInputs, RankMemories, RestoredState, SaveTotals

if TYPE_CHECKING:
    from trimaran.checkpoint.device_copier import DeviceCopier

log = logging.getLogger(__name__)

ASK_EVERY_STEPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPlan:
    """The slots that a rank needs for its share of the state, which `copier` copies from host memory.

    `share_bytes` are those of all ranks. `fits`: this rank's memory has such slots already. `all_fit`: that of every
    rank does. Copies in other slots are lost.
    """

    copier: Copier
    share_bytes: np.ndarray
    budget: MemoryBudget
    num_bytes: int
    items_bytes: int
    fits: bool
    all_fit: bool


def plan_slots(inputs: CheckpointInputs, memories: RankMemories) -> SlotPlan:
    """Return the slots for the state of this rank. Every rank must call it, after all have restored their state."""
    layout, shards = memories.layout, inputs.state.shards()
    rows = assign_rows(shards, rank=layout.rank, world_size=layout.world_size, gather=all_gather_int64)
    copier = Copier(build_share(shards, rows))
    sizes = all_gather_int64(np.array([copier.share.num_bytes, len(copier.items)], dtype=np.int64))
    # A slot must also hold the share that the partner on the previous node sends.
    sender = layout.rank - layout.local_size if can_pair(layout) else layout.rank
    num_bytes, items_bytes = (int(max(each[layout.rank], each[sender])) for each in sizes.T)
    budget = choose_budget(
        inputs.recipe.checkpoint,
        layout,
        slot_bytes=num_bytes,
        rank_memory_bytes=memories.mine.allocated_bytes,
        # Without a supervisor copies do not outlive their rank, but a rewind can use them.
        has_rank_memory=memories.outlive_ranks or inputs.recipe.faults.not_finite == "rewind",
    )
    fits = memories.mine.has_layout(budget.num_slots, num_bytes=num_bytes, items_bytes=items_bytes)
    return SlotPlan(
        copier=copier,
        share_bytes=sizes[:, 0],
        budget=budget,
        num_bytes=num_bytes,
        items_bytes=items_bytes,
        fits=fits,
        all_fit=all_true(fits),
    )


class StateCopies:
    """The copies of a rank's state, and those that a rank on another node has sent. Every rank makes the same calls."""

    def __init__(
        self,
        inputs: CheckpointInputs,
        memories: RankMemories,
        slots: SlotPlan,
        saver: Saver,
        totals: SaveTotals,
        pinned: "DeviceCopier | None" = None,
    ) -> None:
        """Split the memory of this rank into `slots`. Must be followed by `begin`.

        `pinned` is the copier of another plan whose pinned memory is used again.
        """
        self._inputs, self._memories, self._saver, self._totals = inputs, memories, saver, totals
        self._link, self._layout, self._stride = inputs.link, memories.layout, inputs.plan.sync_every
        # A partner may write to the peer slots at any time. Else the memory can be allocated until the first copy.
        device = inputs.rank_info.device
        has_own_memory = DEVICE_TRAITS[device.type].has_own_memory
        self._pool = SlotPool(
            memories.mine,
            slots.budget,
            num_bytes=slots.num_bytes,
            items_bytes=slots.items_bytes,
            allocate=not has_own_memory or slots.budget.peer_slots > 0,
        )
        num_slots = self._pool.budget.num_slots
        log.info("checkpoints: %s in each of %d slots", show_bytes(slots.num_bytes), num_slots)
        self.copier, self._share = slots.copier, slots.copier.share
        if has_own_memory and num_slots:
            from trimaran.checkpoint.device_copier import DeviceCopier  # noqa: PLC0415  for GPUs only

            self.copier = DeviceCopier(self._share, memories.mine, device, pinned)
        slots_of_peers = self._pool.peer_slots
        self._peers = PeerCopies(memories.layout, slots_of_peers, self.copier.wait) if slots_of_peers else None
        self._slots_decided = not self.copier.allocates_in_background  # do all know if there is memory?
        self._num_asks = 0  # how often the ranks have asked each other whether there is memory for copies
        self._incarnation = (self._link.attempt, 0)
        self._writing: MemorySlot | None = None
        self._step_seconds = 0.0
        self._begin_schedule(0)

    def begin(self, restored: RestoredState, *, num_rewinds: int, copied_step: int | None = None) -> None:
        """Copy from the restored state on. Copies of `copied_step`, by default the restored, stay until replaced."""
        if self._peers is not None:
            self._peers.begin(restored.step)
        kept = restored.step if copied_step is None else copied_step
        self._pool.clear_except(restored.incarnation, kept, self._share)
        self._incarnation = (self._link.attempt, num_rewinds)
        self._begin_schedule(restored.step)
        self.copier.prepare(self._pool.own_slots, self._inputs.state.shards())
        facts = save_interval.StartFacts(
            keeps_copies=self.are_kept,
            has_memory=self._pool.budget.num_slots > 0 if self._slots_decided else None,
            is_copied=all_true(self._pool.slot_of(restored.step) is not None),
            tier=restored.tier,
            is_change=copied_step is not None,
            rewinds=self._inputs.recipe.faults.not_finite == "rewind",
            every_step=self._inputs.recipe.checkpoint.memory in ("auto", 1),
        )
        if save_interval.when_to_copy(facts) is save_interval.CopyTime.NOW:
            self.decide_slots()
            if self.are_kept:
                self._copy(restored.step)
        # Free the memory of ranks that no longer exist, once the state that it may hold is in memory elsewhere.
        layout = self._memories.shared_layout
        numbers = range(layout.local_rank, len(self._memories.readable), layout.local_size)
        fds = [self._memories.readable[number].fd for number in numbers]
        old = [fd for fd in fds if fd != self._pool.rank_memory.fd]
        if all_true(not old):
            return
        self.copier.wait()
        barrier()
        for fd in old:
            os.ftruncate(fd, 0)

    def change_recipe(self, inputs: CheckpointInputs, step: int) -> None:
        self._inputs = inputs
        self._begin_schedule(step)

    def _begin_schedule(self, step: int) -> None:
        budget, section = self._pool.budget, self._inputs.recipe.checkpoint
        self._schedule = save_interval.CopySchedule(
            section.memory if budget.keeps_copies else 0,
            all_gather_int64 if self._layout.world_size > 1 else lambda numbers: numbers[None],
            lost_seconds=Seconds(section.lost_seconds),
            num_slots=budget.own_slots,
            stride=self._stride,
        )
        self._schedule.begin(step)

    @property
    def are_kept(self) -> bool:
        """Whether there are copies to restore from, rather than slots that hold a checkpoint until it is on disk."""
        return self._pool.budget.keeps_copies

    @property
    def has_slots(self) -> bool:
        """Whether a checkpoint can wait in memory until it is on disk."""
        return self._pool.budget.own_slots > 0

    def memory_facts(self) -> dict[str, Any]:
        budget = self._pool.budget
        return {"slots": budget.num_slots, "memory": budget.keeps_copies, "slot_bytes": self._share.num_bytes}

    def after_step(self, step_seconds: float) -> None:
        """Record the last step and what is known by now about copies; adjust how often the state is copied."""
        self._step_seconds, schedule = step_seconds, self._schedule
        schedule.record_step(step_seconds)
        for seconds in self.copier.device_waits():
            self._totals.stall_seconds += seconds
            schedule.record_device_wait(seconds)
        if schedule.is_review_due:
            began = time.thread_time()  # without the wait for other ranks: they would wait in the next step
            schedule.review(self.copier.commit_seconds)
            seconds = time.thread_time() - began
            self._totals.stall_seconds += seconds
            schedule.exchange_seconds = seconds

    def copy_if_due(self, step: int) -> None:
        if self._schedule.is_due(step) and self._ask_for_slots():  # all ranks ask at the same steps
            self._copy(step)

    def copy_before_change(self, step: int) -> None:
        """Copy the state, if there is memory for it: a crash during a change of the plan then loses no step."""
        if not self.are_kept:
            return
        has_memory, is_copied = self._ask_for_slots(), all_true(self._pool.slot_of(step) is not None)
        if has_memory and not is_copied:
            self._copy(step)

    def hold_for_save(self, step: int) -> MemorySlot:
        """Return a slot with the state of `step`, which stays as it is while the saver is busy."""
        self._writing = self._pool.slot_of(step) or self._copy(step)
        return self._writing

    def open_copy(self, step: int) -> MemorySource | None:
        """Return the copy of `step` that all ranks made, if all are on one node and can read each other's memory.

        Every rank must call it. The copy was made from the state that the ranks hold now: it is not verified.
        """
        is_copied = self._pool.slot_of(step) is not None
        if not self._memories.outlive_ranks or self._layout.num_nodes > 1 or not all_true(is_copied):
            return None
        self.copier.wait()
        key = self._incarnation, step, self._layout.world_size
        return open_node_copy([each.fd for each in self._memories.readable], self._memories.shared_layout, key)

    def wait_until_sent(self) -> None:
        if self._peers is not None:
            self._peers.wait()

    def close(self) -> None:
        """End what sends copies to another node. No copy may follow."""
        if self._peers is not None:
            self._peers.close()

    def give_pinned_memory(self, slots: SlotPlan) -> "DeviceCopier | None":
        """Return the copier if its pinned memory suits `slots` (pinning takes a second for a GB), else release it."""
        pinned = self.copier.pinned if slots.fits else None
        if pinned is None:
            self.copier.release()
        return pinned

    def loss_bound(self, saves: save_interval.SaveSchedule) -> save_interval.LossBound | None:
        """Return what a fault costs at most; None while that is unknown: no copy or no step is timed."""
        schedule = self._schedule
        step_seconds, every = schedule.step_seconds, schedule.every if self._memories.outlive_ranks else 0
        if not step_seconds or (every and not self.copier.has_committed):
            return None
        node_steps = saves.max_repeated_steps(step_seconds)
        if every and self._peers is not None:
            round_steps = -(-self._peers.interval_steps // every) * every
            node_steps = save_interval.max_repeated_steps(2 * round_steps, self._stride)
        steps = node_steps
        if every:
            commit_steps = (schedule.commit_seconds or self.copier.commit_seconds) / step_seconds
            steps = save_interval.max_repeated_steps(schedule.max_spacing, self._stride, commit_steps=commit_steps)
        seconds, node_seconds = (None if each is None else Seconds(each * step_seconds) for each in (steps, node_steps))
        return save_interval.LossBound(steps=steps, seconds=seconds, node_steps=node_steps, node_seconds=node_seconds)

    def bound_inputs(self) -> tuple[object, ...]:
        schedule, peer_steps = self._schedule, self._peers.interval_steps if self._peers is not None else 0
        times = schedule.step_seconds, schedule.commit_seconds
        return (*times, schedule.every, schedule.max_spacing, peer_steps, self.copier.has_committed)

    def decide_slots(self) -> None:
        """Wait until all ranks know whether there is memory to copy to. Without it on one, all give theirs up."""
        if self._slots_decided:
            return
        self._slots_decided, began = True, time.perf_counter()
        if not all_true(self.copier.wait_ready()):
            # A node has less memory than it reported.
            what = "there is no memory for copies of the state: it is saved to disk only, and training waits for that"
            log.warning(what)
            self.copier.release()
            self._pool.release()
            self.copier, self._peers = Copier(self._share), None
            self._schedule = save_interval.CopySchedule(0, all_gather_int64)
        self._totals.stall_seconds += time.perf_counter() - began

    def _ask_for_slots(self) -> bool:
        """Return whether there is memory to copy to by now, the same on all ranks. All must ask at the same steps."""
        if not self._slots_decided:
            self._num_asks += 1
            if self._layout.world_size == 1:
                all_know = self.copier.is_ready
            else:  # after some steps the ranks ask each other only now and then
                is_turn = self._num_asks <= ASK_EVERY_STEPS or self._num_asks % ASK_EVERY_STEPS == 0
                all_know = is_turn and all_true(self.copier.is_ready)
            if all_know:
                self.decide_slots()
        return self._slots_decided and self._pool.budget.num_slots > 0

    def _copy(self, step: int) -> MemorySlot:
        began, state = time.perf_counter(), self._inputs.state
        sent = self._peers.in_use if self._peers is not None else []
        written = [self._writing] if self._writing is not None and self._saver.busy else []
        slot = self._pool.next_slot([*written, *sent])
        state.gather()
        metadata = CopyMetadata(
            step=step,
            incarnation=self._incarnation,
            rank=self._layout.rank,
            world_size=self._layout.world_size,
            progress=self._inputs.progress(),
        )
        with self._link.section("copy", step):
            self.copier.copy(slot, metadata, state.shards())
        self._pool.mark_filled(slot, step)
        if self._peers is not None:
            self._peers.offer(step, slot, step_seconds=self._step_seconds)
        host_seconds = time.perf_counter() - began
        self._totals.copies += 1
        self._totals.stall_seconds += host_seconds
        self._schedule.record_copy(step, host_seconds)
        return slot
