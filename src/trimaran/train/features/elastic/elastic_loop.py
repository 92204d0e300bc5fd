"""Trains an elastic replica: local steps as if it were alone, and a synchronisation with those who are alive.

The outer state of a replica changes only once all replicas have all values of the exchange.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.core import LocalSteps, Plan, StepMetrics, synchronisation_bytes
from trimaran.data import BatchFeed, DataShare, Deal, Loader, RowLedger, TokenFeed, share_of
from trimaran.parallel import (
    TORCH_DTYPES,
    BucketExchange,
    CheckpointState,
    IndexEntry,
    OuterBucket,
    OuterTensor,
    TensorMeta,
    TensorShard,
    copy_values,
    exchange_of,
    meta_of,
    split_fragments,
    start_over,
)
from trimaran.runs import Journal, Round, RunDirectory, group_prefix
from trimaran.train.agreement import LoopExit, StepDecision, StopRequest
from trimaran.train.build import WorkerParts
from trimaran.train.change_file import ChangeFile
from trimaran.train.checkpointing.checkpointer import Checkpointer, DelegatingSaver
from trimaran.train.checkpointing.tiers import CheckpointInputs
from trimaran.train.features.elastic.replica import (
    Membership,
    Replica,
    abandon,
    check_replica,
    join_replica,
    make_group,
    run_until,
)
from trimaran.train.features.outer_update import OuterShards, ReplicaKeys
from trimaran.train.features.table import LOCAL_STEPS, features_of
from trimaran.train.health.guard import too_many_bad_samples
from trimaran.train.inputs.training_data import TrainingData
from trimaran.train.plain_rank import PlainRank, Training
from trimaran.train.process.rank_setup import RankInfo
from trimaran.train.process.supervisor_link import SupervisorLink, supervisor_store
from trimaran.train.rank_context import RankContext, read_context
from trimaran.train.steppers.engine import StepperContext
from trimaran.train.steppers.feature import Feature, Load, LoadContext, MakeTrainer, UpdatePart
from trimaran.train.steppers.stepper import TorchStepper
from trimaran.train.trainer import Trainer


class DealtLoader:
    """Opens the loader of a step, and keeps it open: batches that are loaded ahead stay right in a healthy run."""

    def __init__(self, ledger: RowLedger) -> None:
        self._ledger = ledger
        self._loader: Loader | None = None
        self._deal: Deal | None = None

    @contextmanager
    def open(self, loader_from: Callable[[int], AbstractContextManager[Loader]], step: int) -> Iterator[Loader]:
        """Yield the loader of the batches from `step` on. Another block continues with it."""
        deal = self._ledger.deal
        is_next = self._loader is not None and self._loader.next_step == step
        if not is_next or self._deal is None or not self._ledger.continues(self._deal):
            self.close()
            self._loader, self._deal = loader_from(step).__enter__(), deal
        assert self._loader is not None
        yield self._loader

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()
        self._loader = None


Received = list[tuple[Tensor, Tensor | None]]
"""For each bucket, the mean of the replicas, and what a sparse exchange has not sent."""


@dataclass(frozen=True, slots=True)
class ElasticOuter:
    """The outer state of this rank's parameters, in host memory, saved under the keys of replica 0."""

    plan: Plan
    buckets: Sequence[OuterBucket]
    replica: int = 0

    @property
    def local(self) -> LocalSteps:
        return self.plan.comm.local

    def tensors(self) -> Iterator[OuterTensor]:
        return (each for bucket in self.buckets for each in bucket.tensors())

    @torch.no_grad()
    def restore(self, loaded: Callable[[OuterTensor], bool]) -> None:
        start_over(each for each in self.tensors() if not loaded(each))

    def exchange(self, group: dist.ProcessGroup) -> Received:
        """Return the means over the replicas of `group`. It changes no state, so that it can be repeated."""
        start, received = exchange_of(self.local, group), Received()
        before: BucketExchange | None = None
        for bucket in self.buckets:
            running = bucket.start(start)
            if before is not None:
                received.append((before.mean.finish(), before.error))
            before = running
        if before is not None:
            received.append((before.mean.finish(), before.error))
        return received

    @torch.no_grad()
    def take(self, received: Received) -> None:
        for bucket, (mean, error) in zip(self.buckets, received, strict=True):
            bucket.take(mean, error)

    @torch.no_grad()
    def forget_error(self) -> None:
        """Start without error feedback: what was received with a state is what another replica has not sent yet."""
        for each in self.tensors():
            if each.kind == "error":
                each.tensor.zero_()


SEED_STRIDE = 1_000_003  # between the random seeds of replicas, which drop different elements


class ElasticPart(UpdatePart):
    """The outer state of a replica, which is synchronised outside of its steps, and the rows that were consumed."""

    def __init__(self, outer: ElasticOuter, ledger: RowLedger) -> None:
        self.outer = outer
        self.keys = ReplicaKeys(outer)
        self.state = (OuterShards(outer, self.keys),)
        self.counters = {"rows": ledger}


