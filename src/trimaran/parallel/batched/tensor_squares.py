"""The sum of squares of each of many tensors, in one pass over them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from trimaran.parallel.batched.address_table import (
    DeviceNumbers,
    ProgramMap,
    has_kernels,
    is_aligned,
    rows_to_device,
    to_device,
)

Kinds = list[tuple[int, torch.dtype, bool]]  # size, dtype and alignment of each tensor


class TensorSquares:
    """Computes the sum of squares of each tensor of a list, times a factor, in fp64 on `device`.

    The tensors may be others at every call; one that is None counts as zeros. Sums are deterministic. On a GPU there
    are two launches, and one more for each further dtype or alignment.
    """

    def __init__(self, factors: Sequence[float], device: torch.device) -> None:
        self._device, self._use_kernels = device, has_kernels(device.type)
        self._factors = to_device(torch.tensor(factors, dtype=torch.float64), device)
        self._is_scaled = any(each != 1.0 for each in factors)
        self._addresses, self._launches = DeviceNumbers(device), _SquareLaunches([], device)

    @torch.no_grad()
    def measure(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Return the sums as one tensor. The next call may overwrite it."""
        if self._use_kernels and tensors and all(each is None or each.is_cuda for each in tensors):
            return self._measure_on_gpu(tensors)
        squares = squares_by_foreach(tensors, self._device)
        return squares * self._factors if self._is_scaled else squares

    def _measure_on_gpu(self, tensors: Sequence[Tensor | None]) -> Tensor:
        held = [each if each is None or each.is_contiguous() else each.contiguous() for each in tensors]
        addresses = [0 if each is None else each.data_ptr() for each in held]
        known = self._launches.kinds
        kinds = [
            # A missing tensor keeps its kind, so that the launches stay the same.
            (known[index] if index < len(known) else (0, torch.float32, True))
            if each is None
            else (each.numel(), each.dtype, is_aligned(address, each.numel()))
            for index, (each, address) in enumerate(zip(held, addresses, strict=True))
        ]
        if kinds != known:
            self._launches = _SquareLaunches(kinds, self._device)
        return self._launches.run(self._addresses.set(addresses), self._factors)


class _SquareLaunches:
    """The kernel launches for tensors of given sizes, dtypes and alignments."""

    def __init__(self, kinds: Kinds, device: torch.device) -> None:
        self.kinds = kinds
        if not kinds:
            return
        from trimaran.parallel.batched import tensor_kernels  # noqa: PLC0415  needs Triton

        self._kernels = tensor_kernels
        counts = [-(-size // tensor_kernels.VALUES_PER_PROGRAM) for size, _, _ in kinds]
        self._maps: list[tuple[ProgramMap, int, torch.dtype, bool]] = []
        firsts, offset = [0] * len(kinds), 0
        for kind in dict.fromkeys(each[1:] for each in kinds):
            indices = [index for index, each in enumerate(kinds) if each[1:] == kind and counts[index]]
            programs = ProgramMap(indices, [counts[index] for index in indices], device)
            for index, first in zip(indices, programs.firsts, strict=True):
                firsts[index] = offset + first
            self._maps += [(programs, offset, *kind)] if programs.count else []
            offset += programs.count
        numbers = [firsts, counts, [size for size, _, _ in kinds]]
        self._firsts, self._counts, self._sizes = rows_to_device(numbers, device)
        self._partials = torch.empty(offset, device=device)
        self._sums = torch.empty(len(kinds), dtype=torch.float64, device=device)

    def run(self, addresses: Tensor, factors: Tensor) -> Tensor:
        kernels = self._kernels
        for programs, offset, dtype, aligned in self._maps:
            kernels.sum_squares[(programs.count,)](
                addresses, self._sizes, self._firsts, programs.owners, self._partials, offset,
                DTYPE=kernels.DTYPES[dtype], ALIGNED=aligned, VALUES=kernels.VALUES, PARTS=kernels.PARTS,
                num_warps=kernels.NUM_WARPS,
            )  # fmt: skip
        kernels.add_partials[(len(self.kinds),)](
            self._partials, self._firsts, self._counts, factors, self._sums, BLOCK=kernels.PARTIALS_AT_ONCE
        )
        return self._sums


def squares_by_foreach(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Return the sums of squares by torch's own functions, in fp64 on `device`; 0 for None.

    Norms of 16-bit tensors are computed in fp32. Torch would compute them in their own dtype.
    """
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, each in enumerate(tensors):
        if each is not None:
            by_kind.setdefault((each.device, each.dtype), []).append(index)
    if not by_kind:
        return torch.zeros(len(tensors), dtype=torch.float64, device=device)
    norms: list[Tensor] = []
    order: list[int] = []
    for (_, dtype), indices in by_kind.items():
        same_kind = [each for each in map(tensors.__getitem__, indices) if each is not None]
        found = torch._foreach_norm(same_kind, 2.0, dtype=torch.promote_types(dtype, torch.float32))
        norms.append(torch.stack(found).to(device, torch.float64))
        order += indices
    squares = (norms[0] if len(norms) == 1 else torch.cat(norms)).square_()
    if order == list(range(len(tensors))):
        return squares
    where = to_device(torch.tensor(order), device)
    return torch.zeros(len(tensors), dtype=torch.float64, device=device).index_copy_(0, where, squares)
