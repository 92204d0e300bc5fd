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
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from trimaran.checkpoint.memory_copies import MemorySource
from trimaran.checkpoint.saver import TorchStore
from trimaran.core import UserError
from trimaran.data.loader import LoaderFault
from trimaran.parallel.comm.json_exchange import all_gather_json, broadcast_json
from trimaran.runs.fault_texts import says_connection_lost
from trimaran.runs.run_requests import ChangePhase, reach_phase, replace_plan, replace_recipe
from trimaran.train.agreement import LoopExit, StepDecision
from trimaran.train.build import WorkerParts
from trimaran.train.change_file import ChangeFile, CheckedChange, change_from_dict
from trimaran.train.checkpointing.checkpointer import Checkpointer
from trimaran.train.features.live_change.rebuild import (
    FailedChangeError,
    are_in_step,
    change_in_place,
    clear_gradients,
    collective_counts,
    destroy_groups,
    forget_compiled,
    forget_peak_memory,
    free_earlier_parts,
    known_groups,
    rebuild_with_room,
    release_graphs,
    release_state,
)
from trimaran.train.features.table import features_of
from trimaran.train.plain_rank import PartsOwner
from trimaran.train.process.supervisor_link import supervisor_store
from trimaran.train.rank_context import RankContext

log = logging.getLogger(__name__)

# How long a rank that failed waits for the others to fail, too. They may wait for it in a collective.
FAILED_SECONDS = 20.0
DONE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class FirstStep:
    """How the first step under a new plan ended on this rank: an exit of the loop, or an error."""

    loop_exit: LoopExit | None
    error: Exception | None = None


class TrialSaver:
    """Saves nothing in the first step under a new plan, which may be undone. Counts the updates. See `StepSaver`."""

    def __init__(self) -> None:
        self.num_updates = 0

    @property
    def wants_save(self) -> bool:
        return False

    def before_update(self) -> None:
        self.num_updates += 1

    def after_step(self, step: int, decision: StepDecision) -> None:
        """Do nothing."""

    def wait_until_copied(self) -> None:
        """Return immediately: nothing is copied."""

    def open_copy(self, step: int) -> MemorySource | None:
        """Return None: nothing was copied."""


class InPlaceSaver(TrialSaver):
    """Saves and copies as before the change: the tensors of the state stay where they are."""

    def __init__(self, checkpointer: Checkpointer) -> None:
        super().__init__()
        self._checkpointer = checkpointer

    @property
    def wants_save(self) -> bool:
        return self._checkpointer.wants_save

    def before_update(self) -> None:
        super().before_update()
        self._checkpointer.before_update()

    def after_step(self, step: int, decision: StepDecision) -> None:
        self._checkpointer.after_step(step, decision)

    def wait_until_copied(self) -> None:
        self._checkpointer.wait_until_copied()

    def open_copy(self, step: int) -> MemorySource | None:
        return self._checkpointer.open_copy(step)


