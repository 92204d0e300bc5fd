"""Sums of squares and checksums of many tensors with few launches, and the global gradient norm."""

import math
from collections.abc import Iterable, Sequence
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimaran.core import DEVICE_TRAITS
from trimaran.nets import is_dtensor, local_part
from trimaran.parallel.comm.axis_waits import AXIS_WAITS, axis_span

HAS_TRITON = find_spec("triton") is not None
ALIGNED_BYTES = 16  # what the widest loads and stores of a GPU need
ALIGNED_VALUES = 16  # of a tensor's size, so that all lanes of a wide load are inside of it or none is
Kinds = list[tuple[int, torch.dtype, bool]]  # size, dtype and alignment of each tensor
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # by size in bytes


class DeviceNumbers:
    """Numbers from the host in device memory. They are copied only when they change, and the host does not wait.

    The copies are from pinned memory. Torch reuses such memory only when the copies from it are complete. The tensor on
    the device is the same at every call, so it must only be used by the stream that is current at each call.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.int64) -> None:
        self._device, self._dtype, self._is_pinned = device, dtype, DEVICE_TRAITS[device.type].has_own_memory
        self._numbers: list[int] | list[float] = []
        self._tensor = torch.empty(0, dtype=dtype, device=device)

    def set(self, numbers: list[int] | list[float]) -> Tensor:
        """Return these numbers on the device, flat. They are copied only if they changed."""
        if numbers != self._numbers:
            staged = torch.tensor(numbers, dtype=self._dtype, pin_memory=self._is_pinned)
            if len(self._tensor) != len(staged):
                self._tensor = torch.empty_like(staged, device=self._device)
            self._tensor.copy_(staged, non_blocking=True)
            self._numbers = numbers
        return self._tensor


class ProgramMap:
    """Which programs of a kernel work on which tensor: `counts[i]` consecutive ones on tensor `indices[i]`."""

    def __init__(self, indices: Sequence[int], counts: Sequence[int], device: torch.device) -> None:
        num_programs = torch.tensor(counts, dtype=torch.int64)
        owners = torch.tensor(indices, dtype=torch.int32).repeat_interleave(num_programs)
        self.count = len(owners)
        self.firsts: list[int] = (num_programs.cumsum(0) - num_programs).tolist()
        self.owners = to_device(owners, device)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a tensor in host memory on the device, without waiting for the device."""
    if not DEVICE_TRAITS[device.type].has_own_memory:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def rows_to_device(rows: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Return lists of equal length on the device, 16-byte aligned: for others Triton would compile kernels again."""
    length = len(rows[0])
    padded = torch.zeros(len(rows), length + length % 2, dtype=torch.int64)
    padded[:, :length] = torch.tensor(rows, dtype=torch.int64)
    return [each[:length] for each in to_device(padded, device)]


def is_aligned(address: int, num_values: int) -> bool:
    """Return whether a tensor at this address may be read with the widest loads."""
    return address % ALIGNED_BYTES == 0 and num_values % ALIGNED_VALUES == 0


def addresses_of(tensors: Iterable[Tensor]) -> list[int]:
    return [(each._local_tensor if is_dtensor(each) else each).data_ptr() for each in tensors]


def has_kernels(device_type: str) -> bool:
    """Return whether kernels in Triton can run on such a device. The compiler can trace this."""
    return DEVICE_TRAITS[device_type].has_kernels and HAS_TRITON


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
        squares = squares_by_foreach(tensors, self._device)
        return squares * self._factors if self._is_scaled else squares


class _SquareLaunches:
    """The kernel launches for tensors of given sizes, dtypes and alignments."""

    def __init__(self, kinds: Kinds, device: torch.device) -> None:
        self.kinds = kinds
        if not kinds:
            return
        from trimaran.parallel.kernels import tensor_sums as tensor_kernels  # noqa: PLC0415  needs Triton

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
    """Return the sums of squares by torch's own functions, in fp64 on `device`, with norms in fp32; 0 for None."""
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


class TensorChecksums:
    """Sums the bits of contiguous tensors that stay in place on a GPU, as wide integers. Any flipped bit shows."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors  # so that their memory is not reused
        device, by_size = tensors[0].device, dict[int, list[int]]()
        for index, each in enumerate(tensors):
            size = next(size for size in WORDS if each.nbytes % size == 0 and each.data_ptr() % size == 0)
            by_size.setdefault(size, []).append(index)
        from trimaran.parallel.kernels import tensor_sums as tensor_kernels  # noqa: PLC0415  needs Triton

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
    return has_kernels(tensor.device.type) and tensor.is_contiguous() and tensor.numel() > 0


def gradient_norm(parameters: Sequence[nn.Parameter], *, pp: int = 1) -> Tensor:
    """Return the norm over all gradients of the model, bitwise equal on every rank."""
    gradients = GradientSquares([parameters], pp=pp, device=parameters[0].device)
    gradients.measure()
    squares = gradients.group_squares()
    if dist.get_world_size() > 1:
        dist.all_reduce(squares)
    return squares.sum().sqrt().float()


def sum_partial_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """All-reduce gradients over the tensor-parallel ranks of `group`, in place: each has those of its own images."""
    gradients = [local_part(each.grad) for each in parameters if each.grad is not None]
    gradients = [each for each in gradients if each.numel()]  # a rank's shard of a small parameter may be empty
    if not gradients:
        return
    flat = torch.cat([each.flatten() for each in gradients])
    with axis_span("tp"):
        dist.all_reduce(flat, group=group)
    parts = flat.split([each.numel() for each in gradients])
    torch._foreach_copy_(gradients, [part.view_as(each) for part, each in zip(parts, gradients, strict=True)])


class GradientSquares:
    """The squared gradient norms of groups of parameters, in fp64. No parameter is in two groups.

    `measure` makes one pass over the gradients. Every rank contributes the squares of its local gradients, divided by
    the number of ranks of its pipeline stage that hold the same shard. So one all-reduce over all ranks is correct for
    any combination of meshes. (DTensor would reduce one mesh dim after the other, in an order that differs between
    ranks.) A rank without gradients of a group contributes zero. `device` is the device of the gradients.
    """

    def __init__(self, groups: Sequence[Sequence[nn.Parameter]], *, pp: int, device: torch.device) -> None:
        self.parameters = [each for group in groups for each in group]
        world_size = dist.get_world_size()
        shards = [num_shards(each) for each in self.parameters]
        self._has_sharded = any(is_dtensor(each) for each in self.parameters)
        self._squares = TensorSquares([each * pp / world_size for each in shards], device)
        self._masks = group_masks(groups, self.parameters, device)
        self.contributions = torch.zeros(len(self.parameters), dtype=torch.float64, device=device)

    @torch.no_grad()
    def measure(self) -> Tensor:
        """Return this rank's contribution of each of `parameters`, and keep it as `contributions`."""
        gradients = [each.grad for each in self.parameters]
        if self._has_sharded:
            pairs = zip(self.parameters, gradients, strict=True)
            gradients = [None if gradient is None else local_gradient(each) for each, gradient in pairs]
        self.contributions = self._squares.measure(gradients)
        return self.contributions

    @torch.no_grad()
    def group_squares(self) -> Tensor:
        """Return this rank's contribution to the squared norm of each group, from the last `measure`."""
        masks, squares = self._masks, self.contributions
        return squares.sum(0, keepdim=True) if len(masks) == 1 else sum_by_mask(squares, masks)


def group_masks(
    groups: Sequence[Sequence[nn.Parameter]], parameters: Sequence[nn.Parameter], device: torch.device
) -> Tensor:
    """Return a table [groups, parameters] on `device` that says which parameter is in which group."""
    column = {id(each): number for number, each in enumerate(parameters)}
    masks = torch.zeros(len(groups), len(parameters), dtype=torch.bool)
    for row, group in enumerate(groups):
        masks[row, [column[id(each)] for each in group if id(each) in column]] = True
    return to_device(masks, device)


def sum_by_mask(values: Tensor, masks: Tensor) -> Tensor:
    """Return the sum of the values in each group of `group_masks`. A NaN or Inf stays in its group."""
    return torch.where(masks, values, 0.0).sum(1)  # not a matmul: its order of summation depends on the device


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """Return the local shard of a gradient. A partial one (of a norm that saw some positions) is reduced first."""
    gradient = parameter.grad
    assert gradient is not None
    if not is_dtensor(gradient):
        assert not is_dtensor(parameter), "a gradient is sharded as its parameter is"
        return gradient
    assert is_dtensor(parameter)
    if gradient.placements == parameter.placements:
        return gradient.to_local()
    with AXIS_WAITS.span("tp"):  # data ranks have reduced theirs by now
        gradient = parameter.grad = gradient.redistribute(placements=parameter.placements)
        return gradient.to_local()


def num_shards(parameter: Tensor) -> int:
    """Return the number of shards of a parameter; each rank holds one."""
    if not is_dtensor(parameter):
        return 1
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if not placement.is_replicate())
