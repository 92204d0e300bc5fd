"""What a rank holds of the state of training, as memory to be copied out of or into."""

from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from trimaran.checkpoint.tensor_regions import Index, TensorRegion


class Composed(Protocol):
    """A tensor that a rank holds in another form than it is kept in. It has the measures of what is kept."""

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
        """Return a rectangle of it, over the same memory."""
        ...

    def copy_(self, values: Tensor) -> object:
        """Take over these values, which may be on another device."""
        ...

    def copy_to(self, target: Tensor, *, non_blocking: bool) -> None:
        """Put the values into `target`, a little at a time: there is never a second whole beside the first."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShard:
    """A rectangle of one named tensor that lives on this rank. Writing to `tensor` writes the state itself.

    `key` is as in `Index`. `shape` is of the whole, `start` is where this rectangle begins; its size is the tensor's.
    Several ranks may hold the same rectangle. `frozen` is what no step of this run changes; `fluid` is what forwards
    change as well as updates, as they do BatchNorm's statistics.
    """

    key: str
    tensor: Tensor | Composed
    shape: tuple[int, ...]
    start: tuple[int, ...]
    frozen: bool = False
    fluid: bool = False


class State(Protocol):
    """What a run must keep to go on exactly: tensors, and plain data that JSON holds."""

    def pieces(self) -> list[TensorShard]:
        """Return what this rank holds, in an order that is the same at every call."""
        ...

    def pieces_from(self, index: Index) -> list[TensorShard]:
        """Return what is to be filled from a state with this index. `restore` makes of it what this rank holds."""
        ...

    def gather(self) -> None:
        """Bring the pieces up to date, before they are copied. Every rank calls it."""
        ...

    def progress(self) -> dict[str, Any]:
        """Return the rest: loss scale, counters, random numbers. Alike on all ranks."""
        ...

    def restore(self, progress: dict[str, Any]) -> None:
        """Take over what `progress` returned once, after `pieces_from` have been filled. Every rank calls it."""
        ...


class Source(Protocol):
    """A state that was kept, on disk or in memory, complete and verified."""

    step: int
    progress: dict[str, Any]
    index: Index

    def read(self, key: str, part: TensorRegion) -> Tensor:
        """Return the values of a part, in its shape, on the CPU. The memory belongs to the source."""
        ...
