"""How one step's micro-batches become gradients. The mode is chosen once; the trainer only calls `step`."""

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from trimaran.checkpoint.tensor_shards import State
from trimaran.core import Plan, TrainSection
from trimaran.data.step_batch import Inputs, StepBatch
from trimaran.nets import Network
from trimaran.parallel import RankMesh, autocast, gradient_sync
from trimaran.train.agreement import WISHES
from trimaran.train.health.guard import Guard
from trimaran.train.loss.head_loss import LossHead, loss_head
from trimaran.train.loss.objective import LanguageObjective, LossSums, Objective, likeliest
from trimaran.train.metrics.gather_waits import GatherWaits, watch_gathers
from trimaran.train.metrics.router_stats import router_statistics
from trimaran.train.metrics.step_clock import Clock
from trimaran.train.steppers.loss_parts import PartSums
from trimaran.train.steppers.update import Updater

Details = Callable[[], dict[str, Any]]
Judge = Callable[[Inputs], tuple[LossSums, Tensor]]  # a micro-batch in; this rank's losses and the balance loss out
NO_WISHES = (False,) * len(WISHES)


class Stepper(Protocol):
    """One mode of training: plain, pipeline, DeepSpeed. Every rank calls every method, in the same order."""

    def step(self, batch: StepBatch, *, wishes: Sequence[bool] = NO_WISHES) -> Tensor:
        """Leave the gradient of the global batch's mean loss on the parameters.

        Returns (mean loss, valid tokens, for each of WISHES the ranks that have it, 0 unless ranks that share a batch
        had different ones, for each rank 1 if its share of the loss is bad), on the device. The loss of different
        batches is no number, so that it moves nothing.
        """
        ...

    def update(self, lr: float) -> tuple[Tensor, Tensor]:
        """Clip by the global norm, move the weights unless the guard refuses that, clear the gradients.

        Returns the norm before clipping, and 1.0 where the step was refused, else 0.0.
        """
        ...

    def details(self) -> Details:
        """Return what is worth knowing of this step beyond the metrics, to be read a step later."""
        ...

    def evaluate(self, batch: StepBatch) -> Tensor:
        """Return this rank's share of the batch's summed loss, and behind it of the objective's scores, flat.

        The shares of all ranks add up to the whole. fp64, on the device.
        """
        ...

    def scores(self, ids: Tensor) -> Tensor:
        """Return the score of every token that may follow `ids` [length], on the CPU, alike on every rank."""
        ...

    def guesses(self, inputs: Inputs) -> Tensor:
        """Return the likeliest token after each of one micro-batch, [B, T] on the CPU, for sequences of this rank."""
        ...

    def set_training(self, training: bool) -> None: ...

    def state(self, train: TrainSection) -> State:
        """Return what must be kept to go on exactly. Asked once, before the first step."""
        ...


