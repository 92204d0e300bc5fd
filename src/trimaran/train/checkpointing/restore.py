"""Finds the newest state that is whole, in memory or on disk, the same on all ranks, and loads it."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trimaran.checkpoint.checkpoint_list import list_checkpoints
from trimaran.checkpoint.disk_source import DiskSource
from trimaran.checkpoint.durable import DurableDisk
from trimaran.checkpoint.fetch_copies import CopyFetcher
from trimaran.checkpoint.find_copies import CopyFinder, Step
from trimaran.checkpoint.load_state import fill, refuse_leftovers
from trimaran.checkpoint.manifest import MANIFEST, DamagedError, Manifest, read_manifest
from trimaran.checkpoint.rank_layout import RankLayout, gather_numbers, gather_trees, meet, told_by_first
from trimaran.checkpoint.step_dirs import refuse, step_path, steps
from trimaran.checkpoint.tensor_shards import Source, State, TensorShard
from trimaran.checkpoint.verify_checkpoint import verify
from trimaran.core import Recipe, UserError, changes_of_course, parse_recipe
from trimaran.run import Follower, RunDirectory

log = logging.getLogger(__name__)

Tier = Literal["memory", "disk"]
MANY = 5  # are told of
Loading = tuple[Source, Sequence[TensorShard]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredState:
    """What was loaded; nothing when `tier` is None. `refused` says what could not be used, and why.

    `incarnation` is what slots in memory that hold the same state are labelled with.
    """

    step: int = 0
    tier: Tier | None = None
    incarnation: tuple[int, int] | None = None
    refused: list[dict[str, Any]] = field(default_factory=list)


def refuse_new_start(run: RunDirectory, rank_layout: RankLayout, *, newest: int) -> None:
    """Raise when `run` has had checkpoints: with none of them to go on from, it would begin anew without a word.

    Every rank calls it when nothing of at most `newest` steps was found; rank 0 looks for all. A run that died before
    its first checkpoint is none of these.
    """
    why = told_by_first(_why_none(run, newest) if rank_layout.rank == 0 else "")
    if why:
        raise UserError("K047", f"there is no checkpoint that this run can go on from: {why}",
                        where=str(run.checkpoints), fix="look at them with `trimaran checkpoints RUN` and bring one "
                        "back, or start anew in another folder: --run-dir DIR")  # fmt: skip


def _why_none(run: RunDirectory, newest: int) -> str:
    """Return what became of the checkpoints that there have been, in words; nothing when there never was one."""
    found = [f"step {row.step}: {row.why or f'it is later than train.steps={newest}'}" for row in
             list_checkpoints(run.checkpoints)]  # fmt: skip
    if found:
        more = f"; and {len(found) - MANY} more" if len(found) > MANY else ""
        return "; ".join(found[::-1][:MANY]) + more
    events = Follower(run.events(0)).new()
    written = [each["step"] for each in events if each["kind"] == "checkpoint" and not each["data"].get("failed")]
    return f"that of step {max(written)} was written, and is gone" if written else ""


class Restorer:
    """Where the states of a run are looked for. Every rank has one, and all call the same at the same time."""

    def __init__(self, state: State, folder: Path, rank_layout: RankLayout, recipe: Recipe, *, data: str = "") -> None:
        """`data` tells the data of this run from others, see `TokenShards.digest`; without it nothing is compared."""
        self._state, self._folder, self._rank_layout, self._recipe, self._data = (
            state,
            folder,
            rank_layout,
            recipe,
            data,
        )

    def load(self, survey: CopyFinder, *, newest: int, reported: int = 0) -> RestoredState:
        """Load the newest verified state of at most `newest` steps.

        What is damaged is left out, and on disk it gets another name. Nothing is loaded from a damaged one. `reported`
        is the last step with metrics, as rank 0 knows it. They come a step late: the copy of a step whose metrics a
        kill has cost is loaded only if there is none in memory from before, so that the step is done and told again.
        """
        there, reported = told_by_first([steps(self._folder), reported] if self._rank_layout.rank == 0 else [])
        in_memory = [step for step in survey.steps() if step[1] <= newest]
        in_memory.sort(key=lambda step: step[1] > reported)  # and otherwise as they were
        on_disk = sorted((step for step in there if step <= newest), reverse=True)
        refused: list[dict[str, Any]] = []
        while in_memory or on_disk:
            tier: Tier = "memory" if in_memory and in_memory[0][1] >= max(on_disk, default=0) else "disk"
            incarnation = None
            if tier == "memory":
                incarnation, step, _ = in_memory[0]
                found = self._from_memory(survey, in_memory.pop(0))
            else:
                step = on_disk.pop(0)
                found = self._from_disk(step_path(self._folder, step))
            if not isinstance(found, str):
                self._take(*found)
                return RestoredState(step=step, tier=tier, incarnation=incarnation, refused=refused)
            refused.append({"tier": tier, "step": step, "why": found})
            log.warning("the state of step %d (%s) is left out: %s", step, tier, found)
        return RestoredState(refused=refused)

    def _from_memory(self, survey: CopyFinder, step: Step) -> Loading | str:
        """Return the source and what to fill from it, or why there is none."""
        sound = survey.verify(step)
        if sound is None:
            return "a copy in memory is not what was sealed"
        reunion = CopyFetcher(survey, sound, self._rank_layout)
        pieces = self._state.pieces_from(reunion.index)
        return reunion.fetch(pieces), pieces

    def _from_disk(self, path: Path) -> Loading | str:
        """See `_from_memory`. Each rank verifies some of the files; what one finds wrong is wrong for all."""
        manifest, wrong = _manifest_of(path)
        if manifest is not None:
            mine = sorted(manifest.files)[self._rank_layout.rank :: self._rank_layout.world_size]
            wrong = [str(damage) for damage in verify(path, files=mine)]
        found = sorted({each for row in gather_trees(wrong) for each in row})
        if not found and manifest is not None:
            _refuse_another_course(manifest, self._recipe, path)
            source = DiskSource(path)
            return source, self._state.pieces_from(source.index)
        if self._rank_layout.rank == 0:
            with suppress(OSError):  # a disk that cannot be written to: it is left out all the same
                refuse(path, "; ".join(found), DurableDisk())
        meet()  # nobody looks at the next one before this one is out of the way
        return "; ".join(found)

    def _take(self, source: Source, pieces: Sequence[TensorShard]) -> None:
        _refuse_other_data(source.progress.get("data"), self._data, self._folder)
        fill(pieces, source)
        refuse_leftovers(pieces, source, gather=gather_numbers)
        self._state.restore(source.progress)
        meet()  # before anybody writes to the memory that others may still read


def _manifest_of(path: Path) -> tuple[Manifest | None, list[str]]:
    try:
        return read_manifest(path), []
    except DamagedError as error:
        return None, [str(damage) for damage in error.damages]
    except UserError:
        if (path / MANIFEST).exists():  # a later format: nothing is wrong with it
            raise
        return None, [f"{MANIFEST} is missing"]


def _refuse_another_course(manifest: Manifest, recipe: Recipe, path: Path) -> None:
    if not manifest.recipe:
        return  # imported from elsewhere
    changed = changes_of_course(parse_recipe(manifest.recipe, name=str(path)), recipe)
    for name, (saved, wanted) in changed.items():
        what = f"this checkpoint is of a run with {name}={saved}, this run has {wanted}"
        raise UserError("K041", what, where=str(path), fix=f"use the same {name}, or a new run directory")


def _refuse_other_data(saved: str | None, wanted: str, folder: Path) -> None:
    """Raise when the tokens are not those that the state was trained on, whatever they are called in the recipe."""
    if saved and wanted and saved != wanted:
        what = f"the data has changed: the run was trained on {saved[:12]}, and finds {wanted[:12]} now"
        raise UserError("K041", what, where=f"data ({folder})",
                        fix="bring back the data as it was, or start a new run: --run-dir DIR")  # fmt: skip
