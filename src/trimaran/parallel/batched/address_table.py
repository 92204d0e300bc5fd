"""Tables on a device that tell one kernel the addresses and sizes of many tensors."""

from collections.abc import Iterable, Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from trimaran.core.device_traits import DEVICE_TRAITS
from trimaran.nets.shard_types import is_dtensor

HAS_TRITON = find_spec("triton") is not None
ALIGNED_BYTES = 16  # what the widest loads and stores of a GPU need
ALIGNED_VALUES = 16  # of a tensor's size, so that all lanes of a wide load are inside of it or none is


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
        """Return these numbers on the device, flat."""
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
    """Return lists of equal length on the device.

    Each starts at a multiple of 16 bytes: Triton compiles a kernel again for arguments that do not.
    """
    length = len(rows[0])
    padded = torch.zeros(len(rows), length + length % 2, dtype=torch.int64)
    padded[:, :length] = torch.tensor(rows, dtype=torch.int64)
    return [each[:length] for each in to_device(padded, device)]


def is_aligned(address: int, num_values: int) -> bool:
    """Return whether a tensor at this address may be read with the widest loads."""
    return address % ALIGNED_BYTES == 0 and num_values % ALIGNED_VALUES == 0


def addresses_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return the addresses of tensors, or of this rank's shards of them."""
    return [(each._local_tensor if is_dtensor(each) else each).data_ptr() for each in tensors]


def has_kernels(device_type: str) -> bool:
    """Return whether kernels in Triton can run on such a device. The compiler can trace this."""
    return DEVICE_TRAITS[device_type].has_kernels and HAS_TRITON
