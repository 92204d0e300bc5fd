"""Restores the state of a run when it starts or rewinds, and decides when to copy it to memory and save it to disk."""

import time
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

from trimaran.checkpoint.memory_copies import MemorySource
from trimaran.checkpoint.rank_layout import barrier
from trimaran.core import Recipe
from trimaran.parallel.comm.json_exchange import broadcast_json
from trimaran.runs import last_step
from trimaran.train.agreement import LoopExit, StepDecision
from trimaran.train.checkpointing.disk_saves import (
    DiskSaves,
    log_upload,
    open_saver,
    refuse_small_disk,
    refuse_without_manifest,
)
from trimaran.train.checkpointing.save_interval import LossBound
from trimaran.train.checkpointing.state_copies import StateCopies, plan_slots
from trimaran.train.checkpointing.tiers import (
    Base,
    CheckpointInputs,
    DiskTier,
    MemoryTier,
    RankMemories,
    Report,
    RestoredState,
    SaveTotals,
    StoreTier,
    find_memories,
    refuse_new_start,
    restore,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedSession:
    """What the checkpointer of the next plan takes over from a closed one, in the same processes."""

    memories: RankMemories
    copies: StateCopies
    saves: DiskSaves
    totals: SaveTotals
    num_rewinds: int
    bound: LossBound | None


class Checkpointer:
    """Saves the state of a rank to memory and disk while it trains. Every rank must make the same calls in order.

    It starts from a restored state: see `resume`, `receive` and `take_over`. `start` is the step of that state.
    """

    def __init__(
        self,
        inputs: CheckpointInputs,
        memories: RankMemories,
        copies: StateCopies,
        saves: DiskSaves,
        totals: SaveTotals,
        restored: RestoredState,
        *,
        num_rewinds: int = 0,
        bound: LossBound | None = None,
        copied_step: int | None = None,
    ) -> None:
        self._inputs, self._memories, self._copies, self._saves, self._totals = inputs, memories, copies, saves, totals
        self._layout, self._link, self._journal = memories.layout, inputs.link, inputs.journal
        self._num_rewinds = num_rewinds
        self._bound = bound  # as the last `loss_bound` event has it
        self._bound_inputs: tuple[object, ...] = ()  # what it depended on when it was last computed
        self.start = restored.step
        self._begin(restored, copied_step)

    @classmethod
    def resume(cls, inputs: CheckpointInputs) -> "Checkpointer":
        """Restore the newest intact state, if there is one, and save and copy from there on."""
        memories, newest, began = find_memories(inputs), inputs.recipe.train.steps, time.monotonic()
        with inputs.link.section("restore") as report_progress:
            restored = _restore(inputs, memories, inputs.base, newest, report_progress)
        if memories.layout.rank == 0:
            _log_resume(inputs, restored, time.monotonic() - began)
        if restored.tier is None:
            refuse_new_start(inputs.run, memories.layout, newest=newest)
        return cls._with_new_parts(inputs, memories, restored)

    @classmethod
    def receive(cls, inputs: CheckpointInputs, step: int) -> "Checkpointer":
        """Save and copy from `step` on: the state of that step came from another replica. No disk is read."""
        return cls._with_new_parts(inputs, find_memories(inputs), RestoredState(step=step))

    @classmethod
    def _with_new_parts(
        cls, inputs: CheckpointInputs, memories: RankMemories, restored: RestoredState
    ) -> "Checkpointer":
        slots, layout, is_restart = plan_slots(inputs, memories), memories.layout, restored.tier == "memory"
        if not is_restart and not inputs.recipe.checkpoint.is_off:  # a restart finds out at the next save
            refuse_small_disk(inputs.run, layout, slots.share_bytes, own_disk=bool(inputs.link.own_disk))
        totals, on_disk = SaveTotals(), restored.step if restored.tier in ("disk", "store") else -1
        saver = open_saver(inputs, layout)
        saves = DiskSaves(inputs, layout, saver, totals, share_bytes=slots.num_bytes, saved=on_disk, requested=on_disk)
        if is_restart and not slots.all_fit:
            saves.save_before_discard(restored.step, slots.copier)
        copies = StateCopies(inputs, memories, slots, saver, totals)
        return cls(inputs, memories, copies, saves, totals, restored)

    @classmethod
    def take_over(
        cls, inputs: CheckpointInputs, closed: ClosedSession, step: int, *, copied_step: int
    ) -> "Checkpointer":
        """Save the state from `step` on in place of a checkpointer that was closed.

        What that one copied to memory after `copied_step` stays there until the first new copy, if the new share fits
        into the same slots; if not, it is lost before the new copy is made.
        """
        memories, before, totals = closed.memories, closed.saves, closed.totals
        slots = plan_slots(inputs, memories)
        saver = open_saver(inputs, memories.layout, before.saver.uploads)
        saves = DiskSaves(
            inputs,
            memories.layout,
            saver,
            totals,
            share_bytes=slots.num_bytes,
            saved=before.saved_step,
            requested=before.requested_step,
        )
        pinned = closed.copies.give_pinned_memory(slots)
        copies = StateCopies(inputs, memories, slots, saver, totals, pinned)
        incarnation = (inputs.link.attempt, closed.num_rewinds)
        return cls(
            inputs,
            memories,
            copies,
            saves,
            totals,
            RestoredState(step=step, tier="memory", incarnation=incarnation),
            num_rewinds=closed.num_rewinds,
            bound=closed.bound,
            copied_step=copied_step,
        )

    def close(self, step: int) -> ClosedSession:
        """Wait for copies and saves, and end them. Returns what the next checkpointer takes over."""
        self._wait_until_saved(step)
        self._copies.wait()
        self._log_results()
        self._saves.saver.close()
        self._copies.close()
        return ClosedSession(
            memories=self._memories,
            copies=self._copies,
            saves=self._saves,
            totals=self._totals,
            num_rewinds=self._num_rewinds,
            bound=self._bound,
        )

    def change_section(self, recipe: Recipe, step: int) -> "Checkpointer":
        """Return the checkpointer that saves and copies as often as `recipe` says from `step` on. The plan stays."""
        inputs, before = replace(self._inputs, recipe=recipe), self._inputs.recipe.checkpoint
        if (recipe.checkpoint.memory == 0) != (before.memory == 0):  # the memory for copies changes, too
            return Checkpointer.take_over(inputs, self.close(step), step, copied_step=step)
        self._inputs = inputs
        self._saves.change_recipe(inputs)
        self._copies.change_recipe(inputs, step)
        return self

    def rewind(self, ending: LoopExit) -> int | None:
        """Restore the newest verified state of at most `ending.step` steps and return its step; None if there is none.

        Checkpoints of later steps are renamed: they hold the state that the run rewinds from.
        """
        self._wait_until_saved(ending.step)
        self._copies.wait()
        self._log_results()
        with self._link.section("restore", ending.step) as report_progress:
            barrier()  # every rank must have committed its copies before the others look for them
            self._memories = self._memories.read_again()
            if not ending.weights_are_valid:
                self._inputs.base.reload()  # what was found wrong may be the base, which no checkpoint has
            # The base stays the same while the run trains.
            restored = _restore(self._inputs, self._memories, Base(), ending.step, report_progress)
        if restored.tier is None:
            return None
        self._saves.rewound(restored.step, is_saved=restored.tier != "memory")
        self._saves.refuse_later(restored.step)
        self._saves.link_unchanged_files()
        self._num_rewinds += 1
        self._begin(restored, None)
        return restored.step

    def refuse_later_checkpoints(self, step: int) -> None:
        """Rename the checkpoints of more than `step` steps, so that no run loads a state that turned out to be bad."""
        self._saves.refuse_later(step)

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written to disk."""
        return self._saves.saver.busy

    @property
    def wants_save(self) -> bool:
        """Whether a checkpoint is due. Rank 0 decides; the ranks agree on it with the next step."""
        return self._wants_save

    @property
    def copy_memory(self) -> dict[str, Any]:
        """The memory that the copies take, for the `ready` event."""
        return self._copies.memory_facts()

    def before_update(self) -> None:
        """Make the update wait for a copy in progress. Must be called before every update."""
        self._copies.before_update()

    def wait_until_copied(self) -> None:
        """Return when no copy in memory reads the state any more, for updates that another thread will make."""
        self._copies.before_update()
        self._copies.wait()

    def copy_before_change(self, step: int) -> None:
        """Copy the state to memory, if there is any for it: a crash during a change of the plan then loses no step."""
        self._copies.copy_before_change(step)

    def open_copy(self, step: int) -> MemorySource | None:
        """Return the copy of `step` in memory; see `StateCopies.open_copy`."""
        return self._copies.open_copy(step)

    def after_step(self, step: int, decision: StepDecision) -> None:
        """Copy or save the state after `step` steps, if due. `decision` is what the ranks agreed on a step before."""
        step_seconds = (time.perf_counter() - self._returned_at) / self._inputs.plan.sync_every
        self._copies.after_step(step_seconds)
        self._log_results()
        if decision.save:
            self._save(step)
        else:
            self._copies.copy_if_due(step)
        if self._layout.rank == 0:
            self._wants_save = self._saves.wants(step)
            self._log_bound(step)
        self._returned_at = time.perf_counter()

    def finish(self, step: int) -> None:
        """Save `step`, the last one, unless it is saved already, and return when the checkpoint is on disk.

        Nothing is saved with `checkpoint.every: off`.
        """
        section = self._inputs.recipe.checkpoint
        if not section.is_off and step not in (self._saves.requested_step, self._saves.saved_step):
            self._save(step)
        self._wait_until_saved(step)
        if section.is_off:
            return
        self._log_results()
        self._saves.refuse_unwritten(step)
        if section.store:
            self._saves.upload_last(step)

    def wait_until_uploaded(self, step: int) -> None:
        """Return when the object store has the last checkpoint, or the upload has failed. `finish` has started it."""
        section = self._inputs.recipe.checkpoint
        if section.store and not section.is_off:
            self._saves.wait_until_uploaded(step)

    def totals(self) -> dict[str, Any]:
        """Return the cost of saving the state so far, and what a fault would have cost at most, for the last event."""
        return asdict(self._totals) | ({"loss_bound": self._bound.as_dict()} if self._bound else {})

    def loss_bound(self) -> LossBound | None:
        """Return what a fault costs at most from now on; None while that is unknown: no copy or no step is timed."""
        return self._copies.loss_bound(self._saves.schedule)

    def _begin(self, restored: RestoredState, copied_step: int | None) -> None:
        """Start to save and copy from the restored state on. Copies of `copied_step` stay until they are replaced."""
        self._copies.begin(restored, num_rewinds=self._num_rewinds, copied_step=copied_step)
        self._saves.schedule.begin()
        self._wants_save = self._layout.rank == 0 and self._saves.schedule.wants(restored.step, busy=False)
        self._returned_at = time.perf_counter()

    def _log_bound(self, step: int) -> None:
        """Write a `loss_bound` event if the bound on what a rank's fault costs has changed notably."""
        inputs = (*self._copies.bound_inputs(), self._saves.schedule.cost)
        if inputs == self._bound_inputs:
            return
        self._bound_inputs = inputs
        bound, last = self.loss_bound(), self._bound
        if bound is None or (last is not None and not bound.differs(last)):
            return
        self._bound = bound
        self._journal.event("loss_bound", step=step, **bound.as_dict())

    def _save(self, step: int) -> None:
        """Start to write the state of `step` to disk, and wait for it if the save is not asynchronous."""
        copies, saves = self._copies, self._saves
        with self._link.section("save", step) as report_progress:
            saves.wait_and_count(report_progress)  # one at a time; other ranks may be slightly behind rank 0
            self._log_results()
            copies.decide_slots()
            if copies.has_slots:
                request = saves.request_from_slot(step, copies.copier, copies.hold_for_save(step))
            else:
                request = saves.request_from_file(step, copies.copier)
            saves.start(request)
            if not self._is_asynchronous:
                saves.wait_and_count(report_progress)

    @property
    def _is_asynchronous(self) -> bool:
        """Whether training continues while a checkpoint is written."""
        return self._inputs.recipe.checkpoint.asynchronous and self._copies.has_slots

    def _wait_until_saved(self, step: int) -> None:
        """Return when no checkpoint is being written and no copy is being sent to another node."""
        with self._link.section("save", step) as report_progress:
            self._saves.saver.wait(report_progress)
            self._copies.wait_until_sent()

    def _log_results(self) -> None:
        self._saves.log_results(is_asynchronous=self._is_asynchronous)


def _restore(
    inputs: CheckpointInputs, memories: RankMemories, base: Base, newest: int, report_progress: Report
) -> RestoredState:
    """Restore the newest intact state of at most `newest` steps. Every rank must call it."""
    run, state, recipe, layout = inputs.run, inputs.state, inputs.recipe, memories.shared_layout
    own_disk, reported = bool(inputs.link.own_disk), broadcast_json(last_step(run) if layout.rank == 0 else 0)
    memory = MemoryTier(state, memories.readable, layout, base, newest=newest, reported=reported)
    if not recipe.checkpoint.store:
        disk = DiskTier(state, run.checkpoints, layout, recipe, memory, newest=newest, own_disk=own_disk)
        restored = restore(state, [memory, disk], run.checkpoints, report_progress, data=inputs.data, base=base)
    else:
        from trimaran.train.checkpointing.remote_states import open_fetcher  # noqa: PLC0415  few runs have a store

        with closing(open_fetcher(run, recipe.checkpoint, layout, own_disk=own_disk)) as fetcher:
            disk = DiskTier(
                state, run.checkpoints, layout, recipe, memory, newest=newest, own_disk=own_disk, fetcher=fetcher
            )
            store = StoreTier(fetcher, run.checkpoints, disk, memory, newest=newest)
            tiers = [memory, disk, store]
            restored = restore(state, tiers, run.checkpoints, report_progress, data=inputs.data, base=base)
            restored = replace(restored, store_failed=fetcher.failed)
    if own_disk and restored.tier is None and not restored.refused and not reported:
        from trimaran.train.checkpointing.remote_states import refuse_lost_head  # noqa: PLC0415  few runs have several

        refuse_lost_head(run.checkpoints)
    return restored


def _log_resume(inputs: CheckpointInputs, restored: RestoredState, seconds: float) -> None:
    refused = restored.refused + refuse_without_manifest(inputs.run)
    if restored.tier or refused:
        fields = {"tier": restored.tier, "from_step": restored.step, "refused": refused}
        inputs.journal.event("resume", step=restored.step, seconds=seconds, **fields)
    if restored.store_failed:
        from trimaran.checkpoint.store.store_uploads import UploadResult  # noqa: PLC0415  few runs have a store

        url = inputs.recipe.checkpoint.store
        log_upload(inputs.journal, UploadResult(step=restored.step, url=url, failed=restored.store_failed))
