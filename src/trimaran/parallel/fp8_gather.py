"""Weights that FSDP gathers in fp8: a byte of each is sent, and a byte is held while its block computes.

A weight is cast before the gather as an fp8 layer would cast it after, so the layer computes the same result.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Private in torch: what FSDP2 knows of one parameter.
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState

from trimaran.core.engine_rules import FP8_BLOCK
from trimaran.parallel.fp8_blocks import cast_weight
from trimaran.parallel.fp8_linear import FORWARD_DTYPE, MIN_AMAX, Fp8Linear, GatheredWeight, cast

COMPUTE_DTYPE = torch.bfloat16  # in which a layer would get the weight otherwise


class Fp8Parameter(FSDPParam):
    """FSDP's parameter of an fp8 layer. What it gathers is fp8, with the scales of its blocks if there are any.

    The unsharded parameter has no values of its own: autograd sums its gradient, and the layer reads `GatheredWeight`.
    """

    amax: Tensor  # of the whole weight, for one scale a tensor; see `SharedMaxima`
    in_blocks: bool

    def init_dtype_attrs(self, mp_policy: Any) -> None:
        """Set the dtypes. With a compute dtype FSDP would cast and gather the shard without asking."""
        super().init_dtype_attrs(mp_policy)
        self.param_dtype = None

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        """The shard in fp8, as bytes, and the scales of its blocks."""
        self._assert_in_states(ShardedState.SHARDED)
        shard = self._sharded_param_data.view(self.padded_sharded_param_size).to(COMPUTE_DTYPE)
        if not self.in_blocks:
            return [cast(shard, self.amax, FORWARD_DTYPE).view(torch.uint8).view(-1)]
        values, scales = cast_weight(shard)
        return [values.view(torch.uint8).view(-1), scales.contiguous().view(-1)]

    def init_unsharded_param(self) -> None:
        """Give the layer what was gathered. FSDP frees and fills the same memory in every step."""
        if hasattr(self, "_unsharded_param"):
            return
        flat, *scales = self.all_gather_outputs
        size = self._orig_size
        values = flat[: size.numel()].view(FORWARD_DTYPE).view(size)
        of_blocks = scales[0].view(size[0] // FP8_BLOCK, size[1] // FP8_BLOCK) if scales else None
        gathered = GatheredWeight(values, None if scales else self.amax, of_blocks)
        self._module_info.module.__dict__["gathered"] = gathered
        handle = torch.empty(size, dtype=COMPUTE_DTYPE, device=flat.device)
        handle.untyped_storage().resize_(0)
        self._unsharded_param = nn.Parameter(handle, requires_grad=self.sharded_param.requires_grad)


class SharedMaxima:
    """The largest magnitude of each weight over all its shards, by one all-reduce before every forward."""

    def __init__(self, parameters: Sequence[Fp8Parameter], device: torch.device) -> None:
        self._parameters = parameters
        self._values = torch.ones(len(parameters), device=device)
        self._group = parameters[0].mesh_info.shard_process_group  # pyrefly: ignore[missing-attribute]
        for number, each in enumerate(parameters):
            each.amax = self._values[number]

    @torch.no_grad()
    def update(self, *_: object) -> None:
        """Compute the maxima of the present weights. They are those of rounded values, which the layer would see."""
        shards = [each._sharded_param_data for each in self._parameters]
        largest = torch.stack(torch._foreach_norm(shards, float("inf"))).to(COMPUTE_DTYPE).float()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        self._values.copy_(largest.clamp_(min=MIN_AMAX))


def gather_in_fp8(root: nn.Module, parameters: Sequence[FSDPParam], device: torch.device) -> int:
    """Make FSDP gather the weights of fp8 layers in fp8. Returns how many.

    Not those that tensor parallelism has split, or whose shards do not end with a 128x128 block: they are gathered in
    bf16, and their layers cast them.
    """
    found = [each for each in parameters if _can_be_fp8(each)]
    for each in found:
        each.__class__ = Fp8Parameter
        each.in_blocks = _layer_of(each).recipe == "block"  # pyrefly: ignore[missing-attribute]
    per_tensor = [each for each in found if isinstance(each, Fp8Parameter) and not each.in_blocks]
    if per_tensor:
        root.register_forward_pre_hook(SharedMaxima(per_tensor, device).update, prepend=True)
    return len(found)


def _layer_of(parameter: FSDPParam) -> Any:
    return parameter._module_info.module


def _can_be_fp8(parameter: FSDPParam) -> bool:
    layer = _layer_of(parameter)
    is_weight = isinstance(layer, Fp8Linear) and parameter._module_info.param_name == "weight"
    if not is_weight or parameter.is_dtensor or layer.recipe == "mx":
        return False
    rows, columns = parameter.padded_sharded_param_size
    even = rows * parameter.mesh_info.shard_mesh_size == parameter._orig_size[0]  # pyrefly: ignore[missing-attribute]
    return layer.recipe == "tensor" or (even and rows % FP8_BLOCK == columns % FP8_BLOCK == 0)
