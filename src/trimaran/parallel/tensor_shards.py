"""The shards of the training state that a rank holds, and the interfaces to save and load them."""

from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from trimaran.parallel.tensor_regions import TensorIndex, TensorRegion


class TensorLike(Protocol):
    """A tensor that a rank stores in another format than the checkpoint does.

    Shape, dtype and sizes are those of the tensor in the checkpoint.
    """

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def ndim(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def is_cuda(self) -> bool: ...

    def numel(self) -> int: ...

    def element_size(self) -> int: ...

    def __getitem__(self, window: Any, /) -> Self:
        """Return a view of a rectangular region, over the same memory."""
        ...

    def copy_(self, values: Tensor) -> object:
        """Copy these values in; they may be on another device."""
        ...

    def copy_to(self, target: Tensor, *, non_blocking: bool) -> None:
        """Copy the values to `target` in small chunks, so that the device never holds a second full tensor."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShard:
    """The rectangular region of one named tensor that this rank holds. Writing to `tensor` writes the state itself.

    `key` is as in `TensorIndex`. `shape` is that of the full tensor, `start` is where the shard begins; the shard's
    size is the shape of `tensor`. Several ranks may hold the same region. `frozen`: no step of this run changes it.
    `changed_by_forward`: forwards change it as well as updates, such as the statistics of BatchNorm.
    """

    key: str
    tensor: Tensor | TensorLike
    shape: tuple[int, ...]
    start: tuple[int, ...]
    frozen: bool = False
    changed_by_forward: bool = False


class CheckpointState(Protocol):
    """All state that a run needs for an exact resume: tensors, and plain data that JSON can hold."""

    def shards(self) -> list[TensorShard]:
        """Return the shards that this rank holds, in the same order at every call."""
        ...

    def shards_from(self, index: TensorIndex) -> list[TensorShard]:
        """Return the shards to fill from a checkpoint with this index. `restore` converts them to this rank's state."""
        ...

    def gather(self) -> None:
        """Bring the shards up to date before they are copied. Every rank must call it."""
        ...

    def progress(self) -> dict[str, Any]:
        """Return the rest: loss scale, counters, RNG state. Equal on all ranks."""
        ...

    def restore(self, progress: dict[str, Any]) -> None:
        """Restore what `progress` returned, after the shards of `shards_from` are filled. Every rank must call it."""
        ...


class CheckpointSource(Protocol):
    """A saved state, on disk or in memory, complete and verified."""

    step: int
    progress: dict[str, Any]
    index: TensorIndex

    def read(self, key: str, region: TensorRegion) -> Tensor:
        """Return the values of a region, in its shape, on the CPU. The source owns the memory."""
        ...
