"""Tells sharded tensors and modules, without importing the classes: they take a third of the time of `import torch`.

Whoever shards something imports them, so that nothing is sharded while they are not imported.
"""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_dtensor(value: Any) -> "TypeIs[DTensor]":
    """Return whether `value` is a DTensor."""
    return isinstance(value, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def is_fsdp_module(module: Any) -> "TypeIs[FSDPModule]":
    """Return whether `module` is a unit of FSDP2."""
    return isinstance(module, getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ()))
