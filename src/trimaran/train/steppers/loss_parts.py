"""Sums over all ranks, for the metrics: the parts of a step's loss, and the loader's counts."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from trimaran.data.step_batch import StepBatch
from trimaran.parallel import RankMesh
from trimaran.train.loss.objective import LossSums, Objective, mean_losses


class LossPartSums:
    """Adds up the loss parts of one step's micro-batches. Every rank must call `read`, which is a collective."""

    def __init__(self, objective: Objective, ranks: RankMesh) -> None:
        self._names, self._ranks = objective.part_names, ranks
        self._sums = torch.zeros(len(self._names), 2, dtype=torch.float64, device=ranks.device)

    def add(self, losses: LossSums) -> None:
        if losses.parts is not None:
            self._sums += losses.parts

    def read(self, batch: StepBatch) -> Callable[[], dict[str, Any]]:
        """Return a function that returns the sums as metrics. Call it one step later.

        This is one small all-reduce, or none if there is nothing to sum. All ranks must have the same `batch.facts`.
        """
        if not self._names and not batch.metrics:
            return dict
        counted = float(self._ranks.counts_samples)
        facts = [torch.full((), value * counted, device=self._ranks.device) for value in batch.metrics.values()]
        # The ranks of a tp group have the same loss. In a pipeline only the last stage has one.
        ours = self._sums * float(self._ranks.rank("tp") == 0)
        sums = torch.cat([ours.flatten(), *(each.double().reshape(1) for each in facts)])
        dist.all_reduce(sums)
        copy = sums.to("cpu", non_blocking=True)
        copied = torch.cuda.Event() if sums.is_cuda else None
        if copied is not None:
            copied.record()
        names, keys, size = self._names, tuple(batch.metrics), ours.numel()

        def read() -> dict[str, Any]:
            if copied is not None:
                copied.synchronize()
            losses = {"losses": mean_losses(copy[:size].view(-1, 2), names)} if names else {}
            return losses | ({"rows": dict(zip(keys, copy[size:].tolist(), strict=True))} if keys else {})

        return read
