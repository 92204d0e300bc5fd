"""The part of a parameter that this rank holds, the full parameter from its parts, and the dtype of a module."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

_kept_casts: dict[int, Tensor] | None = None  # of parameters, by id; None outside `kept_shard_casts`
ReadTensor = Callable[[Tensor], Tensor]  # returns what a parameter or a buffer stands for: unsharded, on the CPU
DTYPE_ATTRIBUTE = "_own_dtype"


def is_dtensor(value: Any) -> "TypeIs[DTensor]":
    return isinstance(value, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def is_fsdp_module(module: Any) -> "TypeIs[FSDPModule]":
    return isinstance(module, getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ()))


def is_on_meta(module: nn.Module) -> bool:
    """Return whether the module has no values: it was built to be checked, or has not got its weights yet."""
    return any(each.is_meta for each in module.parameters())


def to_empty(module: nn.Module, device: torch.device) -> None:
    """Give the module memory on `device`, as `Module.to_empty` does, which would import sympy for meta tensors."""

    def empty(tensor: Tensor) -> Tensor:
        if is_dtensor(tensor):
            return torch.empty_like(tensor, device=device)
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)

    module._apply(empty)


def local_part(parameter: Tensor) -> Tensor:
    """Return this rank's part of `parameter`, which shares its memory: writing to it writes the parameter."""
    with torch.no_grad():
        local = parameter.to_local() if is_dtensor(parameter) else parameter.detach()
    assert not local.is_meta, "call to_empty before filling the module"
    return local


def local_for_compute(parameter: Tensor, *, gradient_is_partial: bool = True) -> Tensor:
    """Return this rank's part of `parameter` for use in the forward, with gradients.

    Along a mesh axis that replicates this parameter, the gradient is a partial sum: `parameter.grad` is a partial
    DTensor, which `parallel.gradient_norm` or FSDP reduces. If not `gradient_is_partial`, each rank has all of it.
    """
    if not is_dtensor(parameter):
        return parameter
    if not torch.compiler.is_compiling() and not (parameter.requires_grad and torch.is_grad_enabled()):
        return parameter.to_local()
    from trimaran.nets.dtensor_shards import LocalShard, gradient_placements  # noqa: PLC0415  see `is_dtensor`

    if torch.compiler.is_compiling():
        return parameter.to_local(grad_placements=gradient_placements(parameter.placements, gradient_is_partial))
    return LocalShard.apply(parameter, gradient_is_partial)


@contextmanager
def with_local_parameters(module: nn.Module, *, gradient_is_partial: bool = True) -> Iterator[None]:
    """Let the module's own code read this rank's parts of its parameters, as plain tensors; see `local_for_compute`."""
    sharded: dict[str, Any] = dict(module._parameters)
    local = {
        name: local_for_compute(each, gradient_is_partial=gradient_is_partial)
        for name, each in sharded.items()
        if each is not None
    }
    module._parameters.update(local)  # pyrefly: ignore[no-matching-overload]
    try:
        yield
    finally:
        module._parameters.update(sharded)


def local_matmul_weight(parameter: Tensor) -> Tensor:
    """Return `local_for_compute` of a matmul weight, whose autocast is kept inside `kept_shard_casts`."""
    kind = parameter.device.type
    if torch.compiler.is_compiling() or _kept_casts is None or not is_dtensor(parameter):
        return local_for_compute(parameter)
    if not (torch.is_autocast_enabled(kind) and torch.is_autocast_cache_enabled() and torch.is_grad_enabled()):
        return local_for_compute(parameter)
    dtype = torch.get_autocast_dtype(kind)
    if parameter.dtype == dtype or not parameter.requires_grad:
        return local_for_compute(parameter)
    if (found := _kept_casts.get(id(parameter))) is None:
        found = _kept_casts[id(parameter)] = local_for_compute(parameter).to(dtype)
    return found


def multiplied_weight(linear: nn.Linear, inputs: Tensor) -> Tensor:
    """Return what a layer without a bias multiplies by: this rank's part of [outputs, inputs].

    Another kind of layer, such as a quantised one, computes it from the identity, in the dtype and on the device of its
    `inputs`. Hooks do not run: what they add may be another for each token.
    """
    if type(linear) is nn.Linear or getattr(linear, "multiplies_by_weight", False):
        return local_matmul_weight(linear.weight)
    return linear.forward(torch.eye(linear.in_features, dtype=inputs.dtype, device=inputs.device)).t()


@contextmanager
def kept_shard_casts() -> Iterator[None]:
    """Keep the casts of matmul weights until the block ends. Weights must not change, nor be resharded, inside."""
    global _kept_casts  # noqa: PLW0603 - autocast's own cache is global, too
    outer, _kept_casts = _kept_casts, {}
    try:
        yield
    finally:
        _kept_casts = outer


def local_bias(linear: nn.Linear, *, gradient_is_partial: bool = True) -> Tensor | None:
    """Return this rank's part of the bias that its matmul adds; None if `parallel.axes.tp` adds it after the sum."""
    bias: Tensor | None = linear.bias
    if bias is None or is_sharded_by_inputs(linear):
        return None
    return local_for_compute(bias, gradient_is_partial=gradient_is_partial)


def is_sharded_by_inputs(linear: nn.Linear) -> bool:
    """Return whether each rank has some columns of the weight, so that its output is a partial sum."""
    weight = getattr(linear, "weight", None)  # a 4-bit layer has none
    if not is_dtensor(weight):
        return False
    from torch.distributed.tensor import Shard  # noqa: PLC0415  see `is_dtensor`

    return weight.placements == (Shard(1),)


def forward_of_shard(forward: Callable[..., Tensor], input: Tensor) -> Tensor:
    """Return the output of a layer; a DTensor with the placements of its input if every rank holds all of the layer."""
    if not is_dtensor(input):
        return forward(input, gradient_is_partial=True)
    from torch.distributed.tensor import DTensor, Replicate  # noqa: PLC0415  see `is_dtensor`

    out = forward(input.to_local(), gradient_is_partial=input.placements != (Replicate(),))
    return DTensor.from_local(out, input.device_mesh, input.placements, run_check=False)


def local_slices(parameter: Tensor) -> tuple[slice, ...]:
    """Return the slice of each dimension of the full tensor that this rank holds."""
    if not is_dtensor(parameter):
        return tuple(slice(0, size) for size in parameter.shape)
    from trimaran.nets.dtensor_shards import shard_slices  # noqa: PLC0415  see `is_dtensor`

    return shard_slices(parameter)


def gathered(value: Tensor) -> Tensor:
    """Return the unsharded value on every rank, on its device. A collective for sharded values."""
    if not is_dtensor(value):
        return value
    from trimaran.nets.dtensor_shards import unsharded  # noqa: PLC0415  see `is_dtensor`

    return unsharded(value)


def full_tensor(parameter: Tensor) -> Tensor:
    """Return the unsharded value on the CPU. A collective for sharded parameters."""
    return gathered(parameter.detach()).cpu().contiguous()


def own_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype that the recipe gave this module; None if it has the plan's."""
    return getattr(module, DTYPE_ATTRIBUTE, None)
