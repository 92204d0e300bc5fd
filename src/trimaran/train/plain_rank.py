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


class PartsOwner:
    """Holds the parts of a rank and its checkpointer. Nobody else may keep them: a change of the plan frees them."""

    def __init__(self, parts: WorkerParts, checkpointer: Checkpointer) -> None:
        self.parts, self.checkpointer = parts, checkpointer

    def replace(self, parts: WorkerParts, checkpointer: Checkpointer) -> None:
        """Hold these from now on."""
        self.parts, self.checkpointer = parts, checkpointer


class Training:
    """The training of a rank from step `start` on, whose state its checkpointer has restored."""

    def __init__(self, parts: WorkerParts, checkpointer: Checkpointer, change_file: ChangeFile) -> None:
        self.owner, self._change_file = PartsOwner(parts, checkpointer), change_file
        self.start = checkpointer.start
        self._changer: PlanChanger | None = None

    def run(self) -> LoopExit:
        """Train through rewinds and changes of the plan, and return the last exit.

        It is that of a rewind only if there is no state to rewind to.
        """
        _check_first_loss(self.owner.parts, self.start)
        journal, start = self.owner.parts.context.journal, self.start
        while True:
            self._change_file.watch(self.owner.checkpointer)
            loop_exit = self.owner.parts.trainer.train(self.owner.checkpointer, start)
            if loop_exit.reason == "change":
                loop_exit = self._change(loop_exit.step)
            if loop_exit.reason not in ("rewind", "pause"):
                return loop_exit
            start = loop_exit.step
            if loop_exit.reason == "rewind":
                if (restored := self.owner.checkpointer.rewind(loop_exit)) is None:
                    return loop_exit
                start = restored
                journal.event("rewind", step=loop_exit.step, to_step=start)
                journal.resume(start)

    def _change(self, step: int) -> LoopExit:
        from trimaran.train.features.live_change.apply_change import PlanChanger  # noqa: PLC0415  few runs change

        self._changer = self._changer or PlanChanger(self.owner, self._change_file)
        return self._changer.apply(step)

    def saves_end(self) -> bool:
        """Return whether this rank is to save the end of the run."""
        return True

    def report_saved(self) -> None:
        """Tell whoever waits that the end of the run is saved: nobody does."""


class PlainRank:
    """A rank of a run, and its connection to the supervisor."""

    def __init__(self, run: RunDirectory, info: RankInfo, link: SupervisorLink) -> None:
        self.run, self.info, self.link = run, info, link

    @property
    def first_rank(self) -> int:
        """The first of the ranks that train together."""
        return 0

    def join(self) -> None:
        """Join the process group, unless that was done before the run directory was known."""
        if not dist.is_initialized():
            join_process_group(self.info, self.link)

    def context(self, journal: Journal, cache: Path, stop: StopRequest, change_file: ChangeFile) -> RankContext:
        """Return what the parts of this rank are built from."""
        return read_context(
            self.run,
            self.info,
            journal,
            cache=cache,
            link=self.link,
            stop=stop,
            change_requested=change_file.is_requested,
        )

    def begin(self, parts: WorkerParts, stop: StopRequest, change_file: ChangeFile) -> Training:
        """Restore the newest state, and return the training from there."""
        checkpointer = Checkpointer.resume(parts.checkpoint)
        parts.context.journal.resume(checkpointer.start)
        return Training(parts, checkpointer, change_file)


def _check_first_loss(parts: WorkerParts, start: int) -> None:
    """Raise UserError if a Hugging Face model begins with another loss than transformers computes."""
    context, trainer, data = parts.context, parts.trainer, parts.training_data
    recipe = context.recipe
    if start > 0 or not recipe.model.kind.is_hf or not recipe.train.check_first_loss:
        return
    from trimaran.train.features.first_loss import check_first_loss  # noqa: PLC0415  transformers takes seconds to import

    with context.link.section("load"):
        check_first_loss(
            recipe,
            context.plan,
            context.rank_info,
            networks=parts.networks,
            ranks=parts.ranks,
            stepper=trainer.stepper,
            objective=data.objective,
            feed=trainer.feed(),
        )
