"""A rank of a run whose ranks all train together: it joins the others, builds its parts, and trains."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from trimaran.runs import Journal, RunDirectory
from trimaran.train.agreement import LoopExit, StopRequest
from trimaran.train.build import WorkerParts
from trimaran.train.change_file import ChangeFile
from trimaran.train.checkpointing.checkpointer import Checkpointer
from trimaran.train.process.rank_setup import RankInfo, join_process_group
from trimaran.train.process.supervisor_link import SupervisorLink
from trimaran.train.rank_context import RankContext, read_context

if TYPE_CHECKING:
    from trimaran.train.features.live_change.apply_change import PlanChanger


class Training:
    """The training of a rank from step `start` on. Nothing else may keep its parts: a change of the plan frees them."""

    def __init__(self, parts: WorkerParts, checkpointer: Checkpointer, change_file: ChangeFile) -> None:
        self.parts, self.checkpointer, self.start = parts, checkpointer, checkpointer.start
        self._change_file = change_file
        self._changer: PlanChanger | None = None

    def replace(self, parts: WorkerParts, checkpointer: Checkpointer) -> None:
        """Hold these from now on."""
        self.parts, self.checkpointer = parts, checkpointer

    def run(self) -> LoopExit:
        """Train through rewinds and changes of the plan, and return the last exit.

        It is that of a rewind only if there is no state to rewind to.
        """
        context, start, journal = self.parts.context, self.start, self.parts.context.journal
        if start == 0 and context.recipe.model.kind.is_hf and context.recipe.train.check_first_loss:
            from trimaran.train.features.first_loss import check_first_loss  # noqa: PLC0415  transformers imports slowly

            with context.link.section("load"):
                check_first_loss(self.parts)
        while True:
            self._change_file.watch(self.checkpointer)
            loop_exit = self.parts.trainer.train(self.checkpointer, start)
            if loop_exit.reason == "change":
                from trimaran.train.features.live_change.apply_change import PlanChanger  # noqa: PLC0415  few runs change

                self._changer = self._changer or PlanChanger(self, self._change_file)
                loop_exit = self._changer.apply(loop_exit.step)
            if loop_exit.reason not in ("rewind", "pause"):
                return loop_exit
            start = loop_exit.step
            if loop_exit.reason == "rewind":
                if (restored := self.checkpointer.rewind(loop_exit)) is None:
                    return loop_exit
                start = restored
                journal.event("rewind", step=loop_exit.step, to_step=start)
                journal.resume(start)

    def saves_end(self) -> bool:
        """Return whether this rank is to save the end of the run."""
        return True

    def report_saved(self) -> None:
        """Tell whoever waits that the end of the run is saved: nobody does."""


class PlainRank:
    """A rank of a run, and its connection to the supervisor."""

    first_rank: int = 0  # of the ranks that train together

    def __init__(self, run: RunDirectory, info: RankInfo, link: SupervisorLink) -> None:
        self.run, self.info, self.link = run, info, link

    def join(self) -> None:
        """Join the process group, unless that was done before the run directory was known."""
        if not dist.is_initialized():
            join_process_group(self.info, self.link)

    def context(self, journal: Journal, cache: Path, stop: StopRequest, change_file: ChangeFile) -> RankContext:
        """Return what the parts of this rank are built from."""
        ask = change_file.is_requested
        return read_context(self.run, self.info, journal, cache=cache, link=self.link, stop=stop, change_requested=ask)

    def begin(self, parts: WorkerParts, stop: StopRequest, change_file: ChangeFile) -> Training:
        """Restore the newest state, and return the training from there."""
        checkpointer = Checkpointer.resume(parts.checkpoint)
        parts.context.journal.resume(checkpointer.start)
        return Training(parts, checkpointer, change_file)
