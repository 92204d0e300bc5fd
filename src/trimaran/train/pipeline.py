"""The stepper of a pipeline: a schedule of torch's decides which micro-batch passes which stage when."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.checkpoint.pieces import State
from trimaran.core import Plan, TrainSection
from trimaran.data.loader import StepBatch
from trimaran.nets import Network
from trimaran.parallel import RankMesh, autocast
from trimaran.parallel.axes.pp import (
    Schedule,
    Stage,
    build_schedule,
    empty_stream,
    map_stages,
    relay,
    sum_tied_gradients,
)
from trimaran.train.clock import Clock
from trimaran.train.loss import summed_loss
from trimaran.train.router import router_statistics
from trimaran.train.stepper import NO_WISHES, Details, StepCount, padded, row_of
from trimaran.train.update import Updater


class PipelineStepper:
    """Micro-batches pass from stage to stage. `networks` are the stages here; all ranks of a pipeline load the same."""

    def __init__(
        self, networks: Sequence[Network], plan: Plan, ranks: RankMesh, updater: Updater, clock: Clock
    ) -> None:
        self._networks, self._plan, self._ranks, self._updater, self._clock = networks, plan, ranks, updater, clock
        self._stages = map_stages(plan, ranks)
        self._device, kind = ranks.device, ranks.device.type
        with autocast(plan, self._device):  # the stream travels in the dtype of the plan's products
            self._dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
        self._schedules: dict[int, Schedule] = {}  # by the length of the sequences
        # Of the step that runs or ran last: where its time went, what its loss is multiplied by, its summed loss here,
        # and its mean loss over all ranks.
        self._watch, self._waited = clock.stopwatch(), lambda: 0.0
        self._scale = self._total = self._mean = torch.zeros((), device=self._device)
        self._of_routers: Details = dict

    def step(self, batch: StepBatch, *, wishes: Sequence[bool] = NO_WISHES) -> Tensor:
        """See `Stepper.step`. Time between the computations of a schedule is time spent waiting for other stages."""
        count = StepCount(batch, self._ranks, self._updater.guard, wishes=wishes)
        self._scale = self._updater.scale * self._plan.mesh.data / count.num_valid()
        self._total = torch.zeros((), device=self._device)
        rows = {"tokens": batch.tokens.flatten(0, 1), "labels": batch.labels.flatten(0, 1)}
        if batch.documents is not None:
            rows["documents"] = batch.documents.flatten(0, 1)
        schedule = self._schedule(batch.tokens[0])
        self._clock.lap("comm")
        self._watch = self._clock.stopwatch()
        schedule.step(**rows, target=rows["labels"], return_outputs=False)
        self._waited = self._clock.split(self._watch, rest="comm")
        sum_tied_gradients(self._networks, self._stages)
        numbers = count.numbers(self._total)
        self._mean = numbers[0]
        self._of_routers = router_statistics(self._networks, self._ranks)
        self._clock.lap("comm")
        return numbers

    def update(self, lr: float) -> tuple[Tensor, Tensor]:
        return self._updater.update(lr, self._mean)

    def details(self) -> Details:
        """See `Stepper.details`. The measured bubble is the mean over the ranks of a pipeline."""
        watch, waited = self._watch, self._waited
        of_update, of_routers = self._updater.details(), self._of_routers

        def read() -> dict[str, Any]:
            busy = sum(watch.phases()[phase] for phase in ("forward", "backward"))
            # On the CPU, where nobody waits for what the device is doing by now.
            share = torch.tensor(waited() / (busy + waited()), dtype=torch.float64)
            dist.all_reduce(share, group=self._stages.group)
            measured = share.item() / self._plan.mesh.pp
            return {"bubble": {"measured": measured, "theoretical": self._plan.bubble}} | of_update | of_routers()

        return read

    @torch.no_grad()
    def evaluate(self, batch: StepBatch) -> Tensor:
        total = torch.zeros((), device=self._device)
        for index in range(self._plan.grad_accum):
            documents = None if batch.documents is None else batch.documents[index]
            logits = self._answer(batch.tokens[index], documents)
            if logits is not None:
                total += summed_loss(logits, self._networks[-1].context.mine(batch.labels[index]))
        return total * (self._ranks.rank("tp") == 0)

    @torch.no_grad()
    def scores(self, ids: Tensor) -> Tensor:
        logits = self._answer(padded(ids, self._ranks), None)
        row = torch.empty(self._networks[0].vocabulary, device=self._device)
        if logits is not None:
            row = row_of(logits, len(ids) - 1, self._networks[-1], self._ranks).contiguous()
        dist.broadcast(row, group=self._stages.group, group_src=self._stages.owners[-1])
        return row.cpu()

    def set_training(self, training: bool) -> None:
        for network in self._networks:
            network.module.train(training)

    def state(self, train: TrainSection) -> State:
        return self._updater.state([network.module for network in self._networks], train, self._plan)

    def _schedule(self, tokens: Tensor) -> Schedule:
        """Return the schedule for micro-batches like `tokens`."""
        length = tokens.shape[1]
        if length not in self._schedules:
            stages = [
                Stage(
                    network.module,
                    number,
                    self._stages,
                    stream=empty_stream(network, self._ranks, tokens, self._dtype),
                    compute=partial(self._loss if number == self._stages.last else self._stream, network),
                    watch=self._timed,
                )
                for number, network in zip(self._stages.here, self._networks, strict=True)
            ]
            self._schedules[length] = build_schedule(self._plan, stages)
        return self._schedules[length]

    def _timed(self, phase: str) -> AbstractContextManager[None]:
        return self._watch.run(phase)

    def _forward(
        self, network: Network, *stream: Tensor, tokens: Tensor, documents: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        with autocast(self._plan, self._device):
            return network.module(*stream, tokens=tokens, documents=documents)

    def _stream(
        self, network: Network, *stream: Tensor, tokens: Tensor, labels: Tensor, documents: Tensor | None = None
    ) -> Tensor:
        """Return what a stage but the last passes on."""
        out, balance = self._forward(network, *stream, tokens=tokens, documents=documents)
        out = out.to(self._dtype).contiguous()
        return _WithLoss.apply(out, balance, self._scale) if balance.requires_grad else out

    def _loss(
        self, network: Network, *stream: Tensor, tokens: Tensor, labels: Tensor, documents: Tensor | None = None
    ) -> Tensor:
        """Return what the last stage starts backward from. Logits are not kept for it, only what their loss needs."""
        logits, balance = self._forward(network, *stream, tokens=tokens, documents=documents)
        loss = summed_loss(logits, network.context.mine(labels))
        self._total += loss.detach()
        return (loss + balance) * self._scale

    def _answer(self, tokens: Tensor, documents: Tensor | None) -> Tensor | None:
        """Return the logits of one micro-batch, forward only; None on ranks that do not hold the last stage."""

        def compute(network: Network, *stream: Tensor) -> Tensor:
            out, _ = self._forward(network, *stream, tokens=tokens, documents=documents)
            return out if network is self._networks[-1] and self._stages.has_last else out.to(self._dtype).contiguous()

        stream = empty_stream(self._networks[0], self._ranks, tokens, self._dtype)
        return relay(self._stages, [partial(compute, network) for network in self._networks], stream)


class _WithLoss(torch.autograd.Function):
    """Returns the stream as it is. In backward a loss that was made on the way gets its gradient too.

    So the balance loss of a stage's experts stays where it is, and one tensor passes between stages.
    """

    @staticmethod
    def forward(ctx: Any, stream: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return stream.detach()  # a view could not be let go of after a backward in two parts

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, None]:
        (scale,) = ctx.saved_tensors
        return gradients[0], scale, None
