"""Which tensors of this process are on a disk. A rank without any imports no more than this of the offload."""

from typing import TYPE_CHECKING
from weakref import WeakSet

from torch import Tensor

if TYPE_CHECKING:
    from trimaran.parallel.disk.disk_store import DiskStore

MIN_DISK_BYTES = 1 << 16  # a smaller tensor stays in memory
STORES: "WeakSet[DiskStore]" = WeakSet()  # of this process


def store_of(tensor: Tensor) -> "DiskStore | None":
    """Return the store that holds a tensor; None if it is in memory."""
    if not tensor.is_cpu:
        return None
    return next((store for store in STORES if store.holds(tensor)), None)


def release_pages() -> None:
    """Write back what was written to tensors on disk as such, and free their pages: something was loaded into them."""
    for store in list(STORES):
        store.release()


def goes_to_disk(num_bytes: int) -> bool:
    """Return whether a tensor is large enough for the disk."""
    return num_bytes >= MIN_DISK_BYTES
