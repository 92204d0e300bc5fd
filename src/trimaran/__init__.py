"""Trimaran: self-driving distributed training for PyTorch.

`trimaran.prepare(model, optimizer)` is the door for one's own loop; everything else is behind `trimaran --help`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimaran.train.boat import Boat, prepare

__version__ = "0.1.0"
__all__ = ["Boat", "prepare"]


def __getattr__(name: str) -> Any:
    """Load the API on first use, so that the command line does not pay for torch."""
    if name in __all__:
        from trimaran.train import boat  # noqa: PLC0415

        return getattr(boat, name)
    raise AttributeError(f"module 'trimaran' has no attribute {name!r}")
