"""The arrays of one optimizer step for one rank, as tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trimaran.data.feed import BadSample

Inputs = Mapping[str, Tensor]  # one micro-batch: the keyword inputs of the network
# They describe the layout of the other arrays. The host needs their values, without a synchronization: `host_<name>`.
HOST_ARRAYS = ("documents", "grids")


@dataclass(frozen=True, slots=True)
class StepBatch:
    """`feed.LoadedArrays` as tensors. Text has `tokens` and `labels` [grad_accum, micro_batch, seq_len].

    `labels` are -100 where there is no target; `num_valid` counts the others. `sample_ids` are in row order.
    """

    step: int
    arrays: Mapping[str, Tensor]
    num_valid: int
    sample_ids: tuple[int, ...] = ()
    offsets: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    bad: tuple[BadSample, ...] = ()
    host_arrays: Mapping[str, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device) -> "StepBatch":
        """Return the batch on `device`, copied asynchronously from pinned memory. HOST_ARRAYS also stay on the host."""
        arrays = {name: each.to(device, non_blocking=True) for name, each in self.arrays.items()}
        host_arrays = {name: self.arrays[name] for name in HOST_ARRAYS if name in self.arrays}
        # As `replace`, which takes twice as long.
        return StepBatch(
            self.step, arrays, self.num_valid, self.sample_ids, self.offsets, self.metrics, self.bad, host_arrays
        )

    def micro(self, index: int) -> Inputs:
        """Return one micro-batch."""
        inputs = {}
        for prefix, arrays in (("", self.arrays), ("host_", self.host_arrays)):
            for name, array in arrays.items():
                at = slice(*self.offsets[name][index : index + 2]) if name in self.offsets else index
                inputs[prefix + name] = array[at]
        return inputs


def text_batch(
    step: int, tokens: Tensor, labels: Tensor, documents: Tensor | None = None, sample_ids: tuple[int, ...] = ()
) -> StepBatch:
    """Return a step of plain text; the tensors are [grad_accum, micro_batch, seq_len]."""
    arrays = {"tokens": tokens, "labels": labels} | ({} if documents is None else {"documents": documents})
    return StepBatch(step, arrays, int((labels >= 0).sum()), sample_ids)
