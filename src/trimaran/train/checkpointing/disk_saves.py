"""Checkpoints on disk: when the next one is due, the one that is being written, and what became of the last."""

import logging
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from trimaran.checkpoint import (
    Copier,
    CopyMetadata,
    DurableDisk,
    Manifest,
    RankLayout,
    RankMemory,
    Saver,
    SaveRequest,
    TorchStore,
    complete_steps,
    newest_step,
    refuse,
    remove_drafts,
    step_of,
    step_path,
    without_manifest,
)
from trimaran.core import Seconds, UserError, read_regular_text, show_bytes, templated
from trimaran.parallel import all_gather_json, broadcast_json
from trimaran.runs import DISK_REASONS, Journal, RunDirectory, newest_term
from trimaran.train.checkpointing.save_interval import SaveCost, SaveSchedule
from trimaran.train.checkpointing.tiers import CheckpointInputs, SaveTotals
from trimaran.train.process.supervisor_link import supervisor_store

if TYPE_CHECKING:
    from trimaran.checkpoint.store.store_uploads import StoreUploads, UploadResult

log = logging.getLogger(__name__)

COPY_BYTES_PER_SECOND = 4e9  # guesses, until a checkpoint has been measured
DISK_BYTES_PER_SECOND = 2e8
EVENT_FIELDS = ("path", "seconds", "stall_seconds", "bytes", "written_bytes", "saved_bytes")  # of a result
SHOW_UPLOAD_SECONDS = 2.0  # between reports of the upload that the run waits for at its end


class UnwrittenCheckpointError(UserError):
    """The disk could not take the last checkpoint. Starting again continues from the one before, once it can."""


