"""Sums over all ranks, for the metrics: the parts of a step's loss, and the loader's counts."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trimaran.data.step_batch import StepBatch
from trimaran.nets import Network
from trimaran.parallel import RankMesh
from trimaran.train.loss.later_loss import later_loss_names, later_loss_sums
from trimaran.train.loss.objective import LossSums, Objective, mean_losses
from trimaran.train.metrics.host_copy import copy_to_host_async


class LossPartSums:
    """Adds up the loss parts of one step's micro-batches on this rank. Losses of later tokens are parts of their own.

    The latter are those of `networks` since the last step.
    """

    def __init__(self, objective: Objective, ranks: RankMesh, networks: Sequence[Network] = ()) -> None:
        self._names, self._ranks = (*objective.part_names, *later_loss_names(networks)), ranks
        self._networks = networks
        self._parts: Tensor | None = None
        if objective.part_names:
            self._parts = torch.zeros(len(objective.part_names), 2, dtype=torch.float64, device=ranks.device)

    def add(self, losses: LossSums) -> None:
        if self._parts is not None and losses.parts is not None:
            self._parts += losses.parts

    def sums(self, batch: StepBatch) -> Tensor | None:
        """Return what this rank adds to the loss parts and to the loader's counts, flat; None if there are none.

        All ranks must have the same names in `batch.metrics`.
        """
        held = []
        if self._parts is not None:
            # The ranks of a tp group have the same loss. In a pipeline only the last stage has one.
            held.append((self._parts if self._ranks.rank("tp") == 0 else torch.zeros_like(self._parts)).flatten())
        if later_loss_names(self._networks):
            held.append(later_loss_sums(self._networks, self._ranks).flatten())
        if batch.metrics:
            counts = [float(each) if self._ranks.counts_samples else 0.0 for each in batch.metrics.values()]
            host = torch.tensor(counts, dtype=torch.float64, pin_memory=self._ranks.device_traits.has_own_memory)
            held.append(host.to(self._ranks.device, non_blocking=True))
        return torch.cat(held) if held else None

    def details(self, sums: Tensor | None, batch: StepBatch) -> Callable[[], dict[str, Any]]:
        """Return a function that returns the `sums` of all ranks, added up, as metrics. Call it one step later."""
        if sums is None:
            return dict
        copy, names, keys, size = copy_to_host_async(sums), self._names, tuple(batch.metrics), 2 * len(self._names)

        def read() -> dict[str, Any]:
            on_host = copy()
            losses = {"losses": mean_losses(on_host[:size].view(-1, 2), names)} if names else {}
            return losses | ({"rows": dict(zip(keys, on_host[size:].tolist(), strict=True))} if keys else {})

        return read
