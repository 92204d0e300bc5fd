"""Sampled values of this rank's weights, read with a few launches."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from trimaran.nets.local_shards import local_part
from trimaran.optim.split_bf16 import join_fp32
from trimaran.optim.split_weights import NO_SPLIT_WEIGHTS, SplitWeights
from trimaran.parallel.batched.address_table import has_kernels, to_device
from trimaran.parallel.memory.tensors_on_disk import store_of

MIN_SAMPLED_VALUES = 2**10  # of a large tensor, enough to estimate the norm of its update
MAX_SAMPLED_VALUES = 2 * MIN_SAMPLED_VALUES
Sample = Callable[[], Tensor]


class SampledWeights:
    """Reads sampled values of some parameters, which may be sharded, or split in two halves. No shard is empty."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], device: torch.device, split: SplitWeights = NO_SPLIT_WEIGHTS
    ) -> None:
        self._parameters, self._device = parameters, device
        self._halves = [split.lower_halves.get(each) for each in parameters]
        self.sizes = [_num_samples(local_part(each), low) for each, low in zip(parameters, self._halves, strict=True)]
        """The number of values of each parameter."""
        self._addresses: list[int] = []
        self._launches: list[tuple[Tensor, torch.dtype, bool]] = []
        self._plain: list[Sample] = []
        self._split: list[tuple[Sample, Sample]] = []
        self._places = torch.empty(0, dtype=torch.int64, device=device)

    def read(self) -> Tensor:
        """Return the values in fp32 [parameters, MAX_SAMPLED_VALUES], padded with zeros."""
        parts = [local_part(each) for each in self._parameters]
        addresses = [0 if each is None else each.data_ptr() for each in (*parts, *self._halves)]
        if addresses != self._addresses:  # FSDP moves tensors at the first steps
            self._prepare(parts)
            self._addresses = addresses
        samples = torch.zeros(len(parts), MAX_SAMPLED_VALUES, device=self._device)
        if self._launches:
            from trimaran.parallel.batched.tensor_kernels import DTYPES, gather_samples  # noqa: PLC0415  needs Triton

            for table, dtype, has_low in self._launches:
                gather_samples[(len(table),)](
                    table, samples, DTYPE=DTYPES[dtype], HAS_LOW=has_low, WIDTH=MAX_SAMPLED_VALUES
                )
        if len(self._places):
            samples.view(-1).index_copy_(0, self._places, self._concatenate())
        return samples

    def _concatenate(self) -> Tensor:
        """Return the values that no kernel reads, flat."""
        plain = [each() for each in self._plain]
        upper, lower = ([each[half]() for each in self._split] for half in (0, 1))
        joined = [join_fp32(torch.cat(upper), torch.cat(lower))] if upper else []
        return torch.cat([*plain, *joined]).float()

    def _prepare(self, parts: Sequence[Tensor]) -> None:
        """Build the tables of what kernels read, and the views of the rest."""
        rows: dict[tuple[torch.dtype, bool], list[list[int]]] = {}
        plain, split = [], []
        for number, (part, low) in enumerate(zip(parts, self._halves, strict=True)):
            if _is_on_disk(part, low):
                first = [partial(_first_values, each, self._device) for each in (part, low) if each is not None]
                plain += [(number, first[0])] if low is None else []
                split += [] if low is None else [(number, (first[0], first[1]))]
            elif has_kernels(part.device.type) and part.is_contiguous() and (low is None or low.is_contiguous()):
                row = [part.data_ptr(), 0 if low is None else low.data_ptr(), _stride(part), self.sizes[number], number]
                rows.setdefault((part.dtype, low is not None), []).append(row)
            elif low is None:
                plain.append((number, _sample_of(part)))
            else:
                split.append((number, (_sample_of(part), _sample_of(low))))
        self._launches = [(to_device(torch.tensor(table), self._device), *kind) for kind, table in rows.items()]
        self._plain, self._split = [each for _, each in plain], [each for _, each in split]
        numbers = [number for number, _ in (*plain, *split)]
        ranges = [torch.arange(self.sizes[each]) + each * MAX_SAMPLED_VALUES for each in numbers]
        self._places = to_device(torch.cat([torch.empty(0, dtype=torch.int64), *ranges]), self._device)


def _is_on_disk(part: Tensor, low: Tensor | None) -> bool:
    """Return whether a weight, or its lower half, is in a file."""
    return any(each is not None and store_of(each) is not None for each in (part, low))


def _num_samples(part: Tensor, low: Tensor | None) -> int:
    if _is_on_disk(part, low):
        return min(part.numel(), MAX_SAMPLED_VALUES)
    return sample_values(part).numel()


def _first_values(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the first values, of a page or two: values spread over a file would need a read each."""
    return tensor.reshape(-1)[:MAX_SAMPLED_VALUES].to(device)


def _sample_of(tensor: Tensor) -> Sample:
    """Return a function that returns the present `sample_values`."""
    if tensor.is_contiguous():
        view = sample_values(tensor)
        return lambda: view
    return lambda: sample_values(tensor)


def sample_values(tensor: Tensor) -> Tensor:
    """Return values spread evenly over a tensor, flat: all of them, or at most MAX_SAMPLED_VALUES.

    A view, if the tensor is contiguous.
    """
    if tensor.is_contiguous():
        return tensor.view(-1)[:: _stride(tensor)]
    stride = max(1, tensor.numel() // MIN_SAMPLED_VALUES)  # of complete rows, because a flat view does not exist
    rows = tensor[:: min(stride, len(tensor))].flatten()
    return rows[:: -(-len(rows) // MAX_SAMPLED_VALUES)]


def _stride(tensor: Tensor) -> int:
    """Return the stride of samples. It has no common factor with the row length, so all columns are sampled."""
    stride, width = max(1, tensor.numel() // MIN_SAMPLED_VALUES), tensor.shape[-1] if tensor.ndim else 1
    while math.gcd(stride, width) > 1:
        stride += 1
    return stride
