"""The stepper of a pipeline: a schedule of torch's decides which micro-batch passes which stage when."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.checkpoint.tensor_shards import State
from trimaran.core import Plan, TrainSection
from trimaran.data.step_batch import Inputs, StepBatch
from trimaran.nets import Network
from trimaran.parallel import RankMesh, autocast
from trimaran.parallel.axes.pp import (
    Compute,
    Schedule,
    Stage,
    build_schedule,
    empty_streams,
    map_stages,
    relay,
    sum_tied_gradients,
    survey_stages,
)
from trimaran.train.loss.objective import LanguageObjective, Objective, likeliest
from trimaran.train.metrics.router_stats import router_statistics
from trimaran.train.metrics.step_clock import Clock
from trimaran.train.steppers.loss_parts import PartSums
from trimaran.train.steppers.stepper import NO_WISHES, Details, StepCount, padded, row_of, share_of, verdict
from trimaran.train.steppers.update import Updater


class PipelineStepper:
    """Micro-batches pass from stage to stage. `networks` are the stages here; all ranks of a pipeline load the same."""

    def __init__(
        self,
        networks: Sequence[Network],
        plan: Plan,
        ranks: RankMesh,
        updater: Updater,
        clock: Clock,
        objective: Objective | None = None,
    ) -> None:
        self._objective = objective or LanguageObjective()
        self._networks, self._plan, self._ranks, self._updater, self._clock = networks, plan, ranks, updater, clock
        self._stages = map_stages(plan, ranks)
        self._facts = survey_stages(networks, self._stages, ranks.device)
        self._device, kind = ranks.device, ranks.device.type
        with autocast(plan, self._device):  # the stream travels in the dtype of the plan's products
            self._dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
        self._schedules: dict[tuple[tuple[int, ...], ...], Schedule] = {}  # by the shapes of what passes
        # Of the step that runs or ran last: its batch, where its time went, what its loss is multiplied by, its summed
        # loss here, and its mean loss over all ranks.
        self._batch = StepBatch(0, {}, 0)
        self._watch, self._waited = clock.stopwatch(), lambda: 0.0
        self._scale = self._total = self._mean = torch.zeros((), device=self._device)
        self._parts = PartSums(self._objective, ranks)
        self._of_routers: Details = dict
        self._of_parts: Details = dict

    def step(self, batch: StepBatch, *, wishes: Sequence[bool] = NO_WISHES) -> Tensor:
        """See `Stepper.step`. Time between the computations of a schedule is time spent waiting for other stages."""
        count = StepCount(batch, self._ranks, self._updater.guard, wishes=wishes)
        self._scale = self._updater.scale * self._plan.mesh.data / count.num_valid()
        self._total = torch.zeros((), device=self._device)
        self._batch, self._parts = batch, PartSums(self._objective, self._ranks)
        numbers_of = torch.arange(self._plan.grad_accum)  # what the schedule cuts up: micro-batches may be ragged
        schedule = self._schedule(batch.micro(0))
        self._clock.lap("comm")
        self._watch = self._clock.stopwatch()
        schedule.step(number=numbers_of, target=numbers_of, return_outputs=False)
        self._waited = self._clock.split(self._watch, rest="comm")
        sum_tied_gradients(self._networks, self._stages, self._facts)
        numbers = count.numbers(self._total)
        self._mean = numbers[0]
        self._of_routers = router_statistics(self._networks, self._ranks)
        self._of_parts = self._parts.read(batch)
        self._clock.lap("comm")
        return numbers

    def update(self, lr: float) -> tuple[Tensor, Tensor]:
        return self._updater.update(lr, self._mean)

    def details(self) -> Details:
        """See `Stepper.details`. The measured bubble is the mean over the ranks of a pipeline."""
        watch, waited = self._watch, self._waited
        of_update, of_routers, of_parts = self._updater.details(), self._of_routers, self._of_parts

        def read() -> dict[str, Any]:
            busy = sum(watch.phases()[phase] for phase in ("forward", "backward"))
            # On the CPU, where nobody waits for what the device is doing by now.
            share = torch.tensor(waited() / (busy + waited()), dtype=torch.float64)
            dist.all_reduce(share, group=self._stages.group)
            measured = share.item() / self._plan.mesh.pp
            bubble = {"measured": measured, "theoretical": self._plan.bubble}
            return {"bubble": bubble} | of_update() | of_routers() | of_parts()

        return read

    @torch.no_grad()
    def evaluate(self, batch: StepBatch) -> Tensor:
        total = torch.zeros(1 + 2 * len(self._objective.scores), dtype=torch.float64, device=self._device)
        for index in range(self._plan.grad_accum):
            inputs = batch.micro(index)
            output = self._answer(inputs)
            if output is not None:
                total += verdict(self._objective, self._networks[-1], output, inputs)
        return share_of(total, self._ranks)

    @torch.no_grad()
    def scores(self, ids: Tensor) -> Tensor:
        logits = self._answer({"tokens": padded(ids, self._ranks)})
        row = torch.empty(self._networks[0].vocabulary, device=self._device)
        if logits is not None:
            row = row_of(logits, len(ids) - 1, self._networks[-1], self._ranks).contiguous()
        dist.broadcast(row, group=self._stages.group, group_src=self._stages.owners[-1])
        return row.cpu()

    @torch.no_grad()
    def guesses(self, inputs: Inputs) -> Tensor:
        logits = self._answer(inputs)
        found = torch.empty_like(inputs["tokens"])
        if logits is not None:
            found = likeliest(self._networks[-1], logits).contiguous()
        dist.broadcast(found, group=self._stages.group, group_src=self._stages.owners[-1])
        return found.cpu()

    def set_training(self, training: bool) -> None:
        for network in self._networks:
            network.module.train(training)

    def state(self, train: TrainSection) -> State:
        return self._updater.state([network.module for network in self._networks], train, self._plan)

    def _schedule(self, inputs: Inputs) -> Schedule:
        """Return the schedule for micro-batches like `inputs`."""
        streams = [empty_streams(network, self._ranks, inputs, self._dtype) for network in self._networks]
        shapes = tuple(tuple(each.shape) for pair in streams for each in pair)
        if shapes not in self._schedules:
            stages = [
                Stage(
                    network.module,
                    number,
                    self._stages,
                    streams=pair,
                    compute=self._compute(number, network),
                    watch=self._timed,
                )
                for number, network, pair in zip(self._stages.here, self._networks, streams, strict=True)
            ]
            self._schedules[shapes] = build_schedule(self._plan, stages)
        return self._schedules[shapes]

    def _compute(self, number: int, network: Network) -> Compute:
        """Return what a stage does to a micro-batch. Where everything before it is frozen, no gradient goes there."""
        compute = partial(self._loss if number == self._stages.last else self._stream, network)
        if self._facts.needs_gradient(number):
            return compute

        def alone(*stream: Tensor, number: Tensor) -> Tensor:
            out = compute(*(each.detach() for each in stream), number=number)
            if stream:
                return _OfNoUse.apply(out, *stream)
            return out if out.requires_grad else out.detach().requires_grad_()

        return alone

    def _timed(self, phase: str) -> AbstractContextManager[None]:
        return self._watch.run(phase)

    def _forward(self, network: Network, *stream: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        with autocast(self._plan, self._device):
            return network.forward(inputs, *stream)

    def _stream(self, network: Network, *stream: Tensor, number: Tensor) -> Tensor:
        """Return what a stage but the last passes on of a micro-batch."""
        out, balance = self._forward(network, *stream, inputs=self._batch.micro(int(number)))
        out = out.to(self._dtype).contiguous()
        return _WithLoss.apply(out, balance, self._scale) if balance.requires_grad else out

    def _loss(self, network: Network, *stream: Tensor, number: Tensor) -> Tensor:
        """Return what the last stage starts backward from. Logits are not kept for it, only what their loss needs."""
        inputs = self._batch.micro(int(number))
        output, balance = self._forward(network, *stream, inputs=inputs)
        losses = self._objective.losses(network, output, inputs)
        self._total += losses.total.detach()
        self._parts.add(losses)
        return (losses.total + balance) * self._scale

    def _answer(self, inputs: Inputs) -> Tensor | None:
        """Return the output for one micro-batch, forward only; None on ranks that do not hold the last stage."""

        def compute(network: Network, *stream: Tensor) -> Tensor:
            out, _ = self._forward(network, *stream, inputs=inputs)
            return out if network is self._networks[-1] and self._stages.has_last else out.to(self._dtype).contiguous()

        entering = [empty_streams(network, self._ranks, inputs, self._dtype)[0] for network in self._networks]
        return relay(self._stages, [partial(compute, network) for network in self._networks], entering)


class _OfNoUse(torch.autograd.Function):
    """Returns what a stage has made. In backward, what had come into it gets a gradient of zeros.

    A schedule sends a gradient for everything that it has passed on, and asks of everything whether it leads there.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, stream: Tensor) -> Tensor:
        ctx.save_for_backward(stream)
        return out.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor]:
        (stream,) = ctx.saved_tensors
        return gradients[0], torch.zeros_like(stream)


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
