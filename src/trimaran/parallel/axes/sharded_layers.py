"""Tensor-parallel styles for layers of transformers models that torch has none for. Parts are contiguous slices.

Packed projections (query, key and value in one weight) are split like any other weight: their output is gathered, so
that the model's own code can cut it, and the next layer takes its part of a replicated input. Every rank computes all
heads in between.
"""

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from trimaran.models import rows_per_rank
from trimaran.nets import (
    LoraLinear,
    is_dtensor,
    local_bias,
    local_for_compute,
    local_matmul_weight,
    with_local_parameters,
)
from trimaran.parallel.comm.tensor_collectives import gather_columns, reduce_gradient, reduce_sum, take_columns
from trimaran.parallel.fp8_linear import Fp8Linear


class ShardedLinear(nn.Linear):
    """A linear layer. If its inputs are sharded, its output is a partial sum, without the bias."""

    multiplies_by_weight = True  # see `multiplied_weight`

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, local_matmul_weight(self.weight), local_bias(self))


class ShardedEmbedding(nn.Embedding):
    """An embedding that holds some rows. Its output is a partial sum: zero for tokens of other ranks."""

    def forward(self, input: Tensor) -> Tensor:
        assert is_dtensor(self.weight)
        mesh, local = self.weight.device_mesh, local_for_compute(self.weight)
        first = mesh.get_local_rank() * rows_per_rank(self.num_embeddings, mesh.size())
        rows = input - first
        is_elsewhere = (rows < 0) | (rows >= len(local))
        padding = self.padding_idx
        if padding is not None:
            padding = padding - first if first <= padding < first + len(local) else None
        out = F.embedding(rows.masked_fill_(is_elsewhere, 0), local, padding)
        return out.masked_fill(is_elsewhere.unsqueeze(-1), 0)


KINDS: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: ShardedLinear, nn.Embedding: ShardedEmbedding}


def computes_with_shards(module: nn.Module) -> bool:
    """Return whether the layer computes with its shard, between plain tensors."""
    return isinstance(module, ShardedLinear | ShardedEmbedding | LoraLinear | Fp8Linear)


class ForeignColumns(ParallelStyle):
    """Splits a linear layer, or a Conv1D of GPT-2, by its outputs; with `gathers` every rank gets all of them."""

    def __init__(self, *, gathers: bool = False) -> None:
        super().__init__()
        self._gathers = gathers

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute(module, device_mesh, weight=Shard(1 if is_conv1d(module) else 0), bias=Shard(0))
        own = module.forward if computes_with_shards(module) else partial(_multiply, module, adds_bias=True)

        def forward(x: Tensor) -> Tensor:
            out = own(reduce_gradient(x, device_mesh))
            return gather_columns(out, device_mesh) if self._gathers else out

        module.forward = forward
        return module


class ForeignRows(ParallelStyle):
    """Splits such a layer by its inputs and sums the results; with `takes` its input is whole on every rank."""

    def __init__(self, *, takes: bool = False) -> None:
        super().__init__()
        self._takes = takes

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute(module, device_mesh, weight=Shard(0 if is_conv1d(module) else 1))
        own = module.forward if computes_with_shards(module) else partial(_multiply, module, adds_bias=False)

        def forward(x: Tensor) -> Tensor:
            out = reduce_sum(own(take_columns(x, device_mesh) if self._takes else x), device_mesh)
            bias: Any = module.bias
            return out if bias is None else out + local_for_compute(bias, gradient_is_partial=False).to(out.dtype)

        module.forward = forward
        return module


class ForeignReplica(ParallelStyle):
    """Keeps the parameters of any module whole on every rank. It computes the same on all of them."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute(module, device_mesh)
        own = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with with_local_parameters(module, gradient_is_partial=False):
                return own(*args, **kwargs)

        module.forward = forward
        return module


class ForeignExperts(ParallelStyle):
    """Gives each rank some of the stacked experts of a transformers model. Every rank has all rows: results are summed.

    A choice of another rank's expert gets the number after the last expert, which transformers' code leaves out.
    """

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        placements = {name: Shard(0) for name, _ in module.named_parameters(recurse=False)}
        distribute(module, device_mesh, **placements)
        compute_some_experts(module, device_mesh)
        return module


def compute_some_experts(module: Any, mesh: DeviceMesh) -> None:
    """Let each rank compute the experts that it holds for rows that all of them have, and sum the results."""
    own, count = module.forward, module.num_experts // mesh.size()
    first = count * mesh.get_local_rank()
    module.num_experts, module._is_expert_parallel = count, True

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        numbers = top_k_index - first
        elsewhere = (numbers < 0) | (numbers >= count)
        weights = reduce_gradient(top_k_weights, mesh).masked_fill(elsewhere, 0)
        with with_local_parameters(module):
            rows = reduce_gradient(hidden_states, mesh)
            out = own(rows, numbers.masked_fill(elsewhere, count), weights)
        return reduce_sum(out, mesh)

    module.forward = forward


def distribute(module: nn.Module, mesh: DeviceMesh, **placements: Placement) -> None:
    """Turn the module's own parameters into DTensors, replicated except for those in `placements`."""
    for name, each in list(module.named_parameters(recurse=False)):
        module.register_parameter(name, sharded(each, mesh, placements.get(name, Replicate())))


def sharded(parameter: nn.Parameter, mesh: DeviceMesh, *placements: Placement) -> nn.Parameter:
    """Return the parameter as a DTensor. All ranks have its values, or none has: each takes its shard by itself."""
    shard = distribute_tensor(parameter, mesh, placements, src_data_rank=None)
    return nn.Parameter(shard, requires_grad=parameter.requires_grad)


def is_conv1d(module: nn.Module) -> bool:
    """Return whether it is GPT-2's linear layer, whose weight is [inputs, outputs]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _multiply(module: Any, x: Tensor, *, adds_bias: bool) -> Tensor:
    """Return `x` times this rank's weight, with its bias if `adds_bias`."""
    local = local_for_compute(module.weight)
    bias = local_for_compute(module.bias) if adds_bias and module.bias is not None else None
    return F.linear(x, local.T if is_conv1d(module) else local, bias)
