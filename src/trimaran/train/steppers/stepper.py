"""The stepper protocol, and the stepper without a pipeline: forward and backward over the micro-batches of a step."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.core import WORLD, Plan, TrainSection, data_axis
from trimaran.data import Inputs, StepBatch
from trimaran.nets import Network, is_dtensor, is_fsdp_module
from trimaran.parallel import CheckpointState, RankMesh, autocast, gradient_sync
from trimaran.train.agreement import RANK_REQUESTS
from trimaran.train.loss.cross_entropy import build_loss_head, compute_later_loss
from trimaran.train.loss.objective import LanguageObjective, LossSums, Objective, predicted_tokens
from trimaran.train.metrics.router_stats import balance_routers
from trimaran.train.metrics.step_clock import StepClock
from trimaran.train.steppers.step_totals import LossPartSums, ReducedStep
from trimaran.train.steppers.update import Updater

if TYPE_CHECKING:
    from trimaran.parallel.comm.gradient_buckets import GradientBuckets
    from trimaran.train.steppers.engine import StepperContext
    from trimaran.train.steppers.step_graphs import StepGraphs

DetailsReader = Callable[[], dict[str, Any]]
LossFunction = Callable[[Inputs], tuple[LossSums, Tensor]]  # from a micro-batch to this rank's losses and balance loss
NO_REQUESTS = (False,) * len(RANK_REQUESTS)


class Stepper(Protocol):
    """Runs the steps of one mode of training. Every rank calls every method, in the same order."""

    _reduced: ReducedStep | None = None  # the sums of the last step over all ranks

    def step(self, batch: StepBatch, *, requests: Sequence[int] = NO_REQUESTS) -> Tensor:
        """Compute the gradient of the mean loss of the global batch and leave it in `parameter.grad`.

        `requests` has 1 for each of RANK_REQUESTS that this rank makes, else 0, and after these any other numbers.

        Returns one tensor on the device: the mean loss, the number of valid tokens, the sums of `requests` over all
        ranks, 0 if the ranks that share a batch loaded the same one, and for each rank 1 if its own loss is bad, plus
        MEMORY_CHANGED if its weights or optimizer states have changed since the last update. If ranks loaded different
        batches or memory has changed, the loss is NaN, so that the guard refuses the update.
        """

    def update(self, lr: float) -> tuple[Tensor, Tensor]:
        """Clip by the global norm, update unless the guard refuses, clear the gradients; return norm and refused.

        The norm is that before clipping; `refused` is 1.0 or 0.0.
        """

    def numbers_later(self, norm: Tensor, refused: Tensor) -> Callable[[], list[float]]:
        """Return a function for the numbers of `step` and what `update` returned, over all ranks.

        It waits until they are copied from the device; called one step later, it has nothing to wait for.
        """
        assert self._reduced is not None, "the numbers are those of a step"
        return self._reduced.numbers_later(norm, refused)

    def details(self) -> DetailsReader:
        """Return a function that returns the optional metrics of this step. Call it one step later."""

    def evaluate(self, batch: StepBatch) -> Tensor:
        """Return the summed loss of the batch and the objective's scores, flat, in fp64, on the device.

        The sum over all ranks counts each token and each sequence once.
        """

    def next_token_logits(self, ids: Tensor) -> Tensor:
        """Return the logits of the token that follows `ids` [length], on the CPU, the same on every rank."""

    def next_token_function(self) -> Callable[[Tensor], Tensor]:
        """Return `next_token_logits`, with a key-value cache if the plan allows one; for weights that do not change."""
        return self.next_token_logits

    def predict_tokens(self, inputs: Inputs) -> Tensor:
        """Return the most likely next token at each position of this rank's micro-batch, [B, T], on the CPU."""

    def set_training(self, training: bool) -> None: ...

    def full_tensor(self, parameter: Tensor) -> Tensor:
        """Return the value that is trained, unsharded, on the CPU: in fp32, also if the parameter has 16 bits of it."""

    def state(self, train: TrainSection, *, without_base: bool = False) -> CheckpointState:
        """Return the state that a checkpoint must hold for an exact resume. Called once, before the first step.

        `without_base` leaves out frozen parameters, see `TrainingState`.
        """