class PlainStepper:
    """Forward and backward of each micro-batch in turn."""

    def __init__(
        self,
        network: Network,
        plan: Plan,
        ranks: RankMesh,
        updater: Updater,
        clock: Clock,
        objective: Objective | None = None,
    ) -> None:
        self._network, self._plan, self._ranks, self._updater, self._clock = network, plan, ranks, updater, clock
        self._objective = objective or LanguageObjective()
        self._device = ranks.device
        self._judge = judge_of(self._objective, network, plan)
        self._set_sync = gradient_sync(network.module, plan)
        self._waits = GatherWaits()
        watch_gathers(network.module, self._waits)
        self._of_routers: Details = dict
        self._of_parts: Details = dict
        self._loss = torch.zeros((), device=self._device)

    def step(self, batch: StepBatch, *, wishes: Sequence[bool] = NO_WISHES) -> Tensor:
        """See `Stepper.step`.

        The reduction averages over the ranks that see different tokens, so each rank's share is scaled up by their
        number: what remains is one division by the valid tokens of all ranks (law 1).
        """
        count = StepCount(batch, self._ranks, self._updater.guard, wishes=wishes)  # hidden behind the first forward
        total, parts = torch.zeros((), device=self._device), PartSums(self._objective, self._ranks)
        for index in range(self._plan.grad_accum):
            self._set_sync(index == self._plan.grad_accum - 1)
            self._waits.begin(self._clock)
            losses, balance = self._losses(batch.micro(index))
            loss = losses.total
            self._waits.end(self._clock, "forward")
            num_valid = count.num_valid()
            self._clock.lap("comm")
            backward(
                (loss + balance) * (self._updater.scale * self._plan.mesh.data / num_valid), self._clock, self._waits
            )
            total += loss.detach()
            parts.add(losses)
        numbers = count.numbers(total)
        self._loss = numbers[0]
        self._of_routers = router_statistics([self._network], self._ranks)
        self._of_parts = parts.read(batch)
        self._clock.lap("comm")
        return numbers

    def update(self, lr: float) -> tuple[Tensor, Tensor]:
        return self._updater.update(lr, self._loss)

    def gradients_again(self, batch: StepBatch) -> Iterator[None]:
        """Compute the gradients of a batch anew, stop after each micro-batch for who wants to see them, forget them.

        Replicas keep theirs to themselves: so it shows whose they are. Sharded gradients have to travel.
        """
        alone = self._plan.sharding == "none" and not isinstance(self._network.module, FSDPModule)
        for index in range(self._plan.grad_accum):
            self._set_sync(not alone)
            losses, balance = self._losses(batch.micro(index))
            ((losses.total + balance) * (self._plan.mesh.data / max(1, batch.num_valid))).backward()
            yield
        self._updater.forget()

    def details(self) -> Details:
        of_update, of_routers, of_parts = self._updater.details(), self._of_routers, self._of_parts
        return lambda: of_update() | of_routers() | of_parts()

    def evaluate(self, batch: StepBatch) -> Tensor:
        with autocast(self._plan, self._device):
            rows = [self._verdict(batch.micro(each)) for each in range(self._plan.grad_accum)]
        return share_of(torch.stack(rows).sum(0), self._ranks)

    def scores(self, ids: Tensor) -> Tensor:
        with autocast(self._plan, self._device):
            return next_scores(self._network, self._ranks, ids)

    @torch.no_grad()
    def guesses(self, inputs: Inputs) -> Tensor:
        with autocast(self._plan, self._device):
            return likeliest(self._network, self._network.forward(inputs)[0]).cpu()

    def set_training(self, training: bool) -> None:
        self._network.module.train(training)

    def state(self, train: TrainSection) -> State:
        return self._updater.state([self._network.module], train, self._plan)

    def _losses(self, inputs: Inputs) -> tuple[LossSums, Tensor]:
        with autocast(self._plan, self._device):
            return self._judge(inputs)

    def _verdict(self, inputs: Inputs) -> Tensor:
        if self._objective.scores:  # only logits tell what would have been said
            return judged(self._objective, self._network, inputs)
        return self._judge(inputs)[0].total.double().reshape(1)


def backward(loss: Tensor, clock: Clock, waits: GatherWaits) -> None:
    """Leave gradients on the parameters. What is waited for once they are computed here, their reduction, is `comm`.

    What torch is to call at the end of a backward it calls in the order in which it was asked to. The first thing that
    a backward does is to ask for our mark; DDP and FSDP ask for their waits on the way.
    """
    ask = torch.autograd.Variable._execution_engine.queue_callback
    loss.register_hook(lambda _: ask(partial(waits.end, clock, "backward")))
    waits.begin(clock)
    loss.backward()
    clock.lap("comm")


class StepCount:
    """What all ranks count for one step. The sums are on their way while something else is computed."""

    def __init__(self, batch: StepBatch, ranks: RankMesh, guard: Guard, *, wishes: Sequence[bool]) -> None:
        self._ranks, self._guard, self._num_valid = ranks, guard, batch.num_valid
        here = (batch.num_valid if ranks.counts_samples else 0, *map(int, wishes), weighed(batch, ranks))
        # One by one, since a list would make the host wait for the device.
        self._counts = torch.stack([torch.full((), num, device=ranks.device) for num in here])
        self._counting: dist.Work | None = dist.all_reduce(self._counts, async_op=True)

    def num_valid(self) -> Tensor:
        """Return the valid tokens of the global batch, at least 1: the loss is divided by them."""
        if self._counting is not None:
            self._counting.wait()
            self._counting = None
        return self._counts[0].clamp(min=1)

    def numbers(self, loss: Tensor) -> Tensor:
        """Return what `Stepper.step` does, of the summed `loss` of this rank's positions."""
        sums = torch.zeros(1 + dist.get_world_size(), device=loss.device)
        if self._ranks.rank("tp") == 0:  # the others have computed the same
            sums[0] = loss
            sums[1 + dist.get_rank()] = self._guard.suspects(loss, self._num_valid)
        dist.all_reduce(sums)
        counts = self._counts.double()  # fp32 holds counts up to 16 million only
        mean = torch.where(self._counts[-1] == 0, sums[:1] / self.num_valid(), math.nan)
        return torch.cat([mean, counts, sums[1:]])


