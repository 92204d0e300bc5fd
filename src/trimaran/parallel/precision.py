"""The compute precision of a plan, and modules with a precision override."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from trimaran.core import Plan
from trimaran.nets import DTYPE_ATTRIBUTE, MoeLayer, Network, kept_shard_casts, own_dtype

# With fp8, all other operators and the inputs and outputs of fp8 matmuls are bf16.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # never called, so an override applies to their children
# The attributes of a transformers model that list modules whose weights stay in fp32.
KEPT_IN_FP32 = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")


def autocast(plan: Plan, device: torch.device) -> AbstractContextManager[object]:
    """Return the autocast context of forward. Weights are fp32 in every plan, possibly split into two halves."""
    dtype = DTYPES[plan.precision]
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)


@contextmanager
def kept_weight_casts() -> Iterator[None]:
    """Share autocast's 16-bit copies of whole weights until the block ends; else each micro-batch keeps its own."""
    torch.autocast_increment_nesting()  # autocast forgets its copies where its outermost block ends
    try:
        with kept_shard_casts():
            yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


def override_precision(network: Network, patterns: Mapping[str, str], device: torch.device) -> None:
    """Override the precision of modules whose name matches a pattern, including their submodules.

    The last matching pattern wins; an inner match overrides an outer one. Parameter names do not change. Runs before
    `apply_plan`, which reads the override attributes set here.
    """
    if not patterns:
        return
    from trimaran.models import matches_module  # noqa: PLC0415  few recipes override a precision

    def visit(module: nn.Module, name: str, override: torch.dtype | None, outer: torch.dtype | None) -> None:
        for pattern, precision in patterns.items():
            if matches_module(name, pattern):
                override = DTYPES[precision]
        if override is not None:
            setattr(module, DTYPE_ATTRIBUTE, override)
        if override != outer and not isinstance(module, CONTAINERS):
            assert override is not None, "submodules inherit the override"
            _compute_in(module, override, device.type)
            outer = override
        for child_name, child in module.named_children():
            if not (isinstance(module, MoeLayer) and child is module.gate):  # a router is always fp32
                visit(child, f"{name}.{child_name}" if name else child_name, override, outer)

    visit(network.module, "", None, None)


def fsdp_modules(network: Network, plan: Plan) -> list[tuple[nn.Module, torch.dtype | None]]:
    """Return the modules that FSDP shards as units, inner ones first, and the dtype of their all-gather.

    These are the blocks, the root, and modules whose precision differs from their parent's. None means as stored: fp32.
    A block with weights that another module uses too belongs to the root: FSDP takes a weight in one unit only.
    A tied weight of such a module (a tied head) cannot be all-gathered in two dtypes: it stays in the parent's unit,
    which is then all-gathered in fp32.
    """
    units: list[tuple[nn.Module, torch.dtype | None]] = []
    names: dict[int, list[str]] = {}  # a shared module has a name in each place
    for name, each in network.module.named_parameters(remove_duplicate=False):
        names.setdefault(id(each), []).append(name)
    prefixes = {module: f"{name}." for name, module in network.module.named_modules()}
    always = {network.module}
    for block in network.blocks:
        used = [name for each in block.parameters() for name in names[id(each)]]
        if all(name.startswith(prefixes[block]) for name in used):
            always.add(block)

    def visit(module: nn.Module, outer: torch.dtype) -> bool:
        """Return whether a parameter in here that belongs to the outer unit needs fp32."""
        dtype, is_container = own_dtype(module) or DTYPES[plan.precision], isinstance(module, CONTAINERS)
        needs_fp32 = [visit(child, outer if is_container else dtype) for child in module.children()]
        differs = dtype != outer and not is_container and any(True for _ in module.parameters())
        tied = False
        if differs:  # does a module outside this one share one of its parameters?
            inside, ours = set(module.modules()), {id(each) for each in module.parameters()}
            outside = (each for each in network.module.modules() if each not in inside)
            tied = any(id(each) in ours for other in outside for each in other.parameters(recurse=False))
        if module in always or (differs and not tied):
            units.append((module, None if any(needs_fp32) or dtype == torch.float32 else dtype))
            return False
        return any(needs_fp32) or tied

    visit(network.module, DTYPES[plan.precision])
    return units


def _compute_in(module: nn.Module, dtype: torch.dtype, device_type: str) -> None:
    """Change the module's forward in place: it computes in `dtype` and returns a dtype that its parent can use.

    fp32 disables autocast, so inputs must be cast to fp32 here. Between bf16 and fp16 modules all tensors are cast,
    because autocast refuses to mix the two.
    """
    own: Any = module.__dict__.get("forward")  # of this one module; a stem has one
    low = dtype != torch.float32

    @wraps(module.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Read in each call: tensor parallelism and fp8 change the class of a layer.
        inner = type(self).forward if own is None else own.__func__
        outer = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else torch.float32
        args, kwargs = tree_map(partial(_cast_if_needed, dtype), (args, kwargs))
        with torch.autocast(device_type, dtype=dtype if low else None, enabled=low):
            out = inner(self, *args, **kwargs)
        return tree_map(partial(_cast_if_needed, outer), out)

    module.forward = MethodType(forward, module)  # bound, so a copy of the module gets its own forward


def _cast_if_needed(dtype: torch.dtype, value: Any) -> Any:
    """Return `value` in a dtype that a `dtype` module accepts. 16-bit modules accept fp32 too."""
    accepted = {dtype, torch.float32}
    fits = not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dtype in accepted
    return value if fits else value.to(dtype)


def store_frozen_weights(network: Network, plan: Plan) -> None:
    """Store frozen parameters in the dtype that their module computes in, in place. Runs before `apply_plan`.

    That is the plan's, or the one that the recipe gives the module. Nothing updates them, so no wider copy is needed,
    and FSDP gathers them as they are stored. A parameter that several modules share has the widest of their dtypes.
    Weights that transformers keeps in fp32 stay so.
    """
    wanted: dict[nn.Parameter, torch.dtype] = {}
    in_fp32 = network.uncalled_linears()
    lists = (getattr(each, attribute, None) for each in network.module.modules() for attribute in KEPT_IN_FP32)
    kept = {name for names in lists for name in names or ()}
    for path, module in network.module.named_modules():
        dtype = torch.float32 if module in in_fp32 else own_dtype(module) or DTYPES[plan.precision]
        for name, each in module.named_parameters(path, recurse=False):
            if not each.requires_grad and each.is_floating_point():
                here = torch.float32 if any(f".{part}." in f".{name}." for part in kept) else dtype
                wanted[each] = torch.promote_types(wanted.get(each, here), here)
    for each, dtype in wanted.items():
        each.data = each.data.to(dtype)
