"""Trimaran: self-driving distributed training for PyTorch.

`trimaran.prepare(model, optimizer)` is the door for one's own loop, `trimaran.plan(model, inputs)` says how to split
any module; everything else is behind `trimaran --help`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimaran.app.request.live_module import plan
    from trimaran.loop.loop import Loop, prepare

__version__ = "0.1.0"
__all__ = ["Loop", "plan", "prepare"]

_WHERE = {"Loop": "trimaran.loop.loop", "prepare": "trimaran.loop.loop", "plan": "trimaran.app.request.live_module"}


def __getattr__(name: str) -> Any:
    """Load the API on first use, so that the command line does not pay for torch."""
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'trimaran' has no attribute {name!r}")
