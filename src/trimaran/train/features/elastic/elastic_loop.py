"""Trains an elastic replica: local steps as if it were alone, and a synchronisation with those who are alive."""

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.core import StepMetrics
from trimaran.data import RowLedger, share_of
from trimaran.parallel import TORCH_DTYPES, CheckpointState, IndexEntry, TensorMeta, TensorShard, copy_values, meta_of
from trimaran.runs import Journal, Round, RunDirectory, group_prefix
from trimaran.train.agreement import LoopExit, StepDecision, StopRequest
from trimaran.train.build import WorkerParts
from trimaran.train.change_file import ChangeFile
from trimaran.train.checkpointing.checkpointer import Checkpointer, DelegatingSaver
from trimaran.train.checkpointing.tiers import CheckpointInputs
from trimaran.train.features.elastic.elastic_feature import (
    ElasticFeature,
    ElasticPart,
    Received,
)
from trimaran.train.features.elastic.replica import (
    Membership,
    Replica,
    abandon,
    check_replica,
    join_replica,
    make_group,
    run_until,
)
from trimaran.train.features.table import LOCAL_STEPS, features_of
from trimaran.train.health.guard import too_many_bad_samples
from trimaran.train.plain_rank import PlainRank, Training
from trimaran.train.process.rank_setup import RankInfo
from trimaran.train.process.supervisor_link import SupervisorLink, supervisor_store
from trimaran.train.rank_context import RankContext, read_context
from trimaran.train.steppers.stepper import TorchStepper


@torch.no_grad()
def send_state(state: CheckpointState, step: int, group: dist.ProcessGroup) -> None:
    """Send the state of this rank to the other ranks of `group`, which is its first rank."""
    state.gather()
    shards = [*{(each.key, tuple(each.start)): each for each in state.shards()}.values()]
    rows = [[each.key, meta_of(each).dtype, each.shape, each.start, tuple(each.tensor.shape)] for each in shards]
    _broadcast_json({"step": step, "progress": state.progress(), "shards": rows}, group)
    for shard in shards:
        values = torch.empty(tuple(shard.tensor.shape), dtype=shard.tensor.dtype)
        copy_values(shard.tensor, values)
        _broadcast(values, group)


@torch.no_grad()
def receive_state(state: CheckpointState, group: dist.ProcessGroup) -> tuple[int, dict[str, Any]]:
    """Fill this rank's shards with what `send_state` sends; return step and progress, for `state.restore`."""
    header = _broadcast_json(None, group)
    rows = [
        (key, dtype, tuple(shape), tuple(start), tuple(size)) for key, dtype, shape, start, size in header["shards"]
    ]
    index = {key: IndexEntry(TensorMeta(dtype, shape), ()) for key, dtype, shape, _, _ in rows}
    targets: dict[tuple[str, tuple[int, ...]], list[TensorShard]] = {}
    for shard in state.shards_from(index):
        targets.setdefault((shard.key, tuple(shard.start)), []).append(shard)
    for key, dtype, _, start, size in rows:
        values = torch.empty(size, dtype=TORCH_DTYPES[dtype])
        _broadcast(values, group)
        for shard in targets.pop((key, start)):
            shard.tensor.copy_(values)
    if targets:
        raise RuntimeError(f"the other replica has no {next(iter(targets))[0]}")
    return header["step"], header["progress"]


def _broadcast(values: Tensor, group: dist.ProcessGroup) -> None:
    if values.numel():
        as_bytes = values.contiguous().reshape(-1).view(torch.uint8)
        dist.broadcast(as_bytes, group=group, group_src=0)


def _broadcast_json(value: Any, group: dist.ProcessGroup) -> Any:
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    size = torch.tensor([len(data)])
    dist.broadcast(size, group=group, group_src=0)
    data = data if group.rank() == 0 else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, group=group, group_src=0)
    return json.loads(data.numpy().tobytes())


log = logging.getLogger(__name__)


