"""Changes the plan of a running run: all ranks build the new parts, hand the state over, and try one step.

Until the first step under the new plan is done on all ranks, the run directory has the old plan, and the copies in
memory are those of the old plan, with the state before the change: a crash restarts the old plan from there. A failure
that all ranks notice is undone in the same processes. While the new parts are built, the old ones are intact and just
go on. If the first step fails on all ranks before its update, the new parts still hold the same state: it is handed
over to parts of the old plan, which are built again. Any other failure of the first step ends the processes.
"""

import json
import logging
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from trimaran.checkpoint import MemorySource, TorchStore
from trimaran.core import UserError
from trimaran.data import LoaderFault
from trimaran.parallel import all_gather_json, broadcast_json
from trimaran.runs import ChangePhase, reach_phase, replace_plan, replace_recipe, says_connection_lost
from trimaran.train.agreement import LoopExit, StepDecision
from trimaran.train.build import WorkerParts
from trimaran.train.change_file import ChangeFile, CheckedChange, change_from_dict
from trimaran.train.checkpointing.checkpointer import Checkpointer, DelegatingSaver
from trimaran.train.features.live_change import rebuild
from trimaran.train.features.table import features_of
from trimaran.train.plain_rank import Training
from trimaran.train.process.supervisor_link import supervisor_store
from trimaran.train.rank_context import RankContext

log = logging.getLogger(__name__)

# How long a rank that failed waits for the others to fail, too. They may wait for it in a collective.
FAILED_SECONDS = 20.0
DONE_SECONDS = 600.0


class TrialSaver:
    """Saves nothing in the first step under a new plan, which may be undone. Counts the updates. See `StepSaver`."""

    num_updates, wants_save = 0, False

    def before_update(self) -> None:
        self.num_updates += 1

    def after_step(self, step: int, decision: StepDecision) -> None:
        """Do nothing."""

    def wait_until_copied(self) -> None:
        """Return immediately: nothing is copied."""

    def open_copy(self, step: int) -> MemorySource | None:
        """Return None: nothing was copied."""


class InPlaceSaver(DelegatingSaver):
    """Saves and copies as before the change: the tensors of the state stay where they are."""

    num_updates = 0

    def before_update(self) -> None:
        self.num_updates += 1
        super().before_update()


