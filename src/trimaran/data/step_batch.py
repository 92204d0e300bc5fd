"""One optimizer step's work for one rank, as tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from trimaran.data.feed import BadSample

Inputs = Mapping[str, Tensor]
"""One micro-batch, by the names that its network knows."""
OUTLINES = ("documents", "grids")  # what tells how the rest is cut up, which the host must know


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What `feed.Load` is, as tensors. Text has `tokens` and `labels` [grad_accum, micro_batch, seq_len].

    `labels` are -100 where there is no target; `num_valid` counts the others. `sample_ids` follow the rows.
    """

    step: int
    arrays: Mapping[str, Tensor]
    num_valid: int
    sample_ids: tuple[int, ...] = ()
    cuts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    facts: Mapping[str, float] = field(default_factory=dict)
    bad: tuple[BadSample, ...] = ()
    outlines: Mapping[str, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device) -> "StepBatch":
        """Return the batch on `device`; from pinned memory the copy runs while the host goes on.

        What is in OUTLINES stays on the host as well, under its name behind `host_`: read back from the device it would
        make the host wait.
        """
        arrays = {name: each.to(device, non_blocking=True) for name, each in self.arrays.items()}
        return replace(self, arrays=arrays, outlines={n: self.arrays[n] for n in OUTLINES if n in self.arrays})

    def micro(self, index: int) -> Inputs:
        """Return one micro-batch."""
        here = {name: self._part(name, each, index) for name, each in self.arrays.items()}
        return here | {f"host_{name}": self._part(name, each, index) for name, each in self.outlines.items()}

    def _part(self, name: str, array: Tensor, index: int) -> Tensor:
        return array[slice(*self.cuts[name][index : index + 2])] if name in self.cuts else array[index]


def text_batch(
    step: int, tokens: Tensor, labels: Tensor, documents: Tensor | None = None, sample_ids: tuple[int, ...] = ()
) -> StepBatch:
    """Return a step of plain text; the tensors are [grad_accum, micro_batch, seq_len]."""
    arrays = {"tokens": tokens, "labels": labels} | ({} if documents is None else {"documents": documents})
    return StepBatch(step, arrays, int((labels >= 0).sum()), sample_ids)
