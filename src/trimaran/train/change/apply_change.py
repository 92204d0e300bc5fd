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
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from trimaran.checkpoint.saver import TorchStore
from trimaran.core import UserError
from trimaran.data.loader import LoaderFault
from trimaran.parallel.comm.json_exchange import all_gather_json, broadcast_json
from trimaran.run.connection_lost import says_connection_lost
from trimaran.run.replace_plan import replace_plan, replace_recipe
from trimaran.train.agreement import LoopExit
from trimaran.train.build import RankContext, WorkerParts
from trimaran.train.change.change_file import ChangeFile, CheckedChange, change_from_dict
from trimaran.train.change.process_groups import are_in_step, collective_counts, destroy_groups, known_groups
from trimaran.train.change.rebuild import (
    FailedChangeError,
    change_in_place,
    clear_gradients,
    collect_garbage,
    rebuild,
    release_state,
)
from trimaran.train.process.token_store import supervisor_store

log = logging.getLogger(__name__)

# How long a rank that failed waits for the others to fail, too. They may wait for it in a collective.
FAILED_SECONDS = 20.0
DONE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class FirstStep:
    """How the first step under a new plan ended on this rank: an exit of the loop, or an error."""

    loop_exit: LoopExit | None
    error: Exception | None = None


class PlanChanger:
    """Applies changes on one rank. Every rank has one, and calls `apply` after the same step."""

    def __init__(self, context: RankContext, file: ChangeFile) -> None:
        self._file, self._run, self._info, self._link = file, context.run, context.rank_info, context.link
        link = context.link
        shared: Any = dist.distributed_c10d._get_default_store()
        self._store = TorchStore(supervisor_store(link) if link.store else shared)
        self._number = 0  # of changes that this process tried

    def apply(self, parts: WorkerParts, step: int) -> tuple[WorkerParts, LoopExit]:
        """Change the plan after `step` steps and train the next step. Returns the parts to go on with.

        The loop exit is that of the next step under the new plan, a `pause` as a rule; if the change failed, it is a
        `pause` at `step` with parts of the old plan.
        """
        began, self._number = time.monotonic(), self._number + 1
        self._file.step = step
        context, link = parts.context, self._link
        checked = self._file.take()
        change = change_from_dict(broadcast_json(checked.as_dict() if checked else None))
        new_context = replace(context, recipe=change.recipe, plan=change.plan)
        groups = {*known_groups()}
        progress = parts.trainer.checkpointer.state.progress()
        shard_check = parts.trainer.check.guard.shard_check
        with link.section("restore", step):
            parts.trainer.checkpointer.copy_before_change(step)
            try:
                new = self._build(new_context, parts, progress, step, in_place=change.in_place)
            except FailedChangeError as error:
                parts.trainer.check.guard.shard_check = shard_check
                self._keep_old(parts, groups)
                self._answer(change, "failed", began, error=error)
                return parts, LoopExit(reason="pause", step=step)
            parts.trainer.checkpointer.wait_until_copied()
            if not change.in_place:
                release_state(parts)
                collect_garbage(compiled=context.plan.compile or change.plan.compile)
        first_began, num_updates = time.monotonic(), new.trainer.checkpointer.num_updates
        first = self._try_step(new, step)
        began += time.monotonic() - first_began  # a step is not a part of the pause
        with link.section("restore", step + 1):
            failed = self._agree_on_step(first, new.trainer.checkpointer.num_updates - num_updates)
            if failed is not None:
                old = self._undo(context, new, parts, groups, progress, step)
                self._answer(change, "failed", began, error=failed)
                return old, LoopExit(reason="pause", step=step)
            assert first.loop_exit is not None
            self._commit(change, new, parts, first.loop_exit, step, groups)
            self._answer(change, "applied", began)
        return new, first.loop_exit

    def _build(
        self, context: RankContext, parts: WorkerParts, progress: dict[str, Any], step: int, *, in_place: bool
    ) -> WorkerParts:
        """Return the parts of the new plan. Raises FailedChangeError on all ranks if that failed on one."""
        if in_place:
            return change_in_place(context, parts, self._agree)
        return rebuild(context, parts, progress, step, self._agree)

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

    def _try_step(self, parts: WorkerParts, step: int) -> FirstStep:
        """Train until the next step after which replicas are in sync, as a rule one step."""
        try:
            return FirstStep(parts.trainer.train(step, pause_after=step + 1))
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
            if first.error is not None:
                raise first.error from None
            raise
        rows = [json.loads(text) for text in texts]
        failed = [rank for rank, row in enumerate(rows) if row["error"]]
        if not failed:
            return None
        why = f"rank {failed[0]}: {rows[failed[0]]['error']}"
        is_intact = len(failed) == len(rows) and not any(row["updates"] for row in rows)
        if not is_intact or not are_in_step([row["collectives"] for row in rows]):
            raise RuntimeError(f"the first step under a new plan failed, and only a restart undoes it: {why}")
        return FailedChangeError(why)

    def _keep_old(self, parts: WorkerParts, groups: set[str]) -> None:
        """Go on with the old parts, which the failed build has not touched but for what parts share."""
        parts.trainer.recorder.profiler.follow(parts.networks)
        collect_garbage(compiled=False)
        destroy_groups(known_groups().keys() - groups)

    def _undo(
        self,
        context: RankContext,
        new: WorkerParts,
        before: WorkerParts,
        groups: set[str],
        progress: dict[str, Any],
        step: int,
    ) -> WorkerParts:
        """Return parts of the old plan with the state that `new` still holds after its failed step."""
        clear_gradients(new)
        collect_garbage(compiled=True)
        failed = {*known_groups()}
        old = rebuild(context, new, progress, step, self._agree)
        release_state(new)
        old.trainer.checkpointer.take_over(before.trainer.checkpointer, step, copied_step=step)
        collect_garbage(compiled=True)
        destroy_groups(failed | groups)
        return old

    def _commit(
        self,
        change: CheckedChange,
        new: WorkerParts,
        old: WorkerParts,
        loop_exit: LoopExit,
        step: int,
        groups: set[str],
    ) -> None:
        """Make the new plan that of the run: in its directory, and for the checkpoints."""
        if self._info.rank == 0 or (self._link.own_disk and self._info.local_rank == 0):
            replace_recipe(self._run, change.recipe)
            replace_plan(self._run, change.plan)
        done = loop_exit.step if loop_exit.reason != "rewind" else step + 1
        if not change.in_place:
            new.trainer.checkpointer.take_over(old.trainer.checkpointer, done, copied_step=step)
            destroy_groups(groups)
        elif change.recipe.checkpoint != old.context.recipe.checkpoint:
            new.trainer.checkpointer.change_section(change.recipe, done)

    def _answer(self, change: CheckedChange, status: Any, began: float, *, error: Exception | None = None) -> None:
        seconds = time.monotonic() - began
        how = "in place" if change.in_place else "rebuilt"
        self._file.answer(change.request, status, how=how, pause_seconds=seconds, error=error)


def _short(error: Exception) -> str:
    if isinstance(error, UserError):
        return f"{error.code}: {error.what}"
    return f"{type(error).__name__}: {error}"[:500]
