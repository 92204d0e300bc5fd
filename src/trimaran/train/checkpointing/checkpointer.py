"""Saves the state of a run to memory and disk, and restores it."""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from trimaran.checkpoint.copier import Copier
from trimaran.checkpoint.fetch_copies import open_node_copy
from trimaran.checkpoint.find_copies import CopyFinder
from trimaran.checkpoint.memory_copies import CopyMetadata, MemorySlot, MemorySource, RankMemory
from trimaran.checkpoint.rank_layout import RankLayout, all_true, barrier, exchange_rank_layout
from trimaran.checkpoint.saver import Saver, SaveRequest
from trimaran.checkpoint.step_dirs import complete_steps, newest_step, refuse, step_path
from trimaran.checkpoint.tensor_shards import CheckpointState
from trimaran.core import Plan, Recipe, Seconds, UserError
from trimaran.parallel.comm.json_exchange import all_gather_int64, broadcast_json
from trimaran.run import Journal, RunDirectory, last_step
from trimaran.run.reserve import DISK_REASONS
from trimaran.train.agreement import LoopExit, StepDecision
from trimaran.train.checkpointing.checkpoint_backend import (
    BackendInputs,
    CheckpointBackend,
    bound_loss,
    build_backend,
)
from trimaran.train.checkpointing.copy_time import CopyTime, StartFacts, when_to_copy
from trimaran.train.checkpointing.restore import RestoredState, Restorer, refuse_new_start
from trimaran.train.checkpointing.save_interval import (
    CopySchedule,
    LossBound,
    SaveCost,
    SaveSchedule,
)
from trimaran.train.checkpointing.save_requests import event_fields, refuse_without_manifest, request_from_file
from trimaran.train.process.rank_info import RankInfo
from trimaran.train.process.supervisor_link import SupervisorLink

if TYPE_CHECKING:
    from trimaran.checkpoint.store_fetch import StoreFetcher
    from trimaran.checkpoint.store_uploads import UploadResult
    from trimaran.train.checkpointing.base_hashing import AdapterBase

log = logging.getLogger(__name__)

ASK_EVERY_STEPS = 8
SHOW_UPLOAD_SECONDS = 2.0  # between reports of the upload that the run waits for at its end


