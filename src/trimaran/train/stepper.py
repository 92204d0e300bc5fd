"""How one step's micro-batches become gradients. The mode is chosen once; the trainer only calls `step`."""

import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.core import Plan
from trimaran.data.loader import StepBatch
from trimaran.nets import Network
from trimaran.parallel import autocast, gradient_sync
from trimaran.train.clock import Clock
from trimaran.train.loss import summed_loss


class PlainStepper:
    """Forward and backward of each micro-batch in turn; gradients travel with the last one only."""

    def __init__(self, network: Network, plan: Plan, device: torch.device, clock: Clock) -> None:
        self._network, self._plan, self._device, self._clock = network, plan, device, clock
        self._set_sync = gradient_sync(network.module)

    def step(self, batch: StepBatch, *, stop: bool) -> Tensor:
        """Leave the gradient of the global batch's mean loss on the parameters.

        Returns (mean loss, valid tokens, ranks that want to stop) of the global batch, on the device. The reduction
        averages over the data ranks, so each rank's share is scaled up by their number: what remains is one division
        by the valid tokens of all ranks (law 1).
        """
        counts = torch.tensor([batch.num_valid, stop], device=self._device)
        counting = dist.all_reduce(counts, async_op=True)  # hidden behind the first forward
        num_valid, total = counts[0], torch.zeros((), device=self._device)
        for index in range(self._plan.grad_accum):
            self._set_sync(index == self._plan.grad_accum - 1)
            loss, balance = self.losses(batch, index)
            self._clock.lap("forward")
            if index == 0:
                counting.wait()
                num_valid.clamp_(min=1)
                self._clock.lap("comm")
            ((loss + balance) * (self._plan.mesh.dp / num_valid)).backward()
            total += loss.detach()
            self._clock.lap("backward")
        dist.all_reduce(total)
        self._clock.lap("comm")
        return torch.stack([total / num_valid, *counts.double()])  # fp32 could not hold a count above 16 million

    def losses(self, batch: StepBatch, index: int) -> tuple[Tensor, Tensor]:
        """Return the summed loss and the balance loss of one micro-batch."""
        documents = None if batch.documents is None else batch.documents[index]
        with autocast(self._plan, self._device):
            logits, balance = self._network.forward(batch.tokens[index], documents)
        return summed_loss(logits, batch.labels[index]), balance