class TorchStepper(Stepper):
    """A stepper of the torch engine: of one network, or of the stages of a pipeline."""

    def __init__(self, context: "StepperContext", updater: Updater) -> None:
        self.context, self.updater, self._networks = context, updater, context.networks
        self._plan, self._ranks, self._clock = context.plan, context.ranks, context.clock
        self._objective, self._device = context.objective, context.ranks.device
        self._data_axis = data_axis(context.plan)

    def update(self, lr: float) -> tuple[Tensor, Tensor]:
        assert self._reduced is not None, "an update follows a step"
        assert self._reduced.squares is not None
        norm, refused = self.updater.update(lr, self._reduced.numbers[0], self._reduced.squares)
        balance_routers(self._networks, self._reduced.routing, refused)
        return norm, refused

    def details(self) -> DetailsReader:
        assert self._reduced is not None
        update_details, step_details = self.updater.details(), self._reduced.details
        return lambda: update_details() | step_details()

    def evaluate(self, batch: StepBatch) -> Tensor:
        return torch.stack([self.evaluate_one(batch.micro(each)) for each in range(self._plan.grad_accum)]).sum(0)

    def evaluate_one(self, inputs: Inputs) -> Tensor:
        """Return what `evaluate` returns, for one micro-batch of this rank, of any size."""
        raise NotImplementedError

    def release_graphs(self) -> None:
        """Free the CUDA graphs, and with them the memory that only they can use."""

    def set_training(self, training: bool) -> None:
        for network in self._networks:
            network.module.train(training)

    def full_tensor(self, parameter: Tensor) -> Tensor:
        return self.updater.split_weights.full_tensor(parameter)

    def state(self, train: TrainSection, *, without_base: bool = False) -> CheckpointState:
        modules = [network.module for network in self._networks]
        return self.updater.state(modules, train, without_base=without_base)


