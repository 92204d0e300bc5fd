"""Trimaran: self-driving distributed training for PyTorch.

`trimaran.prepare(model, optimizer)` makes your own loop distributed, `trimaran.plan(model, inputs)` plans how to split
any module. Everything else is a command: `trimaran --help`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimaran.app.plan.live_module import plan
    from trimaran.loop.loop import Loop, prepare
    from trimaran.loop.rank_functions import gather_metrics, print_in_order, scale_lr, seed_rank
    from trimaran.loop.split_loop import SplitLoop

__all__ = ["Loop", "SplitLoop", "gather_metrics", "plan", "prepare", "print_in_order", "scale_lr", "seed_rank"]

_MODULES = {
    "Loop": "trimaran.loop.loop",
    "SplitLoop": "trimaran.loop.split_loop",
    "prepare": "trimaran.loop.loop",
    "gather_metrics": "trimaran.loop.rank_functions",
    "print_in_order": "trimaran.loop.rank_functions",
    "seed_rank": "trimaran.loop.rank_functions",
    "scale_lr": "trimaran.loop.rank_functions",
    "plan": "trimaran.app.plan.live_module",
}


def __getattr__(name: str) -> Any:
    """Import the API on first use, so that the command line starts without torch."""
    if name == "__version__":
        return import_module("trimaran.core.version").VERSION
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    renamed = import_module("trimaran.core.errors")
    if (old := f"trimaran.{name}") in renamed.RENAMED:
        renamed.warn_of_old_name(old)
        return __getattr__(renamed.RENAMED[old].removeprefix("trimaran."))
    raise AttributeError(f"module 'trimaran' has no attribute {name!r}")
