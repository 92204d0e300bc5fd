"""Restores the state of a run when it starts or rewinds, and decides when to copy it to memory and save it to disk."""

import time
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from trimaran.checkpoint import MemorySource, SaveRequest, barrier
from trimaran.core import Recipe
from trimaran.parallel import broadcast_json
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
        self._inputs, self._memories, self.copies, self.saves, self._totals = inputs, memories, copies, saves, totals
        self._layout, self._link, self._num_rewinds = memories.layout, inputs.link, num_rewinds
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
            seconds = time.monotonic() - began
            refused = restored.refused + refuse_without_manifest(inputs.run)
            if restored.tier or refused:
                fields = {"tier": restored.tier, "from_step": restored.step, "refused": refused}
                inputs.journal.event("resume", step=restored.step, seconds=seconds, **fields)
            if restored.store_failed:
                from trimaran.checkpoint.store.store_uploads import UploadResult  # noqa: PLC0415  few runs have a store

                url = inputs.recipe.checkpoint.store
                log_upload(inputs.journal, UploadResult(step=restored.step, url=url, failed=restored.store_failed))
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
        cls, inputs: CheckpointInputs, before: "Checkpointer", step: int, *, copied_step: int
    ) -> "Checkpointer":
        """Close the checkpointer `before`, and save the state from `step` on in place of it.

        What that one copied to memory after `copied_step` stays there until the first new copy, if the new share fits
        into the same slots; if not, it is lost before the new copy is made.
        """
        before._wait_for_all(step)
        before.saves.saver.close()
        before.copies.close()
        memories, totals = before._memories, before._totals
        slots = plan_slots(inputs, memories)
        saver = open_saver(inputs, memories.layout, before.saves.saver.uploads)
        saves = DiskSaves(
            inputs,
            memories.layout,
            saver,
            totals,
            share_bytes=slots.num_bytes,
            saved=before.saves.saved_step,
            requested=before.saves.requested_step,
        )
        copies = StateCopies(inputs, memories, slots, saver, totals, before.copies.give_pinned_memory(slots))
        return cls(
            inputs,
            memories,
            copies,
            saves,
            totals,
            RestoredState(step=step, tier="memory", incarnation=(inputs.link.attempt, before._num_rewinds)),
            num_rewinds=before._num_rewinds,
            bound=before._bound,
            copied_step=copied_step,
        )

    def change_section(self, recipe: Recipe, step: int) -> "Checkpointer":
        """Return the checkpointer that saves and copies as often as `recipe` says from `step` on. The plan stays."""
        inputs, before = replace(self._inputs, recipe=recipe), self._inputs.recipe.checkpoint
        if (recipe.checkpoint.memory == 0) != (before.memory == 0):  # the memory for copies changes, too
            return Checkpointer.take_over(inputs, self, step, copied_step=step)
        self._inputs = inputs
        self.saves.change_recipe(inputs)
        self.copies.change_recipe(inputs, step)
        return self

    def rewind(self, ending: LoopExit) -> int | None:
        """Restore the newest verified state of at most `ending.step` steps and return its step; None if there is none.

        Checkpoints of later steps are renamed: they hold the state that the run rewinds from.
        """
        self._wait_for_all(ending.step)
        with self._link.section("restore", ending.step) as report_progress:
            barrier()  # every rank must have committed its copies before the others look for them
            self._memories = self._memories.read_again()
            if not ending.weights_are_valid:
                self._inputs.base.reload()  # what was found wrong may be the base, which no checkpoint has
            # The base stays the same while the run trains.
            restored = _restore(self._inputs, self._memories, Base(), ending.step, report_progress)
        if restored.tier is None:
            return None
        self.saves.rewound(restored.step, is_saved=restored.tier != "memory")
        self._num_rewinds += 1
        self._begin(restored, None)
        return restored.step

    @property
    def is_saving(self) -> bool:
        return self.saves.saver.busy

    def before_update(self) -> None:
        """Make the update wait for a copy in progress. Must be called before every update."""
        self.copies.copier.before_update()

    def wait_until_copied(self) -> None:
        """Return when no copy in memory reads the state any more, for updates that another thread will make."""
        self.copies.copier.before_update()
        self.copies.copier.wait()

    def open_copy(self, step: int) -> MemorySource | None:
        return self.copies.open_copy(step)

    def after_step(self, step: int, decision: StepDecision) -> None:
        """Copy or save the state after `step` steps, if due. `decision` is what the ranks agreed on a step before."""
        step_seconds = (time.perf_counter() - self._returned_at) / self._inputs.plan.sync_every
        self.copies.after_step(step_seconds)
        self._log_results()
        if decision.save:
            self._save(step)
        else:
            self.copies.copy_if_due(step)
        if self._layout.rank == 0:
            self.wants_save = self.saves.schedule.wants(step, busy=self.is_saving)
            inputs = (*self.copies.bound_inputs(), self.saves.schedule.cost)
            if inputs != self._bound_inputs:
                self._bound_inputs = inputs
                bound = self.copies.loss_bound(self.saves.schedule)
                if bound is not None and (self._bound is None or bound.differs(self._bound)):
                    self._bound = bound
                    self._inputs.journal.event("loss_bound", step=step, **bound.as_dict())
        self._returned_at = time.perf_counter()

    def finish(self, step: int) -> None:
        """Save `step`, the last one, unless it is saved or `checkpoint.every` is off. Return when it is on disk."""
        section = self._inputs.recipe.checkpoint
        if not section.is_off and step not in (self.saves.requested_step, self.saves.saved_step):
            self._save(step)
        self._wait_until_saved(step)
        if not section.is_off:
            self._log_results()
            self.saves.refuse_unwritten(step)
            uploads = self.saves.saver.uploads
            is_due = section.store and broadcast_json(uploads is not None and uploads.last_ordered != step)
            if uploads is not None and is_due:
                uploads.start(step)  # after the one that is still on its way

    def totals(self) -> dict[str, Any]:
        """Return the cost of saving the state so far, and what a fault would have cost at most, for the last event."""
        return asdict(self._totals) | ({"loss_bound": self._bound.as_dict()} if self._bound else {})

    def _begin(self, restored: RestoredState, copied_step: int | None) -> None:
        """Start to save and copy from the restored state on. Copies of `copied_step` stay until they are replaced."""
        self.copies.begin(restored, num_rewinds=self._num_rewinds, copied_step=copied_step)
        self.saves.schedule.begin()
        # Rank 0 decides whether a checkpoint is due; the ranks agree on it with the next step.
        self.wants_save = self._layout.rank == 0 and self.saves.schedule.wants(restored.step, busy=False)
        self._returned_at = time.perf_counter()

    def _save(self, step: int) -> None:
        copies, saves = self.copies, self.saves
        with self._link.section("save", step) as report_progress:
            saves.wait_and_count(report_progress)  # one at a time; other ranks may be slightly behind rank 0
            self._log_results()
            copies.decide_slots()
            if copies.has_slots:
                slot, copier = copies.hold_for_save(step), copies.copier
                request = SaveRequest(
                    step=step,
                    share=copier.share,
                    memory=slot.data[: copier.share.num_bytes],
                    wait_ready=copier.wait,
                    progress=self._inputs.progress(),
                    stall_seconds=copier.stall_seconds,
                )
            else:
                request = saves.request_from_file(step, copies.copier)
            saves.start(request)
            if not self._is_asynchronous:
                saves.wait_and_count(report_progress)

    @property
    def _is_asynchronous(self) -> bool:
        return self._inputs.recipe.checkpoint.asynchronous and self.copies.has_slots

    def _wait_until_saved(self, step: int) -> None:
        with self._link.section("save", step) as report_progress:
            self.saves.saver.wait(report_progress)
            self.copies.wait_until_sent()

    def _wait_for_all(self, step: int) -> None:
        self._wait_until_saved(step)
        self.copies.copier.wait()
        self._log_results()

    def _log_results(self) -> None:
        self.saves.log_results(is_asynchronous=self._is_asynchronous)