def weighed(batch: StepBatch, ranks: RankMesh) -> int:
    """Return a number that adds up to 0 over the ranks that share a batch, if they could use the same samples of it.

    A disk may fail one of them only. What it then puts in the place of the sample has the same shape, so nobody would
    notice, and weights that are everybody's would part.
    """
    twins = ranks.degrees.world_size // ranks.degrees.dp
    told = zlib.crc32(repr((batch.num_valid, [each.sample for each in batch.bad])).encode())
    return told * (twins - 1) if ranks.counts_samples else -told


def judge_of(objective: Objective, network: Network, plan: Plan) -> Judge:
    """Return what makes the losses of a micro-batch: from logits, or, where the plan says so, at the head already."""
    if isinstance(objective, LanguageObjective) and (head := loss_head(network, plan)) is not None:
        return partial(losses_at_head, head, objective, network)
    return partial(losses_of, objective, network)


def losses_at_head(
    head: LossHead, objective: LanguageObjective, network: Network, inputs: Inputs
) -> tuple[LossSums, Tensor]:
    """Return what `losses_of` does; no logits come out of the network."""
    with head.judging(network.context.mine(inputs["labels"])):
        losses, balance = network.forward(inputs)
    return objective.told_apart(network, losses[0], losses[1:].detach(), inputs), balance


def losses_of(objective: Objective, network: Network, inputs: Inputs) -> tuple[LossSums, Tensor]:
    """Return the losses of this rank's positions of one micro-batch, and the balance loss."""
    output, balance = network.forward(inputs)
    return objective.losses(network, output, inputs), balance


def judged(objective: Objective, network: Network, inputs: Inputs) -> Tensor:
    """Return the summed loss of this rank's positions of one micro-batch, and its scores, in a row."""
    output, _ = network.forward(inputs)
    return verdict(objective, network, output, inputs)


def verdict(objective: Objective, network: Network, output: Tensor, inputs: Inputs) -> Tensor:
    """Return the summed loss of `output`, and its scores, in a row."""
    loss = objective.losses(network, output, inputs).total.double()
    return torch.cat([loss.reshape(1), objective.score(network, output, inputs).flatten()])


def share_of(row: Tensor, ranks: RankMesh) -> Tensor:
    """Return this rank's share of a `verdict`: the loss is of its positions, the scores are of whole sequences."""
    first = torch.ones_like(row)
    first[1:] = ranks.rank("cp") == 0
    return row * first * (ranks.rank("tp") == 0)


def next_scores(network: Network, ranks: RankMesh, ids: Tensor) -> Tensor:
    """Return the logits after the last of `ids`, whole and on the CPU, though positions and vocabulary may be split."""
    logits, _ = network.forward({"tokens": padded(ids, ranks)})
    return row_of(logits, len(ids) - 1, network, ranks).cpu()


def padded(ids: Tensor, ranks: RankMesh) -> Tensor:
    """Return `ids` [length] as one sequence [1, T] that splits into even parts.

    What is padded on at the end changes nothing: attention is causal.
    """
    parts = 2 * ranks.degrees.cp * ranks.degrees.tp
    return torch.nn.functional.pad(ids, (0, -len(ids) % parts if parts > 2 else 0))[None]


def row_of(logits: Tensor, position: int, network: Network, ranks: RankMesh) -> Tensor:
    """Return the logits at `position` of one sequence, whole, in fp32, alike on all ranks that share the sequence."""
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    length = logits.shape[1] * ranks.degrees.cp
    here = network.context.mine(torch.arange(length, device=logits.device)[None])[0] == position
    row = logits[0][here].float().sum(0)
    if ranks.degrees.cp > 1:
        dist.all_reduce(row, group=ranks.group("cp"))
    return row
