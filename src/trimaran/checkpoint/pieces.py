"""What a rank holds of the state of training, as memory to be copied out of or into."""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from trimaran.checkpoint.parts import Index, Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A rectangle of one named tensor that lives on this rank. Writing to `tensor` writes the state itself.

    `key` is as in `Index`. `shape` is of the whole, `start` is where this rectangle begins; its size is the tensor's.
    Several ranks may hold the same rectangle. `frozen` is what no step of this run changes; `fluid` is what forwards
    change as well as updates, as they do BatchNorm's statistics.
    """

    key: str
    tensor: Tensor
    shape: tuple[int, ...]
    start: tuple[int, ...]
    frozen: bool = False
    fluid: bool = False


class State(Protocol):
    """What a run must keep to go on exactly: tensors, and plain data that JSON holds."""

    def pieces(self) -> list[Piece]:
        """Return what this rank holds, in an order that is the same at every call."""
        ...

    def pieces_from(self, index: Index) -> list[Piece]:
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

    def read(self, key: str, part: Part) -> Tensor:
        """Return the values of a part, in its shape, on the CPU. The memory belongs to the source."""
        ...
