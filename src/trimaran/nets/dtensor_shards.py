"""The shard of a DTensor that this rank holds, its gradient, and the unsharded value."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

# Private in torch: what a DTensor knows of itself, and where its shards are.
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

Split = tuple[int, int]  # a dim of the mesh, and the dim of the tensor that it splits


def shard_slices(parameter: DTensor) -> tuple[slice, ...]:
    """Return the slice of each dimension of the full tensor that this rank holds."""
    if has_uneven_shards(parameter):
        return _sharded_twice(parameter)[-1]
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, offset = compute_local_shape_and_global_offset(tuple(parameter.shape), mesh, placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def unsharded(value: DTensor) -> Tensor:
    """Return the unsharded value on every rank, on its device. A collective."""
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


def gradient_placements(placements: tuple[Placement, ...], gradient_is_partial: bool) -> tuple[Placement, ...]:
    if not gradient_is_partial:
        return placements
    return tuple(Partial() if each.is_replicate() else each for each in placements)


class LocalShard(Function):
    """The local tensor of a DTensor. Its gradient becomes a DTensor, without DTensor's own checks: these take long."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, gradient_is_partial: bool) -> Tensor:
        # The spec of a parameter's gradients. All of them share one, which the parameter's own spec keeps.
        spec = parameter._spec
        key = f"_trimaran_gradient_spec_{gradient_is_partial}"
        found = spec.__dict__.get(key)
        if found is None:
            placements = gradient_placements(spec.placements, gradient_is_partial)
            found = spec.__dict__[key] = DTensorSpec(spec.mesh, placements, tensor_meta=spec.tensor_meta)
        ctx.spec = found
        local = parameter._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[DTensor, None]:
        gradient: Tensor = gradients[0].contiguous()
        return DTensor(gradient, ctx.spec, requires_grad=False), None  # pyrefly: ignore


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