@dataclass(slots=True)
class RoundState:
    """State of the last round: the process group of its contributors (`group_of`: number and start of each).

    `savers`: the replicas in the order in which they save for the run; if the first is lost, the next one does.
    """

    group: dist.ProcessGroup | None = None
    group_of: tuple[tuple[int, int], ...] = ()
    savers: tuple[int, ...] = ()
    last: Round | None = None


class RoundSaver(DelegatingSaver):
    """Saves nothing between rounds: the state is saved after a synchronisation."""

    def after_step(self, step: int, decision: StepDecision) -> None:
        """Do nothing."""


class ElasticLoop(Training):
    """The training of one rank of an elastic replica, from one synchronisation to the next.

    `rank` counts in the run. All ranks of a replica make the same calls; what they do follows from the rounds.
    """

    def __init__(
        self,
        parts: WorkerParts,
        feature: ElasticFeature,
        ledger: RowLedger,
        replica: Replica,
        rank: int,
        stop: StopRequest,
        change_file: ChangeFile,
    ) -> None:
        context, link, stepper = parts.context, parts.context.link, parts.trainer.stepper
        assert isinstance(stepper, TorchStepper), "elastic replicas have no other engine"

        def report_alive() -> None:
            link.report_section("synchronise", link.heartbeat.step if link.heartbeat else 0)

        self.store, self.ledger, self.stop, self.loader = supervisor_store(link), ledger, stop, feature.loader
        self.membership = Membership(self.store, replica, rank, start=link.replica_start, report_alive=report_alive)
        self.recipe, self.run_directory = context.run.read_recipe(), context.run
        self.trainer, self.state, self.updater = parts.trainer, parts.checkpoint.state, stepper.updater
        self.outer = next(part.outer for part in self.updater.parts if isinstance(part, ElasticPart))
        self.journal, self._number, self._now = parts.trainer.check.journal, replica.number, RoundState()
        super().__init__(parts, self._begin(parts.checkpoint), change_file)

    @property
    def leads(self) -> bool:
        """Whether this replica writes metrics, evaluations and checkpoints until the next synchronisation."""
        return self._now.savers[:1] == (self._number,)

    def _begin(self, checkpoint: CheckpointInputs) -> Checkpointer:
        """Restore the newest state, or get that of a replica that trains already; return its checkpointer."""
        resumed = None if self.membership.has_begun() else Checkpointer.resume(checkpoint)
        step = resumed.start if resumed else 0
        opened, result = self.membership.join(step)
        receivers = [each for each in opened.joiners if each in result.members]
        if self._number in receivers:
            prefix = self._prefix(opened, "state")

            def receive() -> tuple[int, dict[str, Any]]:
                group = make_group(self.store, (opened.source, *receivers), self._number, prefix=prefix)
                return receive_state(self.state, group)

            received = run_until(receive, lambda: self.membership.is_lost(opened.source, opened))
            if received is None:
                raise RuntimeError(f"replica {opened.source} was lost while it sent its state")
            step, progress = received
            self.state.restore(progress)
            self.outer.forget_error()
        elif self._number == opened.source:
            self._send(opened, receivers, step)
        checkpointer = resumed or Checkpointer.receive(checkpoint, step)
        self.ledger.begin(step, result.members)
        self._follow(opened, (*opened.contributors, *receivers) if opened.contributors else result.members)
        if self.leads:
            self.journal.resume(step)
        self.updater.record_shards()
        self.journal.hold_lines()
        return checkpointer

    def run(self) -> LoopExit:
        """Train to the end of the run, or until it is asked to stop."""
        saver, step = RoundSaver(self.checkpointer), self.start
        every, steps = self.outer.local.steps, self.recipe.train.steps
        try:
            while step < steps:
                loop_exit = self.trainer.train(saver, step, pause_after=(step // every + 1) * every)
                if loop_exit.reason not in ("pause", "done"):
                    if loop_exit.reason == "data":
                        raise too_many_bad_samples(self.trainer.check.guard.bad_samples, self.run_directory,
                                                   loop_exit.step)  # fmt: skip
                    why = loop_exit.refusal.reason if loop_exit.refusal else loop_exit.reason
                    raise RuntimeError(f"this replica cannot go on by itself after step {loop_exit.step}: {why}")
                before, step = step, loop_exit.step
                opened = self._synchronise(step)
                if self._number in opened.leaving:
                    return LoopExit(step=step, reason="leave")
                self._after(opened, before)
                if opened.stop and step < steps:
                    return LoopExit(step=step, reason="stop")
        finally:
            self.loader.close()
        return LoopExit(step=step, reason="done")

    def saves_end(self) -> bool:
        """Return whether this replica must save the end of the run; wait until it must, or until another one has.

        A replica reports its save before it exits. So once it is seen as lost, its report is visible, too.
        """
        assert self._now.last is not None
        waiting = [each for each in self._now.savers if each in self._now.last.starts]
        for each in waiting[: waiting.index(self._number)]:
            while not self.membership.is_finished():
                if self.membership.is_lost(each, self._now.last):
                    break
            if self.membership.is_finished():
                return False
        return True

    def report_saved(self) -> None:
        self.membership.report_finished()

    def _synchronise(self, step: int) -> Round:
        """Exchange weights with the replicas that are alive, until all of them have the result."""
        began, members = time.perf_counter(), self.membership
        lines = [[each.step, each.loss, each.tokens, each.samples] for each in self.journal.held]
        while True:
            # If the whole run is to stop, the supervisor creates the file before it sends signals.
            is_asked, is_for_all = bool(self.stop), self.run_directory.stop_request.exists()
            stop, leave = is_asked and is_for_all, is_asked and not is_for_all
            save = self.checkpointer.wants_save
            opened = members.next_round(step, stop=stop, leave=leave, save=save, lines=lines)
            received = self._exchange(opened)
            result = members.vote(opened, ok=received is not None)
            if result.ok and received is not None:
                break
            if self._now.group is not None:
                abandon(self._now.group)
            self._now.group, self._now.group_of = None, ()
        self.outer.take(received)
        self.updater.record_shards()
        num_returned = self.ledger.synchronise(step, opened.contributors, result.members)
        joined = [each for each in opened.joiners if each in result.members]
        self._write_lines(opened, time.perf_counter() - began)
        if (joined or num_returned or opened.leaving) and self.journal.rank == 0:
            left = {"left": list(opened.leaving)} if opened.leaving else {}
            self.journal.event("replicas", step=opened.step, replicas=list(opened.contributors), joined=joined, **left,
                               rows_again=num_returned, next_row=self.ledger.next_row)  # fmt: skip
        staying = [each for each in opened.contributors if each not in opened.leaving]
        self._follow(opened, (*staying, *joined))
        if self._number == opened.source:
            self._send(opened, joined, step)
        return opened

    def _exchange(self, opened: Round) -> Received | None:
        """Return what the contributors exchange; None if it failed, or if the round is over before."""
        whose = tuple((each, opened.starts[each]) for each in opened.contributors)

        def exchange() -> tuple[dist.ProcessGroup, Received]:
            group = self._now.group if whose == self._now.group_of else None
            if group is None:
                group = make_group(self.store, opened.contributors, self._number, prefix=self._prefix(opened, "mean"))
            return group, self.outer.exchange(group)

        found = run_until(exchange, lambda: self.membership.is_over(opened))
        if found is None:
            return None
        self._now.group, self._now.group_of = found[0], whose
        return found[1]

    def _prefix(self, opened: Round, what: str) -> str:
        return f"{group_prefix(opened.number)}{what}/{dist.get_rank()}/"

    def _follow(self, opened: Round, savers: Sequence[int]) -> None:
        self._now.last, self._now.savers = opened, tuple(savers)

    def _send(self, opened: Round, receivers: Sequence[int], step: int) -> None:
        """Send the state of this rank to those who join. If they are lost meanwhile, they join later."""
        if not receivers:
            return
        prefix = self._prefix(opened, "state")

        def send() -> None:
            group = make_group(self.store, (opened.source, *receivers), self._number, prefix=prefix)
            send_state(self.state, step, group)

        run_until(send, lambda: any(self.membership.is_lost(each, opened) for each in receivers))

    def _after(self, opened: Round, before: int) -> None:
        """Save and evaluate after a synchronisation, if it is due and this replica leads."""
        step, every, steps = opened.step, self.recipe.train.evaluate.every, self.recipe.train.steps
        if not self.leads:
            return
        self._change_file.drop("elastic replicas keep their plan while they run", status="refused", step=step)
        self.checkpointer.after_step(step, StepDecision(save=opened.save))
        if every and step // every > before // every and step < steps:
            self.trainer.evaluator.run(step=step)

    def _write_lines(self, opened: Round, seconds: float) -> None:
        """Write the metrics since the last synchronisation, of all replicas, if this one is the first of them."""
        held = self.journal.hold_lines()
        if opened.contributors[0] != self._number or self.journal.rank != 0:
            return
        num = len(opened.contributors)
        outer = {"bytes": self.outer.exchanged_bytes(num), "seconds": seconds, "fragments": [0], "replicas": num}
        for line in merge_lines(held, opened.lines, num_replicas=self.membership.replica.num):
            if line.step == opened.step:
                phases = line.phases | {"comm": line.phases.get("comm", 0.0) + seconds}
                line = replace(line, phases=phases, step_seconds=line.step_seconds + seconds,
                               details=line.details | {"outer": outer})  # fmt: skip
            self.journal.write_line(line)


def merge_lines(
    held: Sequence[StepMetrics], lines: Mapping[int, Sequence[Sequence[float]]], *, num_replicas: int
) -> list[StepMetrics]:
    """Return this replica's metrics with loss, tokens and samples of all.

    `lines` has them for each replica, by step. `num_replicas` are those of the plan, and of `mfu`.
    """
    by_step: dict[int, list[Sequence[float]]] = {}
    for row in (row for rows in lines.values() for row in rows):
        by_step.setdefault(int(row[0]), []).append(row)
    merged = []
    for line in held:
        rows = by_step[line.step]
        tokens = sum(row[2] for row in rows)
        loss = sum(row[1] * row[2] for row in rows) / tokens if tokens else math.nan
        merged.append(replace(line, loss=loss, tokens=round(tokens), samples=round(sum(row[3] for row in rows)),
                              mfu=line.mfu / num_replicas))  # fmt: skip
    return merged


class ElasticRank(PlainRank):
    """A rank of an elastic replica. `info` counts in the run, and the context in the replica."""

    def __init__(self, run: RunDirectory, info: RankInfo, link: SupervisorLink, replica: Replica) -> None:
        super().__init__(run, info, replace(link, rank_memories=()))  # other replicas are the copies
        self._replica, self._plan, self.first_rank = replica, run.read_plan(), replica.first_rank
        in_replica = share_of(replica.plan(self._plan), 0)
        self._ledger = RowLedger(in_replica, global_batch=self._plan.global_batch)
        self._feature = ElasticFeature(replica, self._ledger)

    def join(self) -> None:
        check_replica(self.run.read_recipe(), self.link)
        join_replica(self._replica, self._replica.rank_info(self.info), self.link)

    def context(self, journal: Journal, cache: Path, stop: StopRequest, change_file: ChangeFile) -> RankContext:
        """Return what the parts of this rank are built from. The loop asks for stops and changes between rounds."""
        recipe, plan = self._replica.recipe(self.run.read_recipe()), self._replica.plan(self._plan)
        features = (*features_of(plan, recipe, without=[LOCAL_STEPS]), self._feature)
        info = self._replica.rank_info(self.info)
        of_run = read_context(self.run, info, journal, cache=cache, link=self.link)
        return replace(of_run, recipe=recipe, plan=plan, features=features)

    def begin(self, parts: WorkerParts, stop: StopRequest, change_file: ChangeFile) -> ElasticLoop:
        """Restore the newest state, or get it from a replica that trains already; return the training from there."""
        return ElasticLoop(parts, self._feature, self._ledger, self._replica, self.info.rank, stop, change_file)
