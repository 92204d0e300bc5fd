"""The stepper of pipeline parallelism. A torch pipeline schedule runs the micro-batches through the stages."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.core import SECONDS_DECIMALS, WORLD, Phase
from trimaran.data import Inputs, StepBatch
from trimaran.nets import Network
from trimaran.parallel import autocast, kept_weight_casts, map_stages, time_gathers
from trimaran.parallel.axes import pp
from trimaran.train.loss.cross_entropy import compute_later_loss
from trimaran.train.loss.objective import predicted_tokens
from trimaran.train.metrics.step_clock import ReadEvents, attribute
from trimaran.train.steppers.engine import StepperContext
from trimaran.train.steppers.step_totals import LossPartSums
from trimaran.train.steppers.stepper import (
    NO_REQUESTS,
    DetailsReader,
    TorchStepper,
    gather_logits_row,
    loss_and_scores,
    mask_duplicates,
    pad_to_even_shards,
)
from trimaran.train.steppers.update import Updater


class PipelineStepper(TorchStepper):
    """Runs micro-batches through a pipeline. `networks` are this rank's stages. All its ranks load the same batch."""

    def __init__(self, context: StepperContext, updater: Updater) -> None:
        super().__init__(context, updater)
        networks, plan, ranks = context.networks, context.plan, context.ranks
        self._stages = map_stages(plan, ranks)
        self._facts = pp.gather_stage_facts(networks, self._stages, ranks.device)
        kind = ranks.device.type
        with autocast(plan, self._device):  # activations are sent in the dtype of the plan's matmuls
            self._dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
        self._schedules: dict[tuple[tuple[int, ...], ...], pp.Schedule] = {}  # by the shapes of the sent activations
        # State of the current or last step: its batch, its time by phase, the factor of its loss, its summed loss.
        self._batch = StepBatch(0, {}, 0)
        for network in networks:
            time_gathers(network.module, self._data_axis)
            compute_later_loss(network, None)
        self._read_schedule: ReadEvents = list  # the time of the schedule
        self._scale = self._loss_sum = torch.zeros((), device=self._device)
        self._parts = LossPartSums(self._objective, ranks)

    def step(self, batch: StepBatch, *, requests: Sequence[int] = NO_REQUESTS) -> Tensor:
        """See `Stepper.step`. Time between the computations of a schedule counts as waiting for other stages."""
        self._clock.enter("comm")
        totals = self.updater.begin_step(batch, requests)
        self._scale = self.updater.scale * self._plan.mesh.data / totals.num_valid()
        self._loss_sum = torch.zeros((), device=self._device)
        self._batch, self._parts = batch, LossPartSums(self._objective, self._ranks, self._networks)
        indices = torch.arange(self._plan.grad_accum)  # split by the schedule; micro-batches may differ in size
        inputs = batch.micro(0)
        streams = [pp.empty_streams(network, self._ranks, inputs, self._dtype) for network in self._networks]
        shapes = tuple(tuple(each.shape) for pair in streams for each in pair)
        if shapes not in self._schedules:
            stages = [
                pp.TimedStage(
                    network.module,
                    number,
                    self._stages,
                    streams=pair,
                    compute=self._compute(number, network),
                    timer=partial(self._span, number),
                )
                for number, network, pair in zip(self._stages.here, self._networks, streams, strict=True)
            ]
            self._schedules[shapes] = pp.build_schedule(self._plan, stages)
        schedule = self._schedules[shapes]
        self._clock.lap("comm", WORLD)
        self._clock.time_waits()
        with kept_weight_casts():
            schedule.step(number=indices, target=indices, return_outputs=False)
        self._clock.lap("comm", "pp")
        self._read_schedule = self._clock.last_lap()
        pp.sum_tied_gradients(self._networks, self._stages, self._facts)
        self._clock.lap("comm", "pp")
        self._clock.time_waits()
        squares = self.updater.measure_gradients()
        self._reduced = totals.reduce(self._loss_sum, self._parts, self._networks, squares=squares)
        self._clock.lap("comm", WORLD)
        return self._reduced.numbers

    def details(self) -> DetailsReader:
        """See `Stepper.details`. The measured bubble is the mean over the pipeline's ranks.

        `stage_seconds` is what forward and backward of one micro-batch take in each stage, `stage_layers` its blocks.
        """
        read_schedule, others = self._read_schedule, super().details()

        def read() -> dict[str, Any]:
            _, comm, busy = attribute(read_schedule())
            waited = comm["pp"]
            # A CPU tensor, so that the all-reduce does not wait for the device, which runs the next step by now.
            table = torch.zeros(1 + len(self._stages.owners), 2, dtype=torch.float64)
            table[0, 0] = waited / (sum(busy.values()) + waited)
            for number, network in zip(self._stages.here, self._networks, strict=True):
                seconds = busy.get(number, 0.0) / self._plan.grad_accum
                table[1 + number] = torch.tensor([seconds, len(network.blocks)], dtype=torch.float64)
            dist.all_reduce(table, group=self._stages.group)
            (waits, _), *stages = table.tolist()
            bubble = {
                "measured": waits / self._plan.mesh.pp,
                "theoretical": self._plan.bubble,
                "stage_seconds": [round(seconds, SECONDS_DECIMALS) for seconds, _ in stages],
                "stage_layers": [int(layers) for _, layers in stages],
            }
            return {"bubble": bubble} | others()

        return read

    @torch.no_grad()
    def evaluate_one(self, inputs: Inputs) -> Tensor:
        total = torch.zeros(1 + 2 * len(self._objective.score_names), dtype=torch.float64, device=self._device)
        output = self._forward_only(inputs)
        if output is not None:
            total += loss_and_scores(self._objective, self._networks[-1], output, inputs)
        return mask_duplicates(total, self._ranks)

    @torch.no_grad()
    def next_token_logits(self, ids: Tensor) -> Tensor:
        logits = self._forward_only({"tokens": pad_to_even_shards(ids, self._ranks)})
        row = torch.empty(self._networks[0].vocabulary, device=self._device)
        if logits is not None:
            row = gather_logits_row(logits, len(ids) - 1, self._networks[-1], self._ranks).contiguous()
        dist.broadcast(row, group=self._stages.group, group_src=self._stages.owners[-1])
        return row.cpu()

    @torch.no_grad()
    def predict_tokens(self, inputs: Inputs) -> Tensor:
        logits = self._forward_only(inputs)
        tokens = torch.empty_like(inputs["tokens"])
        if logits is not None:
            tokens = predicted_tokens(self._networks[-1], logits).contiguous()
        dist.broadcast(tokens, group=self._stages.group, group_src=self._stages.owners[-1])
        return tokens.cpu()

    def _compute(self, number: int, network: Network) -> pp.Compute:
        """Return the forward of a stage. If all stages before it are frozen, it sends no gradient to them."""
        compute = partial(self._forward_last_stage if number == self._stages.last else self._forward_stage, network)
        if number > self._facts.first_trained:
            return compute

        def compute_detached(*stream: Tensor, number: Tensor) -> Tensor:
            out = compute(*(each.detach() for each in stream), number=number)
            if stream:
                # A schedule sends a gradient for every activation that it sent, so the input must be in the graph of
                # the output: here with a gradient of zeros. The sum of no elements is 0 whatever the input holds. An
                # autograd function would do the same, but torch 2.11 cannot split a backward that begins with one.
                return out + stream[0].flatten()[:0].sum().to(out.dtype)
            return out if out.requires_grad else out.detach().requires_grad_()

        return compute_detached

    def _span(self, stage: int, phase: Phase) -> AbstractContextManager[None]:
        return self._clock.span(phase, self._data_axis) if phase == "comm" else self._clock.span(phase, stage=stage)

    def _forward(self, network: Network, *stream: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        with autocast(self._plan, self._device):
            return network.forward(inputs, *stream)

    def _forward_stage(self, network: Network, *stream: Tensor, number: Tensor) -> Tensor:
        out, balance = self._forward(network, *stream, inputs=self._batch.micro(int(number)))
        out = out.to(self._dtype).contiguous()
        return _AttachBalanceLoss.apply(out, balance, self._scale) if balance.requires_grad else out

    def _forward_last_stage(self, network: Network, *stream: Tensor, number: Tensor) -> Tensor:
        inputs = self._batch.micro(int(number))
        output, balance = self._forward(network, *stream, inputs=inputs)
        losses = self._objective.losses(network, output, inputs)
        self._loss_sum += losses.total.detach()
        self._parts.add(losses)
        return (losses.total + balance) * self._scale

    def _forward_only(self, inputs: Inputs) -> Tensor | None:
        """Return the output for one micro-batch, without backward; None on ranks that do not hold the last stage."""

        def compute(network: Network, *stream: Tensor) -> Tensor:
            out, _ = self._forward(network, *stream, inputs=inputs)
            return out if network is self._networks[-1] and self._stages.has_last else out.to(self._dtype).contiguous()

        entering = [pp.empty_streams(network, self._ranks, inputs, self._dtype)[0] for network in self._networks]
        return pp.forward_through_stages(
            self._stages, [partial(compute, network) for network in self._networks], entering
        )


class _AttachBalanceLoss(torch.autograd.Function):
    """Returns the activations unchanged; its backward also starts the backward of a stage's balance loss.

    So the balance loss of a stage's experts need not be sent, and only one tensor passes between stages.
    """

    @staticmethod
    def forward(ctx: Any, stream: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return stream.detach()  # not a view: a schedule that splits backward in two could not free a view

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, None]:
        (scale,) = ctx.saved_tensors
        return gradients[0], scale, None