class DiskSaves:
    """Writes checkpoints together with the other ranks, and records their results. Every rank makes the same calls.

    `saved_step` is the step of the last complete checkpoint, -1 before the first. `requested_step` is that of the last
    one that was started.
    """

    def __init__(
        self,
        inputs: CheckpointInputs,
        layout: RankLayout,
        saver: Saver,
        totals: SaveTotals,
        *,
        share_bytes: int,
        saved: int,
        requested: int,
    ) -> None:
        self._inputs, self._layout, self.saver, self._totals = inputs, layout, saver, totals
        self.saved_step, self.requested_step, self._failure = saved, requested, ""
        stall, write = (Seconds(share_bytes / speed) for speed in (COPY_BYTES_PER_SECOND, DISK_BYTES_PER_SECOND))
        self.schedule = self._new_schedule(inputs, SaveCost(stall=stall, write=write))

    def _new_schedule(self, inputs: CheckpointInputs, guess: SaveCost) -> SaveSchedule:
        stride = inputs.plan.sync_every
        return SaveSchedule(inputs.recipe.checkpoint, world_size=self._layout.world_size, guess=guess, stride=stride)

    def change_recipe(self, inputs: CheckpointInputs) -> None:
        self._inputs = inputs
        self.schedule = self._new_schedule(inputs, self.schedule.cost)

    def rewound(self, step: int, *, is_saved: bool) -> None:
        """Go on from a restored state of `step`. `is_saved`: it was restored from a checkpoint."""
        self.saved_step = self.requested_step = step if is_saved else -1
        self.refuse_later(step)
        # Link what is unchanged since the newest checkpoint that is there now, instead of writing it again.
        self.saver.begin(broadcast_json(newest_step(self._inputs.run.checkpoints)))

    def start(self, request: SaveRequest) -> None:
        """Start to write a checkpoint. No other may be in progress."""
        self.requested_step = request.step
        self.saver.start(request)
        self.schedule.record_start()

    def request_from_file(self, step: int, copier: Copier) -> SaveRequest:
        """Return the request to write the state from a file on the same disk: there is no slot in memory."""
        state, folder, share = self._inputs.state, self._inputs.run.checkpoints, copier.share
        state.gather()
        began, rank, size = time.perf_counter(), self._layout.rank, self._layout.world_size
        metadata = CopyMetadata(step=step, incarnation=(0, 0), rank=rank, world_size=size)
        try:
            folder.mkdir(exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                memory = RankMemory(file.fileno())
                memory.create_slots(1, num_bytes=share.num_bytes, items_bytes=len(copier.items))
            copier.copy(memory.slots[0], metadata, state.shards())
        except OSError as error:
            return SaveRequest(step=step, share=share, memory=torch.empty(0), failure=str(error))
        return SaveRequest(
            step=step,
            share=share,
            memory=memory.slots[0].data[: share.num_bytes],
            progress=self._inputs.progress(),
            stall_seconds=time.perf_counter() - began,
        )

    def save_before_discard(self, step: int, copier: Copier) -> None:
        """Write the restored state, which only memory holds, before that memory is split into other slots.

        Otherwise a rank that is killed before the first copy to the new slots would lose it.
        """
        on_disk = self._layout.rank == 0 and step in complete_steps(self._inputs.run.checkpoints)
        if not self._inputs.recipe.checkpoint.is_off and not broadcast_json(on_disk):
            log.info("the state of step %d is written to disk first: the plan and its copies change", step)
            self.requested_step = step
            self.saver.start(self.request_from_file(step, copier))
            self.saver.wait()

    def wait_and_count(self, report_progress: Callable[[], None]) -> None:
        """Return when no checkpoint is being written; count the wait as a stall."""
        began = time.perf_counter()
        self.saver.wait(report_progress)
        self._totals.stall_seconds += time.perf_counter() - began

    def log_results(self, *, is_asynchronous: bool) -> None:
        journal = self._inputs.journal
        for each in self.saver.results():
            result = each if is_asynchronous else replace(each, stall_seconds=each.stall_seconds + each.seconds)
            self._failure = result.failed
            if result.failed:
                self._totals.failed += 1
            else:
                self._totals.checkpoints += 1
                self.saved_step = result.step
                self.schedule.cost = SaveCost(stall=Seconds(result.stall_seconds), write=Seconds(result.seconds))
            if self._layout.rank == 0:
                fields = {name: getattr(result, name) for name in EVENT_FIELDS}
                fields |= {"failed": result.failed} if result.failed else {}
                journal.event("checkpoint", step=result.step, **fields, skipped=self.schedule.num_skipped)
        for upload in self.saver.uploads.results() if self.saver.uploads else ():
            log_upload(journal, upload)

    def refuse_unwritten(self, step: int) -> None:
        if self.saved_step == step:
            return
        is_disk = any(reason in self._failure for reason in DISK_REASONS)
        kind = UnwrittenCheckpointError if is_disk else UserError
        raise kind("K043", templated("the last checkpoint could not be written: {failure}", failure=self._failure),
                   where=str(self._inputs.run.checkpoints),
                   fix="fix that (for disk space: `trimaran checkpoints prune RUN --keep 1`), then resume "
                   "from the checkpoint before: trimaran resume RUN")  # fmt: skip

    def refuse_later(self, step: int) -> None:
        """Rename the checkpoints of more than `step` steps, so that no run loads a state that turned out to be bad."""
        self.saver.wait()
        if (uploads := self.saver.uploads) is not None:
            uploads.refuse_later(step)
        folder = self._inputs.run.checkpoints
        if self._layout.rank == (self._layout.node if self._inputs.link.own_disk else 0):
            for each in (each for each in complete_steps(folder) if each > step):
                refuse(step_path(folder, each), f"the last state known to be good is that of step {step}")

    def wait_until_uploaded(self, step: int) -> None:
        """Return when the object store has the last checkpoint, or the upload has failed. It must have started."""
        section = self._inputs.recipe.checkpoint
        if not section.store or section.is_off:
            return
        from trimaran.checkpoint.store.store_uploads import wait_for_uploads  # noqa: PLC0415  few runs have a store

        uploads, url, shown_at = self.saver.uploads, section.store, time.monotonic()

        def show(fraction: float) -> None:
            nonlocal shown_at
            if self._layout.rank == 0 and time.monotonic() - shown_at > SHOW_UPLOAD_SECONDS:
                shown_at = time.monotonic()
                log.info("uploading step %d to %s: %.0f %%", step, url, 100 * fraction)
                self._inputs.journal.event("upload", step=step, url=url, sent=round(fraction, 3))

        with self._inputs.link.section("save", step) as report_progress:
            if self._layout.rank == 0:
                wait_for_uploads(uploads, lambda: True, report_progress, show)
                self.log_results(is_asynchronous=True)
            self.saver.share_end(lambda is_finished: wait_for_uploads(uploads, is_finished, report_progress))


def log_upload(journal: Journal, result: "UploadResult") -> None:
    if result.failed:
        log.warning("step %d is not in the store %s: %s", result.step, result.url, result.failed)
    journal.event("upload", step=result.step, **result.as_dict())


def open_saver(inputs: CheckpointInputs, layout: RankLayout, uploads: "StoreUploads | None" = None) -> Saver:
    """Return the saver of a run. Every rank must call it. `uploads` are those of another plan, which go on."""
    run, link, recipe, base = inputs.run, inputs.link, inputs.recipe, inputs.base
    folder, disk = run.checkpoints, DurableDisk()
    plan = inputs.plan.model_dump(mode="json", exclude={"prediction"})
    text = read_regular_text(run.recipe)
    term = link.term or newest_term(run)  # under an outside launcher there is no lease

    def make_manifest(request: SaveRequest) -> Manifest:
        if newest_term(run) > term:
            raise UserError("K045.another-supervisor-taken", where=str(run.lease))
        return Manifest(
            step=request.step,
            progress=request.progress | base.name(),
            recipe=text,
            plan=plan,
            time=time.time(),
            term=term,
            world_size=layout.world_size,
        )

    shared: Any = dist.distributed_c10d._get_default_store()
    store = supervisor_store(link) if link.store else shared.clone()
    nonce, last = broadcast_json([secrets.token_hex(4), newest_step(folder)])
    messages, is_first = TorchStore(store), uploads is None
    if is_first and recipe.checkpoint.store and layout.rank == layout.node:
        from trimaran.train.checkpointing.remote_states import open_uploads  # noqa: PLC0415  few runs have a store

        uploads = open_uploads(run, recipe.checkpoint, layout, messages, own_disk=link.own_disk, nonce=nonce)
    saver = Saver(
        folder,
        layout,
        messages,
        recipe.checkpoint,
        make_manifest,
        disk,
        own_disk=link.own_disk,
        uploads=uploads,
        nonce=nonce,
    )
    if layout.rank == (layout.node if link.own_disk else 0):
        with suppress(OSError):  # a read-only disk is reported when the first checkpoint is written
            remove_drafts(folder, disk)
    saver.begin(last)
    if uploads is not None and is_first and last is not None:
        uploads.start(last)  # if the last attempt ended before it was in the store
    return saver


def refuse_small_disk(run: RunDirectory, layout: RankLayout, share_bytes: np.ndarray, *, own_disk: bool) -> None:
    """Raise UserError if the next checkpoint does not fit on the disk. Rank 0 checks for all ranks.

    `share_bytes` are those of each rank. With `own_disk` the fullest disk decides. `app/train/session.py` checks before
    the run whether all checkpoints that the recipe keeps fit.
    """
    free, num_bytes = broadcast_json(shutil.disk_usage(run.path).free), int(share_bytes.sum())
    if own_disk:
        here = int(share_bytes[np.array(layout.nodes) == layout.node].sum())
        rows = all_gather_json([shutil.disk_usage(run.path).free, here])
        free, num_bytes = min(rows, key=lambda row: row[0] - row[1])
    if free < num_bytes:
        fix = "free disk space, or choose another disk: --run-dir DIR"
        if newest_step(run.checkpoints) is not None:
            fix = "free disk space: `trimaran checkpoints prune RUN --keep 1`"
        raise UserError(
            "K046.checkpoint-takes-disk",
            where=str(run.checkpoints),
            fix=fix,
            num_bytes=show_bytes(num_bytes),
            free=show_bytes(free),
        )


def refuse_without_manifest(run: RunDirectory) -> list[dict[str, Any]]:
    """Rename what is named like a checkpoint but has no manifest, and return what was renamed."""
    refused, why = [], "there is no manifest in it"
    with suppress(OSError):  # on a read-only disk it does no harm
        for path in without_manifest(run.checkpoints):
            refuse(path, why)
            refused.append({"tier": "disk", "step": step_of(path), "why": why})
    return refused