class PlainStepper(TorchStepper):
    """Runs forward and backward of one micro-batch after another."""

    def __init__(self, context: "StepperContext", updater: Updater) -> None:
        super().__init__(context, updater)
        plan, ranks, network = context.plan, context.ranks, context.networks[0]
        self._network = network
        self._loss_function = build_loss_function(self._objective, network, plan)
        self._set_sync = gradient_sync(network.module, plan)
        time_fsdp_gathers(network, plan)
        self._buckets: GradientBuckets | None = None
        if plan.reduces_after_backward:
            from trimaran.parallel.comm.gradient_buckets import buckets_of  # noqa: PLC0415  other plans overlap it

            self._buckets = buckets_of(network.module, ranks.data.get_group())
        self._graphs: StepGraphs | None = None
        # In anomaly mode the kernels of a graph would not run one by one.
        if plan.captures_steps and ranks.device_traits.has_graphs and not torch.is_anomaly_enabled():
            from trimaran.train.steppers import step_graphs  # noqa: PLC0415  a CPU has no graphs

            if step_graphs.has_known_code(network.module):
                self._graphs = step_graphs.StepGraphs(
                    self._forward, network.module, grad_accum=plan.grad_accum, buckets=self._buckets
                )

    def step(self, batch: StepBatch, *, requests: Sequence[int] = NO_REQUESTS) -> Tensor:
        """See `Stepper.step`.

        The reduction averages over data ranks, so each rank's loss is multiplied by their number. What remains is one
        division by the valid tokens of all ranks (principle 1, docs/principles.md).
        """
        self._clock.enter("forward")
        totals = self.updater.begin_step(batch, requests)  # the first sum overlaps the first forward
        total = torch.zeros((), device=self._device)
        parts = LossPartSums(self._objective, self._ranks, [self._network])
        graphs = self._graphs.micro_batches(batch) if self._graphs is not None else ()
        if self._buckets is not None:
            self._buckets.begin_step()
        for index in range(self._plan.grad_accum):
            self._clock.enter("forward")
            inputs = batch.micro(index)
            if graphs:
                captured = graphs[index]
                captured.fill(inputs, self.updater.scale * self._plan.mesh.data / totals.num_valid())
                captured.forward.replay()
                self._clock.lap("forward", then="backward")
                captured.backward.replay()
                self._clock.lap("backward", then="comm")
                losses = captured.losses
            else:
                self._set_sync(index == self._plan.grad_accum - 1)
                self._clock.time_waits()
                losses, balance = self._forward(inputs)
                self._clock.lap("forward", then="comm")
                loss = (losses.total + balance) * (self.updater.scale * self._plan.mesh.data / totals.num_valid())
                self._clock.lap("comm", WORLD, then="backward")
                end_lap_after_backward(loss, self._clock)
                loss.backward()
                self._clock.lap("comm", self._data_axis, then="comm")
                losses = LossSums(losses.total.detach(), losses.parts)
                del loss, balance  # they hold the graph
            total += losses.total
            parts.add(losses)
        if self._graphs is not None and graphs:
            self._graphs.assign_gradients()
        if self._buckets is not None:
            self._buckets.reduce()
            self._clock.lap("comm", self._data_axis)
        self._clock.time_waits()
        self._reduced = totals.reduce(total, parts, [self._network], squares=self.updater.measure_gradients())
        self._clock.lap("comm", WORLD)
        return self._reduced.numbers

    def recompute_gradients(self, batch: StepBatch) -> Iterator[None]:
        """Compute a batch's gradients again; yield after each micro-batch; clear the gradients at the end.

        Replicated gradients are not reduced, so that the caller sees which rank's are bad. Sharded ones must be.
        """
        self.release_graphs()
        is_replicated = self._plan.sharding == "none" and not is_fsdp_module(self._network.module)
        for index in range(self._plan.grad_accum):
            self._set_sync(not is_replicated)
            losses, balance = self._forward(batch.micro(index))
            ((losses.total + balance) * (self._plan.mesh.data / max(1, batch.num_valid))).backward()
            yield
        self.updater.clear_gradients()

    def release_graphs(self) -> None:
        if self._graphs is not None:
            self._graphs.release()

    def evaluate(self, batch: StepBatch) -> Tensor:
        if self._graphs is not None:
            self._graphs.make_room()
        return super().evaluate(batch)

    def evaluate_one(self, inputs: Inputs) -> Tensor:
        with autocast(self._plan, self._device):
            if self._objective.score_names:  # scores need the logits, which a fused head does not return
                row = evaluate_micro_batch(self._objective, self._network, inputs)
            else:
                row = self._loss_function(inputs)[0].total.double().reshape(1)
            return mask_duplicates(row, self._ranks)

    def next_token_logits(self, ids: Tensor) -> Tensor:
        with autocast(self._plan, self._device):
            return compute_next_token_logits(self._network, self._ranks, ids)

    def next_token_function(self) -> Callable[[Tensor], Tensor]:
        """See `Stepper.next_token_function`. tp and cp split a sequence, so that a single token is not enough."""
        if self._ranks.degrees.tp * self._ranks.degrees.cp > 1 or not self._network.has_cache(self._device):
            return self.next_token_logits
        from trimaran.train.generation.generate import CachedLogits  # noqa: PLC0415  only samples need it

        cached = CachedLogits(self._network, self._device)

        def logits(ids: Tensor) -> Tensor:
            with autocast(self._plan, self._device):
                return cached(ids)

        return logits

    @torch.no_grad()
    def predict_tokens(self, inputs: Inputs) -> Tensor:
        with autocast(self._plan, self._device):
            return predicted_tokens(self._network, self._network.forward(inputs)[0]).cpu()

    def _forward(self, inputs: Inputs) -> tuple[LossSums, Tensor]:
        with autocast(self._plan, self._device):
            return self._loss_function(inputs)