class ElasticFeature(Feature):
    """A replica of an elastic run. The replica that leads a round writes metrics and checkpoints after it."""

    writes_lines = False

    def __init__(self, replica: Replica, ledger: RowLedger) -> None:
        self._number, self._ledger = replica.number, ledger
        self.loader = DealtLoader(ledger)
        self.seed_offset = replica.number * SEED_STRIDE

    def wrap_load(self, load: Load, context: LoadContext) -> Load:
        def load_dealt(share: DataShare) -> TrainingData:
            data = load(share)

            def training(quarantined: frozenset[int]) -> BatchFeed:
                feed = data.training(quarantined)
                assert isinstance(feed, TokenFeed), "elastic replicas train on text"
                return feed.with_share(self._ledger.dealt_share(self._number, share))

            return replace(data, training=training)

        return load_dealt

    def update_parts(self, context: StepperContext) -> Sequence[UpdatePart]:
        fragments = split_fragments(context.networks, 1, separate=context.plan.mesh.pp > 1)
        host, local = torch.device("cpu"), context.plan.comm.local
        buckets = [OuterBucket(named, local, host) for each in fragments for named in each]
        return (ElasticPart(ElasticOuter(context.plan, buckets), self._ledger),)

    def wrap_trainer(self, make: MakeTrainer) -> MakeTrainer:
        def make_for_replica(**parts: Any) -> Trainer:
            loader_from = partial(self.loader.open, parts["loader_from"])
            return make(**parts | {"loader_from": loader_from})

        return make_for_replica


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
        self.journal, self._number = parts.trainer.check.journal, replica.number
        self._last: Round | None = None
        self._savers: tuple[int, ...] = ()  # replicas in their order: if the first is lost, the next one saves
        self._group: dist.ProcessGroup | None = None  # of the contributors of the last round
        self._group_of: tuple[tuple[int, int], ...] = ()  # number and start of each of them
        super().__init__(parts, self._begin(parts.checkpoint), change_file)

    @property
    def leads(self) -> bool:
        """Whether this replica writes metrics, evaluations and checkpoints until the next synchronisation."""
        return self._savers[:1] == (self._number,)

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
        self._last = opened
        self._savers = (*opened.contributors, *receivers) if opened.contributors else tuple(result.members)
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
                if self.leads:
                    why = "elastic replicas keep their plan while they run"
                    self._change_file.drop(why, status="refused", step=step)
                    self.checkpointer.after_step(step, StepDecision(save=opened.save))
                    evaluate = self.recipe.train.evaluate.every
                    if evaluate and step // evaluate > before // evaluate and step < steps:
                        self.trainer.evaluator.run(step=step)
                if opened.stop and step < steps:
                    return LoopExit(step=step, reason="stop")
        finally:
            self.loader.close()
        return LoopExit(step=step, reason="done")

    def saves_end(self) -> bool:
        """Return whether this replica must save the end of the run; wait until it must, or until another one has.

        A replica reports its save before it exits. So once it is seen as lost, its report is visible, too.
        """
        assert self._last is not None
        waiting = [each for each in self._savers if each in self._last.starts]
        for each in waiting[: waiting.index(self._number)]:
            while not self.membership.is_finished():
                if self.membership.is_lost(each, self._last):
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
            if self._group is not None:
                abandon(self._group)
            self._group, self._group_of = None, ()
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
        self._last, self._savers = opened, (*staying, *joined)
        if self._number == opened.source:
            self._send(opened, joined, step)
        return opened

    def _exchange(self, opened: Round) -> Received | None:
        """Return what the contributors exchange; None if it failed, or if the round is over before."""
        whose = tuple((each, opened.starts[each]) for each in opened.contributors)

        def exchange() -> tuple[dist.ProcessGroup, Received]:
            group = self._group if whose == self._group_of else None
            if group is None:
                group = make_group(self.store, opened.contributors, self._number, prefix=self._prefix(opened, "mean"))
            return group, self.outer.exchange(group)

        found = run_until(exchange, lambda: self.membership.is_over(opened))
        if found is None:
            return None
        self._group, self._group_of = found[0], whose
        return found[1]

    def _prefix(self, opened: Round, what: str) -> str:
        return f"{group_prefix(opened.number)}{what}/{dist.get_rank()}/"

    def _send(self, opened: Round, receivers: Sequence[int], step: int) -> None:
        """Send the state of this rank to those who join. If they are lost meanwhile, they join later."""
        if not receivers:
            return
        prefix = self._prefix(opened, "state")

        def send() -> None:
            group = make_group(self.store, (opened.source, *receivers), self._number, prefix=prefix)
            send_state(self.state, step, group)

        run_until(send, lambda: any(self.membership.is_lost(each, opened) for each in receivers))

    def _write_lines(self, opened: Round, seconds: float) -> None:
        """Write the metrics since the last synchronisation, of all replicas, if this one is the first of them."""
        held = self.journal.hold_lines()
        if opened.contributors[0] != self._number or self.journal.rank != 0:
            return
        num = len(opened.contributors)
        num_bytes = synchronisation_bytes(self.outer.local, sum(each.num_values for each in self.outer.buckets), num)
        outer = {"bytes": round(num_bytes), "seconds": seconds, "fragments": [0], "replicas": num}
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
