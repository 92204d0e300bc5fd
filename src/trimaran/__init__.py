"""Trimaran: self-driving distributed training for PyTorch.

`trimaran.prepare(model, optimizer)` makes your own loop distributed, `trimaran.plan(model, inputs)` plans how to split
any module. Everything else is a command: `trimaran --help`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimaran.app.request.live_module import plan
    from trimaran.loop.loop import Loop, prepare
    from trimaran.loop.split_loop import SplitLoop

__version__ = "0.1.0"
__all__ = ["Loop", "SplitLoop", "plan", "prepare"]

_MODULES = {
    "Loop": "trimaran.loop.loop",
    "SplitLoop": "trimaran.loop.split_loop",
    "prepare": "trimaran.loop.loop",
    "plan": "trimaran.app.request.live_module",
}


def __getattr__(name: str) -> Any:
    """Import the API on first use, so that the command line starts without torch."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'trimaran' has no attribute {name!r}")
