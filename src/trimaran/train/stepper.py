"""How one step's micro-batches become gradients. The mode is chosen once; the trainer only calls `step`."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from trimaran.checkpoint.pieces import State
from trimaran.core import Plan, TrainSection
from trimaran.data.loader import StepBatch
from trimaran.nets import Network
from trimaran.parallel import RankMesh, autocast, gradient_sync
from trimaran.train.agreement import WISHES
from trimaran.train.clock import Clock
from trimaran.train.guard import Guard
from trimaran.train.loss import summed_loss
from trimaran.train.router import router_statistics
from trimaran.train.update import Updater

Details = Callable[[], dict[str, Any]]
NO_WISHES = (False,) * len(WISHES)


class Stepper(Protocol):
    """One mode of training: plain, pipeline, DeepSpeed. Every rank calls every method, in the same order."""

    def step(self, batch: StepBatch, *, wishes: Sequence[bool] = NO_WISHES) -> Tensor:
        """Leave the gradient of the global batch's mean loss on the parameters.

        Returns (mean loss, valid tokens, for each of WISHES the ranks that have it, for each rank 1 if its share of the
        loss is bad), on the device.
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
        """Return this rank's share of the batch's summed loss: the shares of all ranks add up to the whole."""
        ...

    def scores(self, ids: Tensor) -> Tensor:
        """Return the score of every token that may follow `ids` [length], on the CPU, alike on every rank."""
        ...

    def set_training(self, training: bool) -> None: ...

    def state(self, train: TrainSection) -> State:
        """Return what must be kept to go on exactly. Asked once, before the first step."""
        ...


class PlainStepper:
    """Forward and backward of each micro-batch in turn."""

    def __init__(self, network: Network, plan: Plan, ranks: RankMesh, updater: Updater, clock: Clock) -> None:
        self._network, self._plan, self._ranks, self._updater, self._clock = network, plan, ranks, updater, clock
        self._device = ranks.device
        self._set_sync = gradient_sync(network.module, plan)
        self._of_routers: Details = dict
        self._loss = torch.zeros((), device=self._device)

    def step(self, batch: StepBatch, *, wishes: Sequence[bool] = NO_WISHES) -> Tensor:
        """See `Stepper.step`.

        The reduction averages over the ranks that see different tokens, so each rank's share is scaled up by their
        number: what remains is one division by the valid tokens of all ranks (law 1).
        """
        count = StepCount(batch, self._ranks, self._updater.guard, wishes=wishes)  # hidden behind the first forward
        total = torch.zeros((), device=self._device)
        for index in range(self._plan.grad_accum):
            self._set_sync(index == self._plan.grad_accum - 1)
            loss, balance = self._losses(batch, index)
            self._clock.lap("forward")
            num_valid = count.num_valid()
            self._clock.lap("comm")
            ((loss + balance) * (self._updater.scale * self._plan.mesh.data / num_valid)).backward()
            total += loss.detach()
            self._clock.lap("backward")
        numbers = count.numbers(total)
        self._loss = numbers[0]
        self._of_routers = router_statistics([self._network], self._ranks)
        self._clock.lap("comm")
        return numbers

    def update(self, lr: float) -> tuple[Tensor, Tensor]:
        return self._updater.update(lr, self._loss)

    def details(self) -> Details:
        of_update, of_routers = self._updater.details(), self._of_routers
        return lambda: of_update | of_routers()

    def evaluate(self, batch: StepBatch) -> Tensor:
        losses = [self._losses(batch, index)[0] for index in range(self._plan.grad_accum)]
        return torch.stack(losses).sum() * (self._ranks.rank("tp") == 0)

    def scores(self, ids: Tensor) -> Tensor:
        with autocast(self._plan, self._device):
            return next_scores(self._network, self._ranks, ids)

    def set_training(self, training: bool) -> None:
        self._network.module.train(training)

    def state(self, train: TrainSection) -> State:
        return self._updater.state([self._network.module], train, self._plan)

    def _losses(self, batch: StepBatch, index: int) -> tuple[Tensor, Tensor]:
        with autocast(self._plan, self._device):
            return losses_of(self._network, batch, index)


class StepCount:
    """What all ranks count for one step. The sums are on their way while something else is computed."""

    def __init__(self, batch: StepBatch, ranks: RankMesh, guard: Guard, *, wishes: Sequence[bool]) -> None:
        self._ranks, self._guard, self._num_valid = ranks, guard, batch.num_valid
        here = (batch.num_valid if ranks.counts_samples else 0, *map(int, wishes))
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
        return torch.cat([sums[:1] / self.num_valid(), counts, sums[1:]])


def losses_of(network: Network, batch: StepBatch, index: int) -> tuple[Tensor, Tensor]:
    """Return the summed loss of this rank's positions of one micro-batch, and the balance loss."""
    documents = None if batch.documents is None else batch.documents[index]
    logits, balance = network.forward(batch.tokens[index], documents)
    return summed_loss(logits, network.context.mine(batch.labels[index])), balance


def next_scores(network: Network, ranks: RankMesh, ids: Tensor) -> Tensor:
    """Return the logits after the last of `ids`, whole and on the CPU, though positions and vocabulary may be split."""
    logits, _ = network.forward(padded(ids, ranks))
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
