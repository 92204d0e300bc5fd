"""The part of a parameter that this rank holds, and the full parameter from its parts."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

# Private in torch: what a DTensor knows of itself, and where its shards are.
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

Split = tuple[int, int]  # a dim of the mesh, and the dim of the tensor that it splits


def is_on_meta(module: nn.Module) -> bool:
    """Return whether the module has no values: it was built to be checked, or has not got its weights yet."""
    return any(each.is_meta for each in module.parameters())


def local_part(parameter: Tensor) -> Tensor:
    """Return this rank's part of `parameter`, which shares its memory: writing to it writes the parameter."""
    with torch.no_grad():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
    assert not local.is_meta, "call to_empty before filling the module"
    return local


def local_for_compute(parameter: Tensor, *, gradient_is_partial: bool = True) -> Tensor:
    """Return this rank's part of `parameter` for use in the forward, with gradients.

    Along a mesh axis that replicates this parameter, the gradient is a partial sum: `parameter.grad` is a partial
    DTensor, which `parallel.gradient_norm` or FSDP reduces. If not `gradient_is_partial`, each rank has all of it.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    if torch.compiler.is_compiling():
        return parameter.to_local(grad_placements=_gradient_placements(parameter.placements, gradient_is_partial))
    if not parameter.requires_grad or not torch.is_grad_enabled():
        return parameter.to_local()
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
    """Return `local_for_compute` of a weight that only matmuls read. Inside `kept_shard_casts` autocast's cast is kept.

    Autocast itself keeps the casts of parameters, but not those of their local tensors.
    """
    kind = parameter.device.type
    if torch.compiler.is_compiling() or _kept_casts is None or not isinstance(parameter, DTensor):
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


_kept_casts: dict[int, Tensor] | None = None  # of parameters, by id; None outside `kept_shard_casts`


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
    """Return this rank's part of the bias that its matmul adds.

    None for a layer that is sharded by its inputs: `parallel.axes.tp` adds that bias to the sum over the ranks.
    """
    bias: Tensor | None = linear.bias
    if bias is None or is_sharded_by_inputs(linear):
        return None
    return local_for_compute(bias, gradient_is_partial=gradient_is_partial)


def is_sharded_by_inputs(linear: nn.Linear) -> bool:
    """Return whether each rank has some columns of the weight, so that its output is a partial sum."""
    weight = getattr(linear, "weight", None)  # a 4-bit layer has none
    return isinstance(weight, DTensor) and weight.placements == (Shard(1),)


def _gradient_placements(placements: tuple[Placement, ...], gradient_is_partial: bool) -> tuple[Placement, ...]:
    if not gradient_is_partial:
        return placements
    return tuple(Partial() if each.is_replicate() else each for each in placements)


class LocalShard(Function):
    """The local tensor of a DTensor. Its gradient becomes a DTensor, without DTensor's own checks: these take long."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, gradient_is_partial: bool) -> Tensor:
        ctx.spec = _gradient_spec(parameter._spec, gradient_is_partial)
        local = parameter._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[DTensor, None]:
        gradient: Tensor = gradients[0].contiguous()
        return DTensor(gradient, ctx.spec, requires_grad=False), None  # pyrefly: ignore


def _gradient_spec(spec: DTensorSpec, gradient_is_partial: bool) -> DTensorSpec:
    """Return the spec of a parameter's gradients. All of them share one, which the parameter's own spec keeps."""
    key = f"_trimaran_gradient_spec_{gradient_is_partial}"
    found = spec.__dict__.get(key)
    if found is None:
        placements = _gradient_placements(spec.placements, gradient_is_partial)
        found = spec.__dict__[key] = DTensorSpec(spec.mesh, placements, tensor_meta=spec.tensor_meta)
    return found


def local_slices(parameter: Tensor) -> tuple[slice, ...]:
    """Return the slice of each dimension of the full tensor that this rank holds."""
    shape, offset = tuple(parameter.shape), (0,) * parameter.ndim
    if isinstance(parameter, DTensor):
        if has_uneven_shards(parameter):
            return _sharded_twice(parameter)[-1]
        shape, offset = compute_local_shape_and_global_offset(shape, parameter.device_mesh, parameter.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def gathered(value: Tensor) -> Tensor:
    """Return the unsharded value on every rank, on its device. A collective for sharded values."""
    if not isinstance(value, DTensor):
        return value
    if not has_uneven_shards(value):
        return value.full_tensor()
    splits, mesh = _splits(value), value.device_mesh
    assert mesh.mesh_dim_names is not None
    local, steps = value.to_local(), list(zip(splits, _sharded_twice(value), strict=False))
    for (mesh_dim, dim), before in reversed(steps):
        shape = torch.Size(each.stop - each.start for each in before)
        stride = torch.empty(shape, device="meta").stride()
        axis = mesh[mesh.mesh_dim_names[mesh_dim]]
        part = DTensor.from_local(local, axis, (Shard(dim),), run_check=False, shape=shape, stride=stride)
        local = part.full_tensor()
    return local


def has_uneven_shards(value: DTensor) -> bool:
    """Return whether FSDP shards what tensor parallelism sharded unevenly: a vocabulary that tp does not divide.

    torch 2.11 to 2.13 compute wrong rows for such a DTensor: they assume that FSDP splits equal shards. What a rank
    holds is right, because FSDP splits the local shard.
    """
    pairs = list(zip(value.placements, value.device_mesh.shape, strict=True))
    strided = {placement.dim for placement, _ in pairs if isinstance(placement, _StridedShard)}
    return any(
        isinstance(placement, Shard) and placement.dim in strided and value.shape[placement.dim] % size
        for placement, size in pairs
    )


def _splits(value: DTensor) -> list[Split]:
    """Return the splits of a DTensor in the order in which it was sharded: a strided shard is split last."""
    placements = list(enumerate(value.placements))
    plain = [(number, each.dim) for number, each in placements if isinstance(each, Shard)]
    return plain + [(number, each.dim) for number, each in placements if isinstance(each, _StridedShard)]


def _sharded_twice(value: DTensor) -> list[tuple[slice, ...]]:
    """Return the slices of the full tensor before the first split, and those of this rank after each split."""
    here = [slice(0, size) for size in value.shape]
    found = [tuple(here)]
    for mesh_dim, dim in _splits(value):
        start, stop = here[dim].start, here[dim].stop
        size = -(-(stop - start) // value.device_mesh.size(mesh_dim))
        start = min(stop, start + size * value.device_mesh.get_local_rank(mesh_dim))
        here[dim] = slice(start, min(stop, start + size))
        found.append(tuple(here))
    return found