class PlanChanger:
    """The parts of a rank, and how they change. Every rank has one, and calls `apply` after the same step.

    `owner` holds the current parts, which must be freed when others replace them.
    """

    def __init__(self, owner: PartsOwner, file: ChangeFile) -> None:
        self._owner, self._file, context = owner, file, owner.parts.context
        self._run, self._info, self._link = context.run, context.rank_info, context.link
        shared: Any = dist.distributed_c10d._get_default_store()
        self._store = TorchStore(supervisor_store(self._link) if self._link.store else shared)
        self._number = 0  # of changes that this process tried
        self._seconds: dict[str, float] = {}  # of the parts of the pause of the last change

    def apply(self, step: int) -> LoopExit:
        """Change the plan after `step` steps, train the next step, and return how that one ended: as a rule a `pause`.

        If the change fails, the parts are of the old plan with the state after `step`, and the exit is a `pause` there.
        """
        began, self._number, self._seconds = time.monotonic(), self._number + 1, {}
        checked, old = self._file.take(step), self._owner.parts
        change = change_from_dict(broadcast_json(checked.as_dict() if checked else None))
        features = features_of(change.plan, change.recipe)
        context = replace(old.context, recipe=change.recipe, plan=change.plan, features=features)
        groups, progress = {*known_groups()}, old.checkpoint.state.progress()
        with self._link.section("restore", step):
            new = self._build_or_keep(context, change, progress, step)
        if isinstance(new, FailedChangeError):
            destroy_groups(known_groups().keys() - groups)
            self._answer(change, "failed", began, error=new)
            return LoopExit(reason="pause", step=step)
        saver = InPlaceSaver(self._owner.checkpointer) if change.in_place else TrialSaver()
        first_began = time.monotonic()
        first = self._try_step(new, saver, step)
        began += time.monotonic() - first_began  # a step is not a part of the pause
        self._reach("step")
        with self._link.section("restore", step + 1):
            failed = self._agree_on_step(first, saver.num_updates)
            if failed is None:
                assert first.loop_exit is not None
                with self._timed("checkpoints"):
                    self._reach("commit")
                    self._commit(change, new, first.loop_exit, step)
                    self._reach("answer")
                loop_exit = first.loop_exit
            else:
                groups = {*known_groups()}
                self._undo(new, saver, progress, step)
                loop_exit = LoopExit(reason="pause", step=step)
            del old, new, first
            if failed is not None or not change.in_place:
                with self._timed("free"):
                    free_earlier_parts()
                    destroy_groups(groups)
            forget_peak_memory()
            self._answer(change, "applied" if failed is None else "failed", began, error=failed)
        return loop_exit

    def _build_or_keep(
        self, context: RankContext, change: CheckedChange, progress: dict[str, Any], step: int
    ) -> WorkerParts | FailedChangeError:
        """Return the parts of the new plan, whose memory alone is left, or why they cannot be built."""
        old = self._owner.parts
        is_compiled = old.context.plan.compile or change.plan.compile
        shard_check = old.instruments.guard.shard_check
        self._reach("copy")
        with self._timed("copy"):
            self._owner.checkpointer.copy_before_change(step)
            release_graphs(old)  # new parts need their memory, and if these stay, they capture again
        new, why = None, ""
        try:
            with self._timed("build"):
                new = self._build(context, old, progress, step, in_place=change.in_place)
        except FailedChangeError as error:
            why = str(error)  # the error itself holds frames, and these the networks that were built
        if new is None:
            assert shard_check is not None, "other engines do not change their plan"
            old.instruments.guard.watch_memory(shard_check)
            old.instruments.profiler.follow(old.networks)
            free_earlier_parts()
            return FailedChangeError(why)
        with self._timed("copy"):
            self._owner.checkpointer.wait_until_copied()
        with self._timed("free"):
            if not change.in_place:
                release_state(old)
            forget_compiled(is_compiled)
        self._reach("release")
        return new

    def _reach(self, phase: ChangePhase) -> None:
        reach_phase(self._run, self._info.rank, phase)

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        """Add the time of this block to a part of the pause: copy, build, checkpoints or free."""
        began = time.monotonic()
        yield
        self._seconds[part] = self._seconds.get(part, 0.0) + time.monotonic() - began

    def _build(
        self, context: RankContext, parts: WorkerParts, progress: dict[str, Any], step: int, *, in_place: bool
    ) -> WorkerParts:
        """Return the parts of the new plan. Raises FailedChangeError on all ranks if that failed on one."""
        if in_place:
            return change_in_place(context, parts, self._agree)
        return rebuild_with_room(context, parts, self._owner.checkpointer, progress, step, self._agree, self._seconds)

    def _agree(self, function: Callable[[], Any]) -> Any:
        """Return what `function` returns, once it has returned on all ranks; raise if it raised on one of them."""
        result, why = None, ""
        try:
            result = function()
        except Exception as error:
            log.warning("the plan cannot be changed: %s", traceback.format_exc())
            why = _short(error)
        if reasons := [f"rank {rank}: {each}" for rank, each in enumerate(all_gather_json(why)) if each]:
            raise FailedChangeError(reasons[0])
        return result

    def _try_step(self, parts: WorkerParts, saver: TrialSaver, step: int) -> FirstStep:
        """Train until the next step after which replicas are in sync, as a rule one step."""
        try:
            return FirstStep(parts.trainer.train(saver, step, pause_after=step + 1))
        except LoaderFault:
            raise  # the data is at fault, not the plan
        except Exception as error:
            if says_connection_lost(error):
                raise
            log.warning("the first step under the new plan failed: %s", traceback.format_exc())
            traceback.clear_frames(error.__traceback__)  # they hold activations
            return FirstStep(None, error)

    def _agree_on_step(self, first: FirstStep, num_updates: int) -> FailedChangeError | None:
        """Return None if the first step is done on all ranks, and the error if all ranks can undo the change.

        Raises if they cannot. The ranks agree through the store: a rank that failed cannot take part in a collective
        that others may be in.
        """
        prefix = f"trimaran/change/{self._link.attempt}/{self._number}"
        facts = {
            "error": "" if first.error is None else _short(first.error),
            "updates": num_updates,
            "collectives": {} if first.error is None else collective_counts(),
        }
        self._store.set(f"{prefix}/{self._info.rank}", json.dumps(facts))
        keys = [f"{prefix}/{rank}" for rank in range(self._info.world_size)]
        try:
            texts = self._store.wait_get(keys, FAILED_SECONDS if first.error else DONE_SECONDS)
        except TimeoutError:
            if first.error is None:
                raise
            why = f"the first step under a new plan failed here alone: {_short(first.error)}"
            raise RuntimeError(why) from first.error
        rows = [json.loads(text) for text in texts]
        failed = [rank for rank, row in enumerate(rows) if row["error"]]
        if not failed:
            return None
        why = f"rank {failed[0]}: {rows[failed[0]]['error']}"
        is_intact = len(failed) == len(rows) and not any(row["updates"] for row in rows)
        if not is_intact or not are_in_step([row["collectives"] for row in rows]):
            raise RuntimeError(f"the first step under a new plan failed, and only a restart undoes it: {why}")
        return FailedChangeError(why)

    def _undo(self, new: WorkerParts, saver: TrialSaver, progress: dict[str, Any], step: int) -> None:
        """Build parts of the old plan, and hand them the state that `new` still holds after its failed step."""
        old, checkpointer = self._owner.parts, self._owner.checkpointer
        self._owner.replace(new, checkpointer)
        clear_gradients(new)
        release_graphs(new)
        forget_compiled(new.context.plan.compile)
        again = rebuild_with_room(old.context, new, saver, progress, step, self._agree, self._seconds)
        release_state(new)
        closed = checkpointer.close(step)
        self._owner.replace(again, Checkpointer.take_over(again.checkpoint, closed, step, copied_step=step))

    def _commit(self, change: CheckedChange, new: WorkerParts, loop_exit: LoopExit, step: int) -> None:
        """Make the new plan that of the run: in its directory, and for the checkpoints."""
        old, checkpointer = self._owner.parts, self._owner.checkpointer
        self._owner.replace(new, checkpointer)
        self._agree(lambda: self._replace_files(change))
        self._reach("switch")
        done = loop_exit.step if loop_exit.reason != "rewind" else step + 1
        if not change.in_place:
            closed = checkpointer.close(done)
            self._owner.replace(new, Checkpointer.take_over(new.checkpoint, closed, done, copied_step=step))
        elif change.recipe.checkpoint != old.context.recipe.checkpoint:
            self._owner.replace(new, checkpointer.change_section(change.recipe, done))

    def _replace_files(self, change: CheckedChange) -> None:
        """Write recipe and plan to the run directory, on each node that has its own."""
        if self._info.rank == 0 or (self._link.own_disk and self._info.local_rank == 0):
            replace_plan(self._run, change.plan)
            self._reach("files")
            replace_recipe(self._run, change.recipe)

    def _answer(self, change: CheckedChange, status: Any, began: float, *, error: Exception | None = None) -> None:
        seconds = time.monotonic() - began
        how = "in place" if change.in_place else "rebuilt"
        parts = {name: round(each, 3) for name, each in self._seconds.items()}
        self._file.answer(change.request, status, how=how, pause_seconds=seconds, parts=parts, error=error)


def _short(error: Exception) -> str:
    if isinstance(error, UserError):
        return f"{error.code}: {error.what}"
    return f"{type(error).__name__}: {error}"[:500]