class UnwrittenCheckpointError(UserError):
    """The disk could not take the last checkpoint. Starting again continues from the one before, once it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedSession:
    """The state of a closed checkpointer, for the checkpointer of the next plan in the same processes."""

    rank_layout: RankLayout
    memory_layout: RankLayout
    rank_memories: list[RankMemory]
    backend: CheckpointBackend
    num_rewinds: int
    requested_step: int
    durable_step: int
    totals: dict[str, float]
    bound: LossBound | None


class Checkpointer:
    """Decides when to save the state, saves it, and restores it. Every rank must call all methods in the same order."""

    def __init__(
        self,
        run: RunDirectory,
        rank_info: RankInfo,
        journal: Journal,
        link: SupervisorLink,
        state: CheckpointState,
        *,
        data: str = "",
        base: "AdapterBase | None" = None,
        settings: tuple[Recipe, Plan] | None = None,
    ) -> None:
        """`data` is the digest of the training data, `base` is that of an adapter.

        A state is restored only with the same data and the same base. `settings`: the recipe and the plan of `state`,
        if they are not yet those in the run directory. Nothing is saved before `resume` or `take_over`.
        """
        self._data, self._base = {"data": data} if data else {}, base
        self._run, self._rank_info, self._journal, self._link, self._state = run, rank_info, journal, link, state
        self._recipe, self._plan = settings or (run.read_recipe(), run.read_plan())
        self._stride = self._plan.sync_every
        self._has_begun = False
        self.num_updates = 0  # how often `before_update` was called
        self._num_rewinds = 0
        self._wants_save = False
        self._requested_step = self._durable_step = -1
        self._failure = ""
        self._writing: MemorySlot | None = None
        self._totals: dict[str, float] = {"checkpoints": 0, "copies": 0, "stall_seconds": 0.0, "failed": 0}
        self._bound: LossBound | None = None  # what the last `loss_bound` event says
        self._bound_inputs: tuple[object, ...] = ()  # what it depended on when it was last computed
        self._num_asks = 0  # how often the ranks have asked each other whether there is memory for copies
        self._step_seconds = self._returned_at = 0.0  # when the last call of `after_step` returned

    def resume(self, *, received: int | None = None) -> int:
        """Restore the newest verified state, the same on all ranks, and return its step; 0 if there is none.

        `received`: the state is already that of this step, and came from another replica. No disk is read.
        """
        self._rank_layout = exchange_rank_layout(self._rank_info.rank, self._rank_info.local_rank)
        self._rank_memories = [
            RankMemory(fd) for fd in self._link.rank_memories or (os.memfd_create("trimaran-rank-memory"),)
        ]
        # Without a supervisor, no other rank can read this one's memory, as if each rank were a node.
        alone = RankLayout(rank=self._rank_info.rank, local_rank=0, nodes=tuple(range(self._rank_layout.world_size)))
        self._memory_layout = self._rank_layout if self._link.rank_memories else alone
        restored = RestoredState(step=received) if received is not None else self._restore_newest()
        before_discard = partial(self._save_before_discard, restored)
        inputs, is_restart = self._backend_inputs(), restored.tier == "memory"
        self._backend = build_backend(inputs, self._state.shards(), before_discard, is_restart=is_restart)
        self._slots_decided = not self._backend.copier.allocates_in_background  # do all know if there is memory?
        self._begin(restored)
        return restored.step

    def _restore_newest(self) -> RestoredState:
        began = time.monotonic()
        restorer, newest = self._build_restorer(compares_base=True), self._recipe.train.steps
        with self._link.section("restore") as report_progress:
            restored = self._restore(restorer, newest=newest, report_progress=report_progress)
        self._log_resume(restored, began)
        if restored.tier is None:
            refuse_new_start(self._run, self._rank_layout, newest=self._recipe.train.steps)
        return restored

    def _build_restorer(self, *, compares_base: bool) -> Restorer:
        """Return what restores a state. The base of an adapter, which stays the same, is compared at the start only."""
        return Restorer(
            self._state,
            self._run.checkpoints,
            self._memory_layout,
            self._recipe,
            **self._data,
            base=self._base.hashing if self._base and compares_base else None,
            own_disk=bool(self._link.own_disk),
            open_store=self._open_store if self._recipe.checkpoint.store else None,
        )

    def _backend_inputs(self) -> BackendInputs:
        return BackendInputs(
            run=self._run,
            rank_info=self._rank_info,
            link=self._link,
            rank_layout=self._rank_layout,
            rank_memory=self._rank_memories[self._link.local_rank if self._link.rank_memories else 0],
            recipe=self._recipe,
            plan=self._plan,
            base=self._base.hashing if self._base else None,
        )

    @property
    def state(self) -> CheckpointState:
        """The state that is saved."""
        return self._state

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written to disk."""
        return self._has_begun and self._backend.saver.busy

    def copy_before_change(self, step: int) -> None:
        """Copy the state to memory, if there is any for it: a crash during a change of the plan then loses no step."""
        pool = self._backend.slot_pool
        if not pool.budget.keeps_copies:
            return
        has_memory, is_copied = self._ask_for_slots(), all_true(pool.slot_of(step) is not None)
        if has_memory and not is_copied:
            self._copy(step)

    def open_copy(self, step: int) -> MemorySource | None:
        """Return the copy of `step` that all ranks made, if all are on one node and can read each other's memory.

        Every rank must call it. The copy was made from the state that the ranks hold now: it is not verified.
        """
        is_copied = self._has_begun and self._backend.slot_pool.slot_of(step) is not None
        if not self._link.rank_memories or self._rank_layout.num_nodes > 1 or not all_true(is_copied):
            return None
        self._backend.copier.wait()
        key = (self._link.attempt, self._num_rewinds), step, self._rank_layout.world_size
        return open_node_copy([each.fd for each in self._rank_memories], self._memory_layout, key)

    def take_over(self, closed: ClosedSession, step: int, *, copied_step: int) -> None:
        """Save the state from `step` on in place of a checkpointer that was closed.

        What that one copied to memory after `copied_step` stays there until the first new copy, if the new share fits
        into the same slots; if not, it is lost before the new copy is made.
        """
        self._rank_layout, self._memory_layout = closed.rank_layout, closed.memory_layout
        self._rank_memories, self._num_rewinds = closed.rank_memories, closed.num_rewinds
        self._requested_step, self._durable_step = closed.requested_step, closed.durable_step
        self._totals, self._bound = closed.totals, closed.bound
        shards = self._state.shards()
        self._backend = build_backend(self._backend_inputs(), shards, is_restart=True, replaced=closed.backend)
        self._slots_decided = not self._backend.copier.allocates_in_background
        incarnation = (self._link.attempt, self._num_rewinds)
        self._begin(RestoredState(step=step, incarnation=incarnation, tier="memory"), copied_step=copied_step)

    def close(self, step: int) -> ClosedSession:
        """Wait for copies and saves, end the saver, and return what the next checkpointer takes over."""
        self._wait_until_saved(step)
        self._backend.copier.wait()
        self._log_results()
        self._backend.saver.close()
        if self._backend.peer_copies is not None:
            self._backend.peer_copies.close()
        self._has_begun = False
        return ClosedSession(
            rank_layout=self._rank_layout,
            memory_layout=self._memory_layout,
            rank_memories=self._rank_memories,
            backend=self._backend,
            num_rewinds=self._num_rewinds,
            requested_step=self._requested_step,
            durable_step=self._durable_step,
            totals=self._totals,
            bound=self._bound,
        )

    def change_section(self, recipe: Recipe, step: int) -> None:
        """Save and copy as often as `recipe` says from `step` on. The plan stays."""
        before, self._recipe = self._recipe.checkpoint, recipe
        if (recipe.checkpoint.memory == 0) != (before.memory == 0):  # the memory for copies changes, too
            return self.take_over(self.close(step), step, copied_step=step)
        cost, size = self._backend.save_schedule.cost, self._rank_layout.world_size
        schedule = SaveSchedule(recipe.checkpoint, world_size=size, guess=cost, stride=self._stride)
        self._backend = replace(self._backend, save_schedule=schedule)
        return self._begin_copies(step)

    def _open_store(self) -> "StoreFetcher":
        from trimaran.train.checkpointing.run_store import open_fetcher  # noqa: PLC0415  few runs have a store

        own_disk = bool(self._link.own_disk)
        return open_fetcher(self._run, self._recipe.checkpoint, self._memory_layout, own_disk=own_disk)

    def rewind(self, ending: LoopExit) -> int | None:
        """Restore the newest verified state of at most `ending.step` steps and return its step; None if there is none.

        Checkpoints of later steps are renamed: they hold the state that the run rewinds from.
        """
        self._wait_until_saved(ending.step)
        self._backend.copier.wait()
        self._log_results()
        with self._link.section("restore", ending.step) as report_progress:
            barrier()  # every rank must have committed its copies before the others look for them
            # The other ranks may have created new slots in theirs.
            self._rank_memories = [RankMemory(each.fd) for each in self._rank_memories]
            if self._base is not None and not ending.weights_are_valid:
                self._base.reload()  # what was found wrong may be the base, which no checkpoint has
            restorer = self._build_restorer(compares_base=False)
            restored = self._restore(restorer, newest=ending.step, report_progress=report_progress)
        if restored.tier is None:
            return None
        self.refuse_later_checkpoints(restored.step)
        self._backend.saver.begin(broadcast_json(newest_step(self._run.checkpoints)))
        self._num_rewinds += 1
        self._begin(restored)
        return restored.step

    def refuse_later_checkpoints(self, step: int) -> None:
        """Rename the checkpoints of more than `step` steps, so that no run loads a state that turned out to be bad."""
        self._backend.saver.wait()
        if (uploads := self._backend.saver.uploads) is not None:
            uploads.refuse_later(step)
        if self._rank_layout.rank == (self._rank_layout.node if self._link.own_disk else 0):
            for each in (each for each in complete_steps(self._run.checkpoints) if each > step):
                refuse(
                    step_path(self._run.checkpoints, each), f"the last state known to be good is that of step {step}"
                )

    @property
    def wants_save(self) -> bool:
        """Whether a checkpoint is due. Rank 0 decides; the ranks agree on it with the next step."""
        return self._wants_save

    @property
    def copy_memory(self) -> dict[str, Any]:
        """The memory that the copies take, for the `ready` event."""
        budget = self._backend.slot_pool.budget
        return {
            "slots": budget.num_slots,
            "memory": budget.keeps_copies,
            "slot_bytes": self._backend.copier.share.num_bytes,
        }

    def before_update(self) -> None:
        """Make the update wait for a copy in progress. Must be called before every update."""
        self.num_updates += 1
        if self._has_begun:
            self._backend.copier.before_update()

    def wait_until_copied(self) -> None:
        """Return when no copy in memory reads the state any more, for updates that another thread will make."""
        self._backend.copier.before_update()
        self._backend.copier.wait()

    def after_step(self, step: int, decision: StepDecision) -> None:
        """Copy or save the state after `step` steps, if due. `decision` is what the ranks agreed on a step before."""
        if not self._has_begun:
            return
        entered = time.perf_counter()
        self._step_seconds = (entered - self._returned_at) / self._stride
        self._time_copies()
        self._log_results()
        if decision.save:
            self._save(step)
        elif self._copy_schedule.is_due(step):
            has_memory = self._ask_for_slots()  # all ranks ask at the same steps
            if has_memory:
                self._copy(step)
        if self._rank_layout.rank == 0:
            self._wants_save = self._backend.save_schedule.wants(step, busy=self._backend.saver.busy)
            self._log_bound(step)
        self._returned_at = time.perf_counter()

    def _time_copies(self) -> None:
        """Record the last step and what is known by now about copies; adjust how often the state is copied."""
        schedule, copier = self._copy_schedule, self._backend.copier
        schedule.record_step(self._step_seconds)
        for seconds in copier.device_waits():
            self._totals["stall_seconds"] += seconds
            schedule.record_device_wait(seconds)
        if schedule.is_review_due:
            began = time.thread_time()  # without the wait for other ranks: they would wait in the next step
            schedule.review(copier.commit_seconds)
            seconds = time.thread_time() - began
            self._totals["stall_seconds"] += seconds
            schedule.record_exchange(seconds)

    def finish(self, step: int) -> None:
        """Save `step`, the last one, unless it is saved already, and return when the checkpoint is on disk.

        Nothing is saved with `checkpoint.every: off`.
        """
        is_off = self._recipe.checkpoint.is_off
        if not is_off and step not in (self._requested_step, self._durable_step):
            self._save(step)
        self._wait_until_saved(step)
        if is_off:
            return
        self._log_results()
        if self._durable_step != step:
            is_disk = any(reason in self._failure for reason in DISK_REASONS)
            kind = UnwrittenCheckpointError if is_disk else UserError
            raise kind("K043", f"the last checkpoint could not be written: {self._failure}",
                            where=str(self._run.checkpoints),
                            fix="fix that (for disk space: `trimaran checkpoints prune RUN --keep 1`), then resume "
                            "from the checkpoint before: trimaran resume RUN")  # fmt: skip
        if self._recipe.checkpoint.store:
            uploads = self._backend.saver.uploads
            is_due = broadcast_json(uploads.last_ordered != step if uploads is not None else False)
            if uploads is not None and is_due:
                uploads.start(step)  # after the one that is still on its way

    def wait_until_uploaded(self, step: int) -> None:
        """Return when the object store has the last checkpoint, or the upload has failed. `finish` has started it."""
        if not self._recipe.checkpoint.store or self._recipe.checkpoint.is_off:
            return
        from trimaran.checkpoint.store_uploads import wait_for_uploads  # noqa: PLC0415  few runs have a store

        backend, shown_at = self._backend, time.monotonic()

        def show(fraction: float) -> None:
            nonlocal shown_at
            if self._rank_layout.rank == 0 and time.monotonic() - shown_at > SHOW_UPLOAD_SECONDS:
                shown_at = time.monotonic()
                log.info("uploading step %d to %s: %.0f %%", step, self._recipe.checkpoint.store, 100 * fraction)
                self._journal.event("upload", step=step, url=self._recipe.checkpoint.store, sent=round(fraction, 3))

        with self._link.section("save", step) as report_progress:
            if self._rank_layout.rank == 0:
                wait_for_uploads(backend.saver.uploads, lambda: True, report_progress, show)
                self._log_results()
            backend.saver.share_end(lambda is_finished: wait_for_uploads(backend.saver.uploads, is_finished,
                                                                         report_progress))  # fmt: skip

    def _wait_until_saved(self, step: int) -> None:
        """Return when no checkpoint is being written and no copy is being sent to another node."""
        with self._link.section("save", step) as report_progress:
            self._backend.saver.wait(report_progress)
            if self._backend.peer_copies is not None:
                self._backend.peer_copies.wait()

    def totals(self) -> dict[str, Any]:
        """Return the cost of saving the state so far, and what a fault would have cost at most, for the last event."""
        return self._totals | ({"loss_bound": self._bound.as_dict()} if self._bound else {})

    def loss_bound(self) -> LossBound | None:
        """Return what a fault costs at most from now on; None while that is unknown: no copy or no step is timed."""
        outlive = bool(self._link.rank_memories)
        return bound_loss(self._backend, self._copy_schedule, stride=self._stride, has_copies=outlive)

    def _log_bound(self, step: int) -> None:
        """Write a `loss_bound` event if the bound on what a rank's fault costs has changed notably."""
        schedule, backend = self._copy_schedule, self._backend
        peer_steps = backend.peer_copies.interval_steps if backend.peer_copies is not None else 0
        times = schedule.step_seconds, schedule.commit_seconds, backend.save_schedule.cost
        inputs = (*times, schedule.every, schedule.max_spacing, peer_steps, backend.copier.has_committed)
        if inputs == self._bound_inputs:
            return
        self._bound_inputs = inputs
        bound, last = self.loss_bound(), self._bound
        if bound is None or (last is not None and not bound.differs(last)):
            return
        self._bound = bound
        self._journal.event("loss_bound", step=step, **bound.as_dict())

    def _progress(self) -> dict[str, Any]:
        known = self._base.hashing.known() if self._base else None
        return {**self._state.progress(), **self._data, **({"base": known} if known else {})}

    def _restore(self, restorer: Restorer, *, newest: int, report_progress: Callable[[], None]) -> RestoredState:
        """Restore the newest verified state of at most `newest` steps."""
        reported = last_step(self._run) if self._rank_layout.rank == 0 else 0
        finder = CopyFinder(self._rank_memories, self._memory_layout)
        restored = restorer.load(finder, newest=newest, reported=reported, report_progress=report_progress)
        self._requested_step = self._durable_step = restored.step if restored.tier in ("disk", "store") else -1
        return restored

    def _log_resume(self, restored: RestoredState, began: float) -> None:
        refused = (
            restored.refused + refuse_without_manifest(self._run.checkpoints) if self._rank_layout.rank == 0 else []
        )
        if self._rank_layout.rank == 0 and (restored.tier or refused):
            fields = {"tier": restored.tier, "from_step": restored.step, "refused": refused}
            self._journal.event("resume", step=restored.step, seconds=time.monotonic() - began, **fields)
        if restored.store_failed and self._rank_layout.rank == 0:
            from trimaran.checkpoint.store_uploads import UploadResult  # noqa: PLC0415  few runs have a store

            url = self._recipe.checkpoint.store
            self._log_upload(UploadResult(step=restored.step, url=url, failed=restored.store_failed))

    def _save_before_discard(self, restored: RestoredState, saver: Saver, copier: Copier) -> None:
        """Write a state to disk that exists only in memory which is about to be split into other slots.

        Otherwise a rank that is killed before the first copy to the new slots would lose it.
        """
        if self._recipe.checkpoint.is_off:
            return
        on_disk = self._rank_layout.rank == 0 and restored.step in complete_steps(self._run.checkpoints)
        if restored.tier == "memory" and not broadcast_json(on_disk):
            log.info("the state of step %d is written to disk first: the plan and its copies change", restored.step)
            self._requested_step = restored.step
            saver.start(self._request_from_file(restored.step, copier))
            saver.wait()

    def _begin(self, restored: RestoredState, *, copied_step: int | None = None) -> None:
        """Start to save and copy from the restored state on. Copies of `copied_step` stay until they are replaced."""
        slot_pool = self._backend.slot_pool
        if self._backend.peer_copies is not None:
            self._backend.peer_copies.begin(restored.step)
        kept = restored.step if copied_step is None else copied_step
        slot_pool.clear_except(restored.incarnation, kept, self._backend.copier.share)
        self._has_begun = True
        self._begin_copies(restored.step)
        self._backend.copier.prepare(slot_pool.own_slots, self._state.shards())
        facts = StartFacts(
            keeps_copies=slot_pool.budget.keeps_copies,
            has_memory=slot_pool.budget.num_slots > 0 if self._slots_decided else None,
            is_copied=all_true(slot_pool.slot_of(restored.step) is not None),
            tier=restored.tier,
            is_change=copied_step is not None,
            rewinds=self._recipe.faults.not_finite == "rewind",
            every_step=self._recipe.checkpoint.memory in ("auto", 1),
        )
        if when_to_copy(facts) is CopyTime.NOW:
            self._wait_for_slots()
            if self._backend.slot_pool.budget.keeps_copies:
                self._copy(restored.step)
        self._release_old_memories()
        save_schedule = self._backend.save_schedule
        save_schedule.begin()
        self._wants_save = self._rank_layout.rank == 0 and save_schedule.wants(restored.step, busy=False)
        self._returned_at = time.perf_counter()

    def _begin_copies(self, step: int) -> None:
        """Start to copy to memory from `step` on, as often as the recipe says."""
        budget, section = self._backend.slot_pool.budget, self._recipe.checkpoint
        self._copy_schedule = CopySchedule(
            section.memory if budget.keeps_copies else 0,
            all_gather_int64 if self._rank_layout.world_size > 1 else lambda numbers: numbers[None],
            lost_seconds=Seconds(section.lost_seconds),
            num_slots=budget.own_slots,
            stride=self._stride,
        )
        self._copy_schedule.begin(step)

    def _release_old_memories(self) -> None:
        """Free the memory of ranks that no longer exist, once the state that it may hold is in memory elsewhere."""
        numbers = range(self._memory_layout.local_rank, len(self._rank_memories), self._memory_layout.local_size)
        fds = [self._rank_memories[number].fd for number in numbers]
        old = [fd for fd in fds if fd != self._backend.slot_pool.rank_memory.fd]
        if all_true(not old):
            return
        self._backend.copier.wait()
        barrier()
        for fd in old:
            os.ftruncate(fd, 0)

    def _ask_for_slots(self) -> bool:
        """Return whether there is memory to copy to by now, the same on all ranks. All must ask at the same steps."""
        if not self._slots_decided:
            all_know = self._all_have_slots()
            if all_know:
                self._wait_for_slots()
        return self._slots_decided and self._backend.slot_pool.budget.num_slots > 0

    def _wait_for_slots(self) -> None:
        """Wait until all ranks know whether there is memory to copy to. Without it on one, all give theirs up."""
        if self._slots_decided:
            return
        self._slots_decided, began = True, time.perf_counter()
        if not all_true(self._backend.copier.wait_ready()):
            self._release_slots()
        self._totals["stall_seconds"] += time.perf_counter() - began

    def _all_have_slots(self) -> bool:
        """Return whether every rank knows if it has memory. After some steps they ask each other only now and then."""
        self._num_asks += 1
        if self._rank_layout.world_size == 1:
            return self._backend.copier.is_ready
        if self._num_asks > ASK_EVERY_STEPS and self._num_asks % ASK_EVERY_STEPS:
            return False
        return all_true(self._backend.copier.is_ready)

    def _release_slots(self) -> None:
        """Continue without copies in memory: a node has less memory than it reported."""
        log.warning("there is no memory for copies of the state: it is saved to disk only, and training waits for that")
        backend = self._backend
        backend.copier.release()
        backend.slot_pool.release()
        self._backend = replace(backend, copier=Copier(backend.copier.share), peer_copies=None)
        self._copy_schedule = CopySchedule(0, all_gather_int64)

    def _copy(self, step: int) -> MemorySlot:
        """Copy the state to a slot in memory and return it."""
        began, backend = time.perf_counter(), self._backend
        slot = backend.slot_pool.next_slot(self._slots_in_use())
        self._state.gather()
        metadata = CopyMetadata(
            step=step,
            incarnation=(self._link.attempt, self._num_rewinds),
            rank=self._rank_layout.rank,
            world_size=self._rank_layout.world_size,
            progress=self._progress(),
        )
        with self._link.section("copy", step):
            backend.copier.copy(slot, metadata, self._state.shards())
        backend.slot_pool.mark_filled(slot, step)
        if backend.peer_copies is not None:
            backend.peer_copies.offer(step, slot, step_seconds=self._step_seconds)
        host_seconds = time.perf_counter() - began
        self._totals["copies"] += 1
        self._totals["stall_seconds"] += host_seconds
        self._copy_schedule.record_copy(step, host_seconds)
        return slot

    def _slots_in_use(self) -> list[MemorySlot]:
        """Return the slots that are being read: to write them to disk, or to send them to another node."""
        backend = self._backend
        written = [self._writing] if self._writing is not None and backend.saver.busy else []
        return written + (backend.peer_copies.in_use if backend.peer_copies is not None else [])

    def _save(self, step: int) -> None:
        """Start to write the state of `step` to disk, and wait for it if the save is not asynchronous."""
        with self._link.section("save", step) as report_progress:
            self._wait_for_saver(report_progress)  # one at a time; other ranks may be slightly behind rank 0
            self._log_results()
            self._wait_for_slots()
            has_slot = self._backend.slot_pool.budget.own_slots > 0
            request = self._request_from_slot(step) if has_slot else self._request_from_file(step, self._backend.copier)
            self._requested_step = step
            self._backend.saver.start(request)
            self._backend.save_schedule.record_start()
            if not self._is_asynchronous:
                self._wait_for_saver(report_progress)

    @property
    def _is_asynchronous(self) -> bool:
        """Whether training continues while a checkpoint is written."""
        return self._recipe.checkpoint.asynchronous and self._backend.slot_pool.budget.own_slots > 0

    def _wait_for_saver(self, report_progress: Callable[[], None]) -> None:
        """Return when no checkpoint is being written; count the wait as a stall."""
        began = time.perf_counter()
        self._backend.saver.wait(report_progress)
        self._totals["stall_seconds"] += time.perf_counter() - began

    def _request_from_slot(self, step: int) -> SaveRequest:
        backend = self._backend
        slot = backend.slot_pool.slot_of(step) or self._copy(step)
        self._writing = slot
        return SaveRequest(
            step=step,
            share=backend.copier.share,
            memory=slot.data[: backend.copier.share.num_bytes],
            wait_ready=backend.copier.wait,
            progress=self._progress(),
            stall_seconds=backend.copier.stall_seconds,
        )

    def _request_from_file(self, step: int, copier: Copier) -> SaveRequest:
        """Return a request whose memory is a file on the disk, since there is no slot."""
        self._state.gather()
        metadata = CopyMetadata(
            step=step, incarnation=(0, 0), rank=self._rank_layout.rank, world_size=self._rank_layout.world_size
        )
        return request_from_file(self._run.checkpoints, copier, metadata, self._state.shards(), self._progress())

    def _log_results(self) -> None:
        """Record the saves that ended since the last call, and log them on rank 0."""
        for result in self._backend.saver.results():
            if not self._is_asynchronous:
                result = replace(result, stall_seconds=result.stall_seconds + result.seconds)
            self._failure = result.failed
            self._totals["failed" if result.failed else "checkpoints"] += 1
            if not result.failed:
                self._durable_step = result.step
                cost = SaveCost(stall=Seconds(result.stall_seconds), write=Seconds(result.seconds))
                self._backend.save_schedule.record_cost(cost)
            if self._rank_layout.rank == 0:
                num_skipped = self._backend.save_schedule.num_skipped
                self._journal.event("checkpoint", step=result.step, **event_fields(result), skipped=num_skipped)
        for each in self._backend.saver.uploads.results() if self._backend.saver.uploads else ():
            self._log_upload(each)

    def _log_upload(self, result: "UploadResult") -> None:
        if result.failed:
            log.warning("step %d is not in the store %s: %s", result.step, result.url, result.failed)
        self._journal.event("upload", step=result.step, **result.as_dict())
