"""Restores the newest intact state of a run from its tiers, the same on all ranks."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimaran.checkpoint.checkpoint_list import list_checkpoints
from trimaran.checkpoint.load_state import refuse_unused_tensors
from trimaran.checkpoint.rank_layout import RankLayout, barrier
from trimaran.core import Recipe, UserError
from trimaran.parallel.comm.json_exchange import all_gather_int64, broadcast_json
from trimaran.parallel.tensor_shards import CheckpointState
from trimaran.runs import JsonlFollower, RunDirectory
from trimaran.train.checkpointing.inputs import Base
from trimaran.train.checkpointing.tiers import DiskTier, MemoryTier, Report, Tier, TierName
from trimaran.train.checkpointing.training_state import MAY_BE_UNUSED

log = logging.getLogger(__name__)

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
            _refuse_other_data(progress.get("data"), data, folder)
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


def _refuse_other_data(saved: str | None, wanted: str, folder: Path) -> None:
    """Raise UserError if the digest of the data has changed since the state was saved."""
    if saved and wanted and saved != wanted:
        what = f"the data has changed: its digest was {saved[:12]} and is {wanted[:12]} now"
        raise UserError("K041", what, where=f"data ({folder})",
                        fix="restore the original data, or start a new run: --run-dir DIR")  # fmt: skip