class DelegatingSaver:
    """Saves as a checkpointer does: the base of savers that do one thing otherwise. See `StepSaver`."""

    def __init__(self, checkpointer: Checkpointer) -> None:
        self.checkpointer = checkpointer

    @property
    def wants_save(self) -> bool:
        return self.checkpointer.wants_save

    def before_update(self) -> None:
        self.checkpointer.before_update()

    def after_step(self, step: int, decision: StepDecision) -> None:
        self.checkpointer.after_step(step, decision)

    def wait_until_copied(self) -> None:
        self.checkpointer.wait_until_copied()

    def open_copy(self, step: int) -> MemorySource | None:
        return self.checkpointer.open_copy(step)


def _restore(
    inputs: CheckpointInputs, memories: RankMemories, base: Base, newest: int, report_progress: Report
) -> RestoredState:
    """Restore the newest intact state of at most `newest` steps. Every rank must call it."""
    run, state, recipe, layout = inputs.run, inputs.state, inputs.recipe, memories.shared_layout
    own_disk, reported = bool(inputs.link.own_disk), broadcast_json(last_step(run) if layout.rank == 0 else 0)
    memory = MemoryTier(state, memories.readable, layout, base, newest=newest, reported=reported)
    disk_tier = partial(DiskTier, state, run.checkpoints, layout, recipe, memory, newest=newest, own_disk=own_disk)
    fill = partial(restore, state, folder=run.checkpoints, report_progress=report_progress, data=inputs.data, base=base)
    if not recipe.checkpoint.store:
        restored = fill([memory, disk_tier()])
    else:
        from trimaran.train.checkpointing.remote_states import open_fetcher  # noqa: PLC0415  few runs have a store

        with closing(open_fetcher(run, recipe.checkpoint, layout, own_disk=own_disk)) as fetcher:
            disk = disk_tier(fetcher=fetcher)
            restored = fill([memory, disk, StoreTier(fetcher, run.checkpoints, disk, memory, newest=newest)])
            restored = replace(restored, store_failed=fetcher.failed)
    if own_disk and restored.tier is None and not restored.refused and not reported:
        from trimaran.train.checkpointing.remote_states import refuse_lost_head  # noqa: PLC0415  few runs have several

        refuse_lost_head(run.checkpoints)
    return restored
