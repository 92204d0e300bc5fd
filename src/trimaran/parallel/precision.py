"""Which arithmetic a plan computes in, and the modules that have one of their own."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from trimaran.core import Plan
from trimaran.models import matches_module
from trimaran.nets import Network
from trimaran.nets.module_dtype import MARK, own_dtype
from trimaran.nets.moe import MoeLayer

# What fp8 leaves alone, and what goes into and comes out of its products, is bf16.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # never called: what is asked of them is asked of what they hold


def autocast(plan: Plan, device: torch.device) -> AbstractContextManager[object]:
    """Return the context that forward runs in. Weights are fp32 in every plan, if only in two halves."""
    dtype = DTYPES[plan.precision]
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)


def override_precision(network: Network, patterns: Mapping[str, str], device: torch.device) -> None:
    """Let every module whose name matches a pattern compute as it says, whatever the plan; all inside it follow.

    The last pattern that matches wins, and one for a module inside another wins there. Parameter names do not change.
    Comes before `apply_plan`, which reads the marks that this leaves.
    """

    def visit(module: nn.Module, name: str, asked: torch.dtype | None, around: torch.dtype | None) -> None:
        for pattern, precision in patterns.items():
            if matches_module(name, pattern):
                asked = DTYPES[precision]
        if asked is not None:
            setattr(module, MARK, asked)
        if asked != around and not isinstance(module, CONTAINERS):
            assert asked is not None, "what is inside a module that was asked is asked as well"
            _compute_in(module, asked, device.type)
            around = asked
        for child_name, child in module.named_children():
            if not (isinstance(module, MoeLayer) and child is module.gate):  # a router is fp32 whatever is asked
                visit(child, f"{name}.{child_name}" if name else child_name, asked, around)

    visit(network.module, "", None, None)


def gathered(network: Network, plan: Plan) -> list[tuple[nn.Module, torch.dtype | None]]:
    """Return every module that is sharded by itself, inner ones first, and what its weights are gathered in.

    These are the blocks, the root, and what computes otherwise than its surroundings. None means as they are: fp32. A
    weight that such a module shares with another (a tied head) cannot be gathered in two ways: it stays with what is
    around, and that is then gathered as it is.
    """
    found: list[tuple[nn.Module, torch.dtype | None]] = []
    anyway = {network.module, *network.blocks}

    def visit(module: nn.Module, around: torch.dtype) -> bool:
        """Return whether something in here, sharded with what is around, needs fp32."""
        dtype, inert = own_dtype(module) or DTYPES[plan.precision], isinstance(module, CONTAINERS)
        needs = [visit(child, around if inert else dtype) for child in module.children()]
        differs = dtype != around and not inert and any(True for _ in module.parameters())
        tied = differs and _shares(module, network.module)
        if module in anyway or (differs and not tied):
            found.append((module, None if any(needs) or dtype == torch.float32 else dtype))
            return False
        return any(needs) or tied

    visit(network.module, DTYPES[plan.precision])
    return found


def _shares(module: nn.Module, root: nn.Module) -> bool:
    """Return whether a module outside this one has one of its parameters too."""
    inside, ours = set(module.modules()), {id(each) for each in module.parameters()}
    outside = (each for each in root.modules() if each not in inside)
    return any(id(each) in ours for other in outside for each in other.parameters(recurse=False))


def _compute_in(module: nn.Module, dtype: torch.dtype, device_type: str) -> None:
    """Change the module's forward in place: it computes in `dtype`, and its surroundings can work with what it returns.

    fp32 is autocast switched off, so that what comes in must be fp32 already. In a region of fp32 nobody casts, so what
    enters it is cast here; and between regions of bf16 and fp16 all that passes is, since autocast refuses to mix them.
    """
    inner: Any = module.forward.__func__  # pyrefly: ignore[missing-attribute]
    low = dtype != torch.float32

    @wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        around = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else torch.float32
        args, kwargs = tree_map(partial(_fit, dtype), (args, kwargs))
        with torch.autocast(device_type, dtype=dtype if low else None, enabled=low):
            out = inner(self, *args, **kwargs)
        return tree_map(partial(_fit, around), out)

    module.forward = MethodType(forward, module)  # bound, so that a copy of the module has a copy of it


def _fit(dtype: torch.dtype, value: Any) -> Any:
    """Return `value` as a region of `dtype` can take it: fp32 takes nothing else, and 16 bits take fp32 as well."""
    takes = {dtype, torch.float32}
    known = not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dtype in takes
    return value if known else value.to(dtype)
