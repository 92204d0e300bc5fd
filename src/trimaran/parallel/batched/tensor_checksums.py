"""Checksums of the bits of many tensors on a GPU, with one launch for each word size."""

from collections.abc import Sequence

import torch
from torch import Tensor

from trimaran.parallel.batched.address_table import ProgramMap, has_kernels, rows_to_device

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # by size in bytes


class TensorChecksums:
    """Sums the bits of each of some tensors, read as integers of the widest size that fits. Any flipped bit shows.

    The tensors are on one GPU, contiguous (see `can_sum`), and stay where they are.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors  # so that their memory is not reused
        device, by_size = tensors[0].device, dict[int, list[int]]()
        for index, each in enumerate(tensors):
            size = next(size for size in WORDS if each.nbytes % size == 0 and each.data_ptr() % size == 0)
            by_size.setdefault(size, []).append(index)
        from trimaran.parallel.batched import tensor_kernels  # noqa: PLC0415  needs Triton

        self._kernels, self._launches = tensor_kernels, list[tuple[torch.dtype, ProgramMap]]()
        firsts, sizes = [0] * len(tensors), [0] * len(tensors)
        for size, indices in by_size.items():
            words = [tensors[index].nbytes // size for index in indices]
            programs = ProgramMap(indices, [-(-each // tensor_kernels.VALUES_PER_PROGRAM) for each in words], device)
            for index, num_words, first in zip(indices, words, programs.firsts, strict=True):
                firsts[index], sizes[index] = first, num_words
            self._launches.append((WORDS[size], programs))
        table = [[each.data_ptr() for each in tensors], sizes, firsts]
        self._addresses, self._sizes, self._firsts = rows_to_device(table, device)

    def compute(self) -> Tensor:
        """Return the checksums as int64, one for each tensor."""
        sums, kernels = torch.zeros_like(self._addresses), self._kernels
        for dtype, programs in self._launches:
            kernels.sum_words[(programs.count,)](
                self._addresses, self._sizes, self._firsts, programs.owners, sums, DTYPE=kernels.DTYPES[dtype],
                VALUES=kernels.VALUES, PARTS=kernels.PARTS, num_warps=kernels.NUM_WARPS,
            )  # fmt: skip
        return sums


def can_sum(tensor: Tensor) -> bool:
    """Return whether `TensorChecksums` takes this tensor."""
    return has_kernels(tensor.device.type) and tensor.is_contiguous() and tensor.numel() > 0