class PlanChanger:
    """Changes the parts of a rank. Every rank has one, and calls `apply` after the same step.

    `training` holds the current parts. Nothing else may keep them: they must be freed when others replace them.
    """

    def __init__(self, training: Training, file: ChangeFile) -> None:
        self._training, self._file, context = training, file, training.parts.context
        self._run, self._info, self._link = context.run, context.rank_info, context.link
        shared: Any = dist.distributed_c10d._get_default_store()
        self._store = TorchStore(supervisor_store(self._link) if self._link.store else shared)
        self._number = 0  # of changes that this process tried
        self._seconds: dict[str, float] = {}  # of the parts of the pause of the last change

    def apply(self, step: int) -> LoopExit:
        """Change the plan after `step` steps and train the next one.

        Returns its exit, as a rule a `pause`; after a failure a `pause` at `step` under the old plan.
        """
        began, self._number, self._seconds = time.monotonic(), self._number + 1, {}
        checked, old = self._file.take(step), self._training.parts
        change = change_from_dict(broadcast_json(checked.as_dict() if checked else None))
        features = features_of(change.plan, change.recipe)
        context = replace(old.context, recipe=change.recipe, plan=change.plan, features=features)
        groups, progress = {*rebuild.known_groups()}, old.checkpoint.state.progress()
        with self._link.section("restore", step):
            new = self._build_or_keep(context, change, progress, step)
        if isinstance(new, rebuild.FailedChangeError):
            rebuild.destroy_groups(rebuild.known_groups().keys() - groups)
            self._answer(change, "failed", began, error=new)
            return LoopExit(reason="pause", step=step)
        saver = InPlaceSaver(self._training.checkpointer) if change.in_place else TrialSaver()
        first_began = time.monotonic()
        first = self._try_step(new, saver, step)
        began += time.monotonic() - first_began  # a step is not a part of the pause
        self._reach("step")
        with self._link.section("restore", step + 1):
            failed = self._agree_on_step(first, saver.num_updates)
            if failed is None:
                assert isinstance(first, LoopExit)
                with self._timed("checkpoints"):
                    self._reach("commit")
                    self._commit(change, new, first, step)
                    self._reach("answer")
                loop_exit = first
            else:
                groups = {*rebuild.known_groups()}
                self._undo(new, saver, progress, step)
                loop_exit = LoopExit(reason="pause", step=step)
            del old, new, first
            if failed is not None or not change.in_place:
                with self._timed("free"):
                    rebuild.free_earlier_parts()
                    rebuild.destroy_groups(groups)
            if torch.cuda.is_initialized():  # the peak of earlier plans and of a change does not count
                torch.cuda.reset_peak_memory_stats()
            self._answer(change, "applied" if failed is None else "failed", began, error=failed)
        return loop_exit

    def _build_or_keep(
        self, context: RankContext, change: CheckedChange, progress: dict[str, Any], step: int
    ) -> WorkerParts | rebuild.FailedChangeError:
        """Return the parts of the new plan, whose memory alone is left, or why they cannot be built."""
        old = self._training.parts
        is_compiled = old.context.plan.compile or change.plan.compile
        shard_check = old.instruments.guard.shard_check
        self._reach("copy")
        with self._timed("copy"):
            self._training.checkpointer.copies.copy_before_change(step)
            rebuild.release_graphs(old)  # new parts need their memory, and if these stay, they capture again
        new, why = None, ""
        try:
            with self._timed("build"):  # an error is raised on all ranks if building failed on one
                if change.in_place:
                    new = rebuild.change_in_place(context, old, self._agree)
                else:
                    copies, agree = self._training.checkpointer, self._agree
                    new = rebuild.rebuild_with_room(context, old, copies, progress, step, agree, self._seconds)
        except rebuild.FailedChangeError as error:
            why = str(error)  # the error itself holds frames, and these the networks that were built
        if new is None:
            assert shard_check is not None, "other engines do not change their plan"
            old.instruments.guard.shard_check = shard_check
            old.instruments.profiler.follow(old.networks)
            rebuild.free_earlier_parts()
            return rebuild.FailedChangeError(why)
        with self._timed("copy"):
            self._training.checkpointer.wait_until_copied()
        with self._timed("free"):
            if not change.in_place:
                rebuild.release_state(old)
            rebuild.forget_compiled(is_compiled)
        self._reach("release")
        return new

    def _reach(self, phase: ChangePhase) -> None:
        reach_phase(self._run, self._info.rank, phase)

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._seconds[part] = self._seconds.get(part, 0.0) + time.monotonic() - began

    def _agree(self, function: Callable[[], Any]) -> Any:
        """Return what `function` returns, once it has returned on all ranks; raise if it raised on one of them."""
        result, why = None, ""
        try:
            result = function()
        except Exception as error:
            log.warning("the plan cannot be changed: %s", traceback.format_exc())
            why = _short(error)
        if reasons := [f"rank {rank}: {each}" for rank, each in enumerate(all_gather_json(why)) if each]:
            raise rebuild.FailedChangeError(reasons[0])
        return result

    def _try_step(self, parts: WorkerParts, saver: TrialSaver | InPlaceSaver, step: int) -> LoopExit | Exception:
        try:
            return parts.trainer.train(saver, step, pause_after=step + 1)
        except LoaderFault:
            raise  # the data is at fault, not the plan
        except Exception as error:
            if says_connection_lost(error):
                raise
            log.warning("the first step under the new plan failed: %s", traceback.format_exc())
            traceback.clear_frames(error.__traceback__)  # they hold activations
            return error

    def _agree_on_step(self, first: LoopExit | Exception, num_updates: int) -> rebuild.FailedChangeError | None:
        """Return None if the first step is done on all ranks, and the error if all ranks can undo the change.

        Raises if they cannot. The ranks agree through the store: a rank that failed cannot take part in a collective
        that others may be in.
        """
        prefix = f"trimaran/change/{self._link.attempt}/{self._number}"
        error = first if isinstance(first, Exception) else None
        collectives = rebuild.collective_counts() if error else {}
        facts = {"error": _short(error) if error else "", "updates": num_updates, "collectives": collectives}
        self._store.set(f"{prefix}/{self._info.rank}", json.dumps(facts))
        keys = [f"{prefix}/{rank}" for rank in range(self._info.world_size)]
        try:
            texts = self._store.wait_get(keys, FAILED_SECONDS if error else DONE_SECONDS)
        except TimeoutError:
            if error is None:
                raise
            why = f"the first step under a new plan failed here alone: {_short(error)}"
            raise RuntimeError(why) from error
        rows = [json.loads(text) for text in texts]
        failed = [rank for rank, row in enumerate(rows) if row["error"]]
        if not failed:
            return None
        why = f"rank {failed[0]}: {rows[failed[0]]['error']}"
        is_intact = len(failed) == len(rows) and not any(row["updates"] for row in rows)
        first_counts: dict[str, list[int]] = {}
        counts = [pair for row in rows for pair in row["collectives"].items()]
        are_in_step = all(first_counts.setdefault(name, numbers) == numbers for name, numbers in counts)
        if not is_intact or not are_in_step:  # only ranks that have started the same collectives can go on together
            raise RuntimeError(f"the first step under a new plan failed, and only a restart undoes it: {why}")
        return rebuild.FailedChangeError(why)

    def _undo(self, new: WorkerParts, saver: TrialSaver | InPlaceSaver, progress: dict[str, Any], step: int) -> None:
        """Build parts of the old plan, and hand them the state that `new` still holds after its failed step."""
        old, checkpointer = self._training.parts, self._training.checkpointer
        self._training.replace(new, checkpointer)
        rebuild.clear_gradients(new)
        rebuild.release_graphs(new)
        rebuild.forget_compiled(new.context.plan.compile)
        again = rebuild.rebuild_with_room(old.context, new, saver, progress, step, self._agree, self._seconds)
        rebuild.release_state(new)
        self._training.replace(again, Checkpointer.take_over(again.checkpoint, checkpointer, step, copied_step=step))

    def _commit(self, change: CheckedChange, new: WorkerParts, loop_exit: LoopExit, step: int) -> None:
        old, checkpointer = self._training.parts, self._training.checkpointer
        self._training.replace(new, checkpointer)

        def replace_files() -> None:
            if self._info.rank == 0 or (self._link.own_disk and self._info.local_rank == 0):
                replace_plan(self._run, change.plan)
                self._reach("files")
                replace_recipe(self._run, change.recipe)

        self._agree(replace_files)
        self._reach("switch")
        done = loop_exit.step if loop_exit.reason != "rewind" else step + 1
        if not change.in_place:
            self._training.replace(new, Checkpointer.take_over(new.checkpoint, checkpointer, done, copied_step=step))
        elif change.recipe.checkpoint != old.context.recipe.checkpoint:
            self._training.replace(new, checkpointer.change_section(change.recipe, done))

    def _answer(self, change: CheckedChange, status: Any, began: float, *, error: Exception | None = None) -> None:
        seconds = time.monotonic() - began
        how = "in place" if change.in_place else "rebuilt"
        parts = {name: round(each, 3) for name, each in self._seconds.items()}
        self._file.answer(change.request, status, how=how, pause_seconds=seconds, parts=parts, error=error)


def _short(error: Exception) -> str:
    if isinstance(error, UserError):
        return f"{error.code}: {error.what}"
    return f"{type(error).__name__}: {error}"[:500]
