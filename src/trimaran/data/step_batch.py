"""The arrays of one optimizer step for one rank, as tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trimaran.data.feed import BadSample

Inputs = Mapping[str, Tensor]  # one micro-batch: the keyword inputs of the network
HOST_ARRAYS = ("documents", "grids")  # describe the layout of the other arrays; the host needs their values


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
        """Return the batch on `device`. From pinned memory the copy is asynchronous.

        HOST_ARRAYS also stay on the host, under the name `host_<name>`: reading them from the device would
        synchronize.
        """
        arrays = {name: each.to(device, non_blocking=True) for name, each in self.arrays.items()}
        host_arrays = {name: self.arrays[name] for name in HOST_ARRAYS if name in self.arrays}
        # As `replace`, which takes twice as long.
        return StepBatch(
            self.step, arrays, self.num_valid, self.sample_ids, self.offsets, self.metrics, self.bad, host_arrays
        )

    def micro(self, index: int) -> Inputs:
        """Return one micro-batch."""
        inputs = {name: self._slice(name, each, index) for name, each in self.arrays.items()}
        return inputs | {f"host_{name}": self._slice(name, each, index) for name, each in self.host_arrays.items()}

    def _slice(self, name: str, array: Tensor, index: int) -> Tensor:
        return array[slice(*self.offsets[name][index : index + 2])] if name in self.offsets else array[index]


def text_batch(
    step: int, tokens: Tensor, labels: Tensor, documents: Tensor | None = None, sample_ids: tuple[int, ...] = ()
) -> StepBatch:
    """Return a step of plain text; the tensors are [grad_accum, micro_batch, seq_len]."""
    arrays = {"tokens": tokens, "labels": labels} | ({} if documents is None else {"documents": documents})
    return StepBatch(step, arrays, int((labels >= 0).sum()), sample_ids)
