"""Keeps the state of a run: in memory after every step, on disk now and then, and finds it again."""

import logging
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from trimaran.checkpoint.copier import Copier
from trimaran.checkpoint.find_copies import CopyFinder
from trimaran.checkpoint.memory_copies import Label, MemorySlot, RankMemory
from trimaran.checkpoint.rank_layout import (
    RankLayout,
    everyone,
    exchange_rank_layout,
    gather_numbers,
    meet,
    told_by_first,
)
from trimaran.checkpoint.saver import Order, Outcome
from trimaran.checkpoint.step_dirs import headless, newest, refuse, step_of, step_path, steps
from trimaran.checkpoint.tensor_shards import State
from trimaran.core import Seconds, UserError
from trimaran.run import Journal, RunDirectory, last_step
from trimaran.train.agreement import Agreed, Ending
from trimaran.train.checkpointing.checkpoint_backend import build_backend
from trimaran.train.checkpointing.restore import RestoredState, Restorer, refuse_new_start
from trimaran.train.checkpointing.save_interval import CopyPace, SaveCost
from trimaran.train.process.rank_info import RankInfo
from trimaran.train.process.supervisor_link import SupervisorLink

log = logging.getLogger(__name__)


class Checkpointer:
    """Decides when the state is kept, keeps it, and brings it back. Every rank calls all methods in the same order."""

    def __init__(
        self,
        run: RunDirectory,
        place: RankInfo,
        journal: Journal,
        link: SupervisorLink,
        state: State,
        *,
        data: str = "",
    ) -> None:
        """`data` tells what is trained on from other data; a state goes with no other."""
        self._data = {"data": data} if data else {}
        self._run, self._place, self._journal, self._link, self._state = run, place, journal, link, state
        self._recipe, self._stride = run.read_recipe(), run.read_plan().comm.local_steps
        self._laps = 0
        self._wish = False
        self._ordered = self._durable = -1
        self._failure = ""
        self._writing: MemorySlot | None = None
        self._totals: dict[str, float] = {"checkpoints": 0, "copies": 0, "stall_seconds": 0.0, "failed": 0}
        self._step_seconds = self._left = 0.0
        """When training went on after the last call."""

    def resume(self) -> int:
        """Load the newest verified state there is, the same on all ranks, and return its step; 0 when there is none."""
        began = time.monotonic()
        self._rank_layout = exchange_rank_layout(self._place.rank, self._place.local_rank)
        self._rank_memories = [
            RankMemory(fd) for fd in self._link.rank_memories or (os.memfd_create("trimaran-berth"),)
        ]
        # A rank memory of one's own is seen by nobody else, as if this rank were a node.
        alone = RankLayout(rank=self._place.rank, local_rank=0, nodes=tuple(range(self._rank_layout.world_size)))
        self._seers = self._rank_layout if self._link.rank_memories else alone
        self._recall = Restorer(self._state, self._run.checkpoints, self._seers, self._recipe, **self._data)
        recalled = self._load(newest=self._recipe.train.steps)
        self._tell(recalled, began)
        if recalled.tier is None:
            refuse_new_start(self._run, self._rank_layout, newest=self._recipe.train.steps)
        rank_memory = self._rank_memories[self._link.place if self._link.rank_memories else 0]
        self._backend = build_backend(
            self._run, self._place, self._link, self._rank_layout, self._state.pieces(), rank_memory
        )
        self._moored = not self._backend.copier.prepares  # whether all ranks know if there is memory for copies
        self._begin(recalled)
        return recalled.step

    def rewind(self, ending: Ending) -> int | None:
        """Load the newest verified state of at most `ending.step` steps and return its step; None when there is none.

        Checkpoints of later steps get another name: they hold what is gone back from.
        """
        self._backend.saver.wait()
        self._backend.copier.settle()
        if self._backend.partner is not None:
            self._backend.partner.settle()
        self._file()
        meet()  # what a rank has not sealed yet, others cannot see
        self._rank_memories = [
            RankMemory(each.fd) for each in self._rank_memories
        ]  # the other ranks have cut theirs anew
        recalled = self._load(newest=ending.step)
        if recalled.tier is None:
            return None
        self.disown(recalled.step)
        self._backend.saver.begin(told_by_first(newest(self._run.checkpoints)))
        self._laps += 1
        self._begin(recalled)
        return recalled.step

    def disown(self, step: int) -> None:
        """Rename the checkpoints of more than `step` steps, so that nobody loads what turned out to be wrong."""
        self._backend.saver.wait()
        if self._rank_layout.rank == 0:
            for each in (each for each in steps(self._run.checkpoints) if each > step):
                refuse(step_path(self._run.checkpoints, each), f"the last state beyond doubt is that of step {step}")

    @property
    def wants_save(self) -> bool:
        """Whether it is time for a checkpoint. Rank 0 decides; it is agreed upon with the next step."""
        return self._wish

    @property
    def room(self) -> dict[str, Any]:
        """What memory the copies take, for the event that says that all is ready."""
        hold = self._backend.hold
        return {
            "slots": hold.room.num_slots,
            "memory": hold.room.memory,
            "slot_bytes": self._backend.copier.share.num_bytes,
        }

    def before_update(self) -> None:
        """Come before the update: a copy that is being made must have been made first."""
        self._backend.copier.before_update()

    def after_step(self, step: int, agreed: Agreed) -> None:
        """Keep what is to be kept of the state after `step` steps. `agreed` is what the step before brought."""
        entered = time.perf_counter()
        self._step_seconds = (entered - self._left) / self._stride
        self._copy_pace.stepped(self._step_seconds)
        self._file()
        if agreed.save:
            self._save(step)
        elif self._copy_pace.is_due(step) and self._has_slots():
            self._copy(step)
        if self._rank_layout.rank == 0:
            self._wish = self._backend.pace.wants(step, busy=self._backend.saver.busy)
        self._left = time.perf_counter()

    def finish(self, step: int) -> None:
        """Leave a complete checkpoint of `step`, the last one, and return when it is on disk."""
        if step not in (self._ordered, self._durable):
            self._save(step)
        self._backend.saver.wait()
        if self._backend.partner is not None:
            self._backend.partner.settle()
        self._file()
        if self._durable != step:
            raise UserError("K043", f"the last checkpoint could not be written: {self._failure}",
                            where=str(self._run.checkpoints),
                            fix="mend that (for room: `trimaran checkpoints prune RUN --keep 1`), then go on from the "
                            "checkpoint before: trimaran resume RUN")  # fmt: skip

    def totals(self) -> dict[str, float]:
        """Return what keeping the state has cost so far, for the last event."""
        return self._totals

    def _progress(self) -> dict[str, Any]:
        return {**self._state.progress(), **self._data}

    def _load(self, *, newest: int) -> RestoredState:
        """Load the newest verified state of at most `newest` steps."""
        reported = last_step(self._run) if self._rank_layout.rank == 0 else 0
        recalled = self._recall.load(CopyFinder(self._rank_memories, self._seers), newest=newest, reported=reported)
        self._ordered = self._durable = recalled.step if recalled.tier == "disk" else -1
        return recalled

    def _tell(self, recalled: RestoredState, began: float) -> None:
        refused = recalled.refused + self._refuse_headless() if self._rank_layout.rank == 0 else []
        if self._rank_layout.rank == 0 and (recalled.tier or refused):
            about = {"tier": recalled.tier, "from_step": recalled.step, "refused": refused}
            self._journal.event("resume", step=recalled.step, seconds=time.monotonic() - began, **about)

    def _refuse_headless(self) -> list[dict[str, Any]]:
        """Rename what is named like a checkpoint and is none, and return what there was of it."""
        refused, why = [], "there is no manifest in it"
        with suppress(OSError):  # it is in nobody's way as long as nothing can be written
            for path in headless(self._run.checkpoints):
                refuse(path, why)
                refused.append({"tier": "disk", "step": step_of(path), "why": why})
        return refused

    def _begin(self, recalled: RestoredState) -> None:
        """Start to keep what comes after the state that was loaded."""
        hold = self._backend.hold
        if self._backend.partner is not None:
            self._backend.partner.begin(recalled.step)
        hold.clear_but(recalled.incarnation, recalled.step, self._backend.copier.share)
        for place in range(self._seers.local_rank, len(self._rank_memories), self._seers.local_size):
            if self._rank_memories[place].fd != hold.rank_memory.fd:
                os.ftruncate(self._rank_memories[place].fd, 0)  # of a rank that there was when there were more
        self._copy_pace = CopyPace(self._recipe.checkpoint.memory if hold.room.memory else 0, gather_numbers)
        self._copy_pace.begin(recalled.step)
        # A rank that is killed now is to find it there. All make a copy or none does: copies are counted alike.
        if hold.room.memory and not self._can_wait(recalled) and not everyone(hold.holding(recalled.step) is not None):
            self._has_slots(wait=True)
            if hold.room.memory:
                self._copy(recalled.step)
        self._backend.pace.begin()
        self._wish = self._rank_layout.rank == 0 and self._backend.pace.wants(recalled.step, busy=False)
        self._left = time.perf_counter()

    def _can_wait(self, recalled: RestoredState) -> bool:
        """Whether the state can be had again as it is now: then the first step does not wait for memory to be taken."""
        if self._moored or recalled.tier == "memory" or self._recipe.faults.not_finite == "rewind":
            return False
        # Replicas that turn out to differ go back, too: to the first copy, where copies are far apart.
        return recalled.tier == "disk" or self._recipe.checkpoint.memory in ("auto", 1)

    def _has_slots(self, *, wait: bool = False) -> bool:
        """Return whether there is memory to copy to by now. All ranks ask at the same steps, and hear the same."""
        if not self._moored and (wait or everyone(self._backend.copier.is_ready)):
            self._moored, began = True, time.perf_counter()
            if not everyone(self._backend.copier.wait_ready()):
                self._give_up_slots()
            self._totals["stall_seconds"] += time.perf_counter() - began
        return self._moored and self._backend.hold.room.num_slots > 0

    def _give_up_slots(self) -> None:
        """Do without copies in memory: some node has less of it than it said."""
        log.warning("there is no memory for copies of the state: it is kept on disk only, and training waits for that")
        backend = self._backend
        backend.copier.let_go()
        backend.hold.give_up()
        self._backend = replace(backend, copier=Copier(backend.copier.share), partner=None)
        self._copy_pace = CopyPace(0, gather_numbers)

    def _copy(self, step: int) -> MemorySlot:
        """Copy the state to a slot in memory and return it."""
        backend = self._backend
        slot = backend.hold.next(self._in_use())
        self._state.gather()
        label = Label(
            step=step,
            incarnation=(self._link.attempt, self._laps),
            rank=self._rank_layout.rank,
            world_size=self._rank_layout.world_size,
            progress=self._progress(),
        )
        backend.copier.copy(slot, label, self._state.pieces())
        backend.hold.fill(slot, step)
        self._totals["copies"] += 1
        self._totals["stall_seconds"] += backend.copier.stall_seconds
        self._copy_pace.copied(step, backend.copier.stall_seconds)
        if backend.partner is not None:
            backend.partner.offer(step, slot, step_seconds=self._step_seconds)
        return slot

    def _in_use(self) -> list[MemorySlot]:
        """Return the slots that somebody reads: the disk, or a partner on another node."""
        backend = self._backend
        written = [self._writing] if self._writing is not None and backend.saver.busy else []
        return written + (backend.partner.in_use if backend.partner is not None else [])

    def _save(self, step: int) -> None:
        """Begin to write the state of `step` to disk, and finish where nothing can be done meanwhile."""
        saver = self._backend.saver
        self._link.enter("save", step)
        self._wait()  # one after the other; the other ranks may be a moment behind rank 0
        self._file()
        self._has_slots(wait=True)
        order = self._order(step) if self._backend.hold.room.own else self._spare_order(step)
        self._ordered = step
        saver.start(order)
        self._backend.pace.started()
        if not self._is_asynchronous:
            self._wait()

    @property
    def _is_asynchronous(self) -> bool:
        """Whether training goes on while a checkpoint is written."""
        return self._recipe.checkpoint.asynchronous and self._backend.hold.room.own > 0

    def _wait(self) -> None:
        """Return when nothing is being written; training stands still meanwhile."""
        began = time.perf_counter()
        self._backend.saver.wait()
        self._totals["stall_seconds"] += time.perf_counter() - began

    def _order(self, step: int) -> Order:
        backend = self._backend
        slot = backend.hold.holding(step) or self._copy(step)
        self._writing = slot
        memory = slot.data[: backend.copier.share.num_bytes]
        about = {"progress": self._progress(), "stall_seconds": backend.copier.stall_seconds}
        return Order(step=step, share=backend.copier.share, memory=memory, ready=backend.copier.settle, **about)

    def _spare_order(self, step: int) -> Order:
        """Return an order whose memory is a file: there is none other."""
        copier = self._backend.copier
        began = time.perf_counter()
        try:
            self._run.checkpoints.mkdir(exist_ok=True)
            with tempfile.TemporaryFile(dir=self._run.checkpoints) as file:
                rank_memory = RankMemory(file.fileno())
                rank_memory.lay_out(1, num_bytes=copier.share.num_bytes, items_bytes=len(copier.items))
            self._state.gather()
            label = Label(
                step=step, incarnation=(0, 0), rank=self._rank_layout.rank, world_size=self._rank_layout.world_size
            )
            copier.copy(rank_memory.slots[0], label, self._state.pieces())
        except OSError as error:
            return Order(step=step, share=copier.share, memory=torch.empty(0), failure=str(error))
        memory, stall = rank_memory.slots[0].data[: copier.share.num_bytes], time.perf_counter() - began
        return Order(step=step, share=copier.share, memory=memory, progress=self._progress(), stall_seconds=stall)

    def _file(self) -> None:
        """Take note of what was written since the last look, and file it on rank 0."""
        for outcome in self._backend.saver.outcomes():
            if not self._is_asynchronous:
                outcome = replace(outcome, stall_seconds=outcome.stall_seconds + outcome.seconds)
            self._failure = outcome.failed
            self._totals["failed" if outcome.failed else "checkpoints"] += 1
            if not outcome.failed:
                self._durable = outcome.step
                cost = SaveCost(stall=Seconds(outcome.stall_seconds), write=Seconds(outcome.seconds))
                self._backend.pace.ended(cost)
            if self._rank_layout.rank == 0:
                self._journal.event(
                    "checkpoint", step=outcome.step, **_facts(outcome), skipped=self._backend.pace.num_skipped
                )


def _facts(outcome: Outcome) -> dict[str, Any]:
    facts = {
        "path": outcome.path,
        "seconds": outcome.seconds,
        "stall_seconds": outcome.stall_seconds,
        "bytes": outcome.bytes,
        "written_bytes": outcome.written_bytes,
        "saved_bytes": outcome.saved_bytes,
    }
    return facts | ({"failed": outcome.failed} if outcome.failed else {})