def time_fsdp_gathers(network: Network, plan: Plan) -> None:
    if any(is_fsdp_module(each) for each in network.module.modules()):
        from trimaran.parallel.axes.fsdp import time_gathers  # noqa: PLC0415  it imports FSDP

        time_gathers(network.module, data_axis(plan))


def end_lap_after_backward(loss: Tensor, clock: StepClock) -> None:
    """End the lap `backward` when the gradients of `loss` are computed, before their reduction.

    Autograd runs queued callbacks in order: that of the loss comes before those of DDP and FSDP.
    """
    queue_callback = torch.autograd.Variable._execution_engine.queue_callback
    loss.register_hook(lambda _: queue_callback(partial(clock.lap, "backward")))
    clock.time_waits()


def build_loss_function(objective: Objective, network: Network, plan: Plan) -> LossFunction:
    """Return the function that computes the losses of a micro-batch: from logits, or in the head if the plan says."""
    head = build_loss_head(network, plan) if isinstance(objective, LanguageObjective) else None
    compute_later_loss(network, head)
    if not isinstance(objective, LanguageObjective) or head is None:
        return partial(compute_losses, objective, network)

    def compute_in_head(inputs: Inputs) -> tuple[LossSums, Tensor]:
        labels = network.context.shard(inputs["labels"])
        with head.computing_losses(labels, smoothing=objective.smoothing(network)):
            losses, balance = network.forward(inputs)
        return objective.split_by_source(network, losses[0], losses[1:].detach(), inputs), balance

    return compute_in_head


def compute_losses(objective: Objective, network: Network, inputs: Inputs) -> tuple[LossSums, Tensor]:
    """Return the losses of this rank's positions of one micro-batch, and the balance loss of its routers."""
    output, balance = network.forward(inputs)
    return objective.losses(network, output, inputs), balance


def evaluate_micro_batch(objective: Objective, network: Network, inputs: Inputs) -> Tensor:
    output, _ = network.forward(inputs)
    return loss_and_scores(objective, network, output, inputs)


def loss_and_scores(objective: Objective, network: Network, output: Tensor, inputs: Inputs) -> Tensor:
    loss = objective.losses(network, output, inputs).total.double()
    return torch.cat([loss.reshape(1), objective.score(network, output, inputs).flatten()])


def mask_duplicates(row: Tensor, ranks: RankMesh) -> Tensor:
    """Zero what another rank counts: tp ranks share loss and scores, cp ranks the scores only."""
    mask = torch.ones_like(row)
    mask[1:] = ranks.rank("cp") == 0
    return row * mask * (ranks.rank("tp") == 0)


def compute_next_token_logits(network: Network, ranks: RankMesh, ids: Tensor) -> Tensor:
    """Return the unsharded logits after the last of `ids`, on the CPU. Positions and vocabulary may be sharded."""
    logits, _ = network.forward({"tokens": pad_to_even_shards(ids, ranks)})
    return gather_logits_row(logits, len(ids) - 1, network, ranks).cpu()


def pad_to_even_shards(ids: Tensor, ranks: RankMesh) -> Tensor:
    """Return `ids` as [1, T], padded so that cp and tp split it evenly. Causal attention ignores that."""
    multiple = 2 * ranks.degrees.cp * ranks.degrees.tp
    return torch.nn.functional.pad(ids.to(ranks.device), (0, -len(ids) % multiple if multiple > 2 else 0))[None]


def gather_logits_row(logits: Tensor, position: int, network: Network, ranks: RankMesh) -> Tensor:
    """Return the unsharded logits at `position` of one sequence, in fp32, on all ranks that share the sequence."""
    logits = logits.full_tensor() if is_dtensor(logits) else logits
    length = logits.shape[1] * ranks.degrees.cp
    here = network.context.shard(torch.arange(length, device=logits.device)[None])[0] == position
    row = logits[0][here].float().sum(0)
    if ranks.degrees.cp > 1:
        dist.all_reduce(row, group=ranks.group("cp"))
    return row
