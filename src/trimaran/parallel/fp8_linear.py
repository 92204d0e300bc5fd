"""Linear layers whose three matmuls are fp8, and weights that FSDP gathers in fp8."""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.nn import functional as F

from trimaran.core import Plan, UserError
from trimaran.core.engine_rules import FP8_BLOCK, MIN_FP8_FEATURES, RECIPE_MULTIPLES, no_fp8_layers, refused_recipe
from trimaran.core.traits import DEVICE_TRAITS
from trimaran.nets import Network
from trimaran.nets.local_shards import forward_of_shard, local_bias, local_for_compute
from trimaran.parallel.fp8_blocks import BlockMatmul, cast_weight
from trimaran.parallel.mesh import RankMesh, tower_of_blocks
from trimaran.parallel.precision import own_dtype

# Forward operands need more precision (e4m3), gradients more range (e5m2).
FORWARD_DTYPE, GRADIENT_DTYPE = torch.float8_e4m3fn, torch.float8_e5m2
MIN_AMAX = 1e-30  # avoids a division by zero for a tensor of zeros


class GatheredWeight(NamedTuple):
    """A weight in fp8, and its largest magnitude, or the scale of each of its 128x128 blocks."""

    values: Tensor
    amax: Tensor | None
    scales: Tensor | None


class Fp8Linear(nn.Linear):
    """An `nn.Linear` with bf16 inputs and outputs and fp8 matmuls, in one of the recipes of `core.plan.Fp8`.

    Created by `as_fp8`. Weights may be fp32 or bf16, and sharded by tensor parallelism: then each rank computes the
    scales of its own shards, without communication. `gathered` is the weight as FSDP gathered it, in fp8; None if the
    layer casts its weight.
    """

    recipe: str = "tensor"
    gathered: GatheredWeight | None = None

    def forward(self, input: Tensor) -> Tensor:
        return forward_of_shard(self._local_forward, input)

    def _local_forward(self, x: Tensor, *, gradient_is_partial: bool) -> Tensor:
        weight = local_for_compute(self.weight, gradient_is_partial=gradient_is_partial)
        out = linear(x, weight, self.recipe, self.gathered)
        bias = local_bias(self, gradient_is_partial=gradient_is_partial)
        return out if bias is None else out + bias.to(out.dtype)


def as_fp8(layer: nn.Module, recipe: str) -> None:
    """Turn a linear layer into an `Fp8Linear` in place."""
    layer.__class__ = Fp8Linear
    layer.recipe = recipe  # pyrefly: ignore[bad-argument-type]


def linear(x: Tensor, weight: Tensor, recipe: str = "tensor", gathered: GatheredWeight | None = None) -> Tensor:
    """Return `x @ weight.T` in bf16.

    fp8 matmuls need sizes that are multiples of 16, or of the recipe's blocks. Rows are padded with zeros; a weight
    shard of another size is multiplied in bf16. If the weight was `gathered` in fp8, `weight` only has a gradient.
    """
    multiple = RECIPE_MULTIPLES[recipe]
    if any(size % multiple for size in weight.shape) or x.numel() == 0:
        return F.linear(x.to(torch.bfloat16), weight.to(torch.bfloat16))
    rows = x.to(torch.bfloat16).reshape(-1, x.shape[-1])
    num_rows = rows.shape[0]
    if missing := -num_rows % multiple:
        rows = F.pad(rows, (0, 0, 0, missing))
    values, amax_value, scales = gathered or (None, None, None)
    if recipe == "tensor":
        out: Any = Fp8Matmul.apply(rows, weight, values, amax_value)
    else:
        out = BlockMatmul.apply(rows, weight, recipe == "mx", values, scales)
    return out[:num_rows].reshape(*x.shape[:-1], weight.shape[0])


class Fp8Matmul(torch.autograd.Function):
    """The matmul of rows [N, K] and a weight [M, K], and its two gradients.

    Saves the rows in fp8 and the weight itself, which exists anyway: an fp8 copy would outlive the unsharded weight
    that FSDP frees. Backward casts the weight again, with the same scale. A weight that was gathered in fp8 is `values`
    with the largest magnitude `largest`: it is freed and gathered again in the same tensor.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, values: Tensor | None = None, largest: Tensor | None = None
    ) -> Tensor:
        row_amax, weight_amax = amax(rows), amax(weight) if largest is None else largest
        rows8 = cast(rows, row_amax, FORWARD_DTYPE)
        weight8 = cast(weight, weight_amax, FORWARD_DTYPE) if values is None else values
        for_rows, for_weight, *_ = ctx.needs_input_grad
        saved = weight if values is None else values
        ctx.save_for_backward(rows8 if for_weight else None, row_amax, saved if for_rows else None, weight_amax)
        ctx.weight_dtype = weight.dtype
        # Fast accumulation is less exact, which is good enough in forward.
        return torch._scaled_mm(
            rows8, weight8.t(), row_amax / _max_value(FORWARD_DTYPE), weight_amax / _max_value(FORWARD_DTYPE),
            out_dtype=torch.bfloat16, use_fast_accum=True,
        )  # fmt: skip

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (gradient,) = gradients
        rows8, row_amax, weight, weight_amax = ctx.saved_tensors
        amax_value = amax(gradient)
        gradient8 = cast(gradient, amax_value, GRADIENT_DTYPE)
        scale, for_rows, for_weight = amax_value / _max_value(GRADIENT_DTYPE), None, None
        # Tensor cores need both operands contiguous along the reduced dim.
        if weight is not None:
            weight8 = weight if weight.dtype == FORWARD_DTYPE else cast(weight, weight_amax, FORWARD_DTYPE)
            weight_scale = weight_amax / _max_value(FORWARD_DTYPE)
            columns = weight8.t().contiguous().t()
            for_rows = torch._scaled_mm(gradient8, columns, scale, weight_scale, out_dtype=torch.bfloat16)
        if rows8 is not None:
            row_scale, columns = row_amax / _max_value(FORWARD_DTYPE), rows8.t().contiguous().t()
            turned = gradient8.t().contiguous()
            for_weight = torch._scaled_mm(turned, columns, scale, row_scale, out_dtype=ctx.weight_dtype)
        return for_rows, for_weight, None, None


def amax(x: Tensor) -> Tensor:
    """Return the largest magnitude, fp32 on the device, NaN if `x` has one; per row first, which compilers fuse."""
    return x.detach().abs().amax(dim=-1).amax().float().clamp(min=MIN_AMAX)


def cast(x: Tensor, amax_value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x` in fp8, with `amax_value` as the largest value. An Inf makes all NaN, which the step guard detects."""
    return (x.float() * (_max_value(dtype) / amax_value)).to(dtype).contiguous()


def _max_value(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max


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
        each.in_blocks = each._module_info.module.recipe == "block"  # pyrefly: ignore[missing-attribute]
    per_tensor = [each for each in found if isinstance(each, Fp8Parameter) and not each.in_blocks]
    if per_tensor:
        root.register_forward_pre_hook(SharedMaxima(per_tensor, device).update, prepend=True)
    return len(found)


def _can_be_fp8(parameter: FSDPParam) -> bool:
    layer: Any = parameter._module_info.module
    is_weight = isinstance(layer, Fp8Linear) and parameter._module_info.param_name == "weight"
    if not is_weight or parameter.is_dtensor or layer.recipe == "mx":
        return False
    rows, columns = parameter.padded_sharded_param_size
    even = rows * parameter.mesh_info.shard_mesh_size == parameter._orig_size[0]  # pyrefly: ignore[missing-attribute]
    return layer.recipe == "tensor" or (even and rows % FP8_BLOCK == columns % FP8_BLOCK == 0)


log = logging.getLogger(__name__)

MIN_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0
RECIPE_MAJOR = {"block": 9, "mx": 10}  # the only generation whose tensor cores cuBLAS gives these scales


def apply_fp8(network: Network, plan: Plan, ranks: RankMesh) -> None:
    """Convert the large linear layers of the blocks to fp8, in place. Runs first; parameter names do not change.

    Scaling is dynamic: per tensor, or per block, see `core.plan.Fp8`. Weights do not change; inputs and outputs are
    bf16. Not converted: the head, routers, experts, small layers, layers with a precision override, and the vision
    tower, whose matmuls are small and have a varying number of rows.
    """
    if not ranks.without_device:
        require_fp8_device(ranks.axes.device_type, plan.fp8.recipe)
    if not plan.compile:
        log.warning("fp8 without plan.compile is slower than bf16: the casts are not fused")
    convert_linears(network, plan.fp8.recipe)


def convert_linears(network: Network, recipe: str = "tensor") -> None:
    """Convert the linear layers of the language tower that are large enough. Raises if there are none."""
    if not (layers := fp8_layers(network, recipe)):
        raise no_fp8_layers(recipe)
    for each in layers:
        as_fp8(each, recipe)


def fp8_layers(network: Network, recipe: str = "tensor") -> list[nn.Module]:
    """Return the linear layers of the language tower that are large enough for fp8."""
    blocks = [block for tower, block in tower_of_blocks(network) if tower == "language"]
    return [each for block in blocks for each in block.modules() if _is_convertible(each, recipe)]


def require_fp8_device(device_type: str, recipe: str = "tensor") -> None:
    """Raise unless this rank's device supports fp8 matmuls with the recipe's scales."""
    on_gpu = DEVICE_TRAITS[device_type].has_kernels
    if not on_gpu or torch.cuda.get_device_capability() < MIN_CAPABILITY:
        name = torch.cuda.get_device_name() if on_gpu else "a CPU"
        raise UserError("P031.not-compute-fp8", where="plan.precision", name=name)
    major = torch.cuda.get_device_capability()[0]
    if recipe in RECIPE_MAJOR and major != RECIPE_MAJOR[recipe]:
        raise refused_recipe(recipe, torch.cuda.get_device_name())


def _is_convertible(module: nn.Module, recipe: str) -> bool:
    if type(module) is not nn.Linear or own_dtype(module) is not None:
        return False
    sizes = (module.in_features, module.out_features)
    return min(sizes) >= MIN_FP8_FEATURES and all(size % RECIPE_MULTIPLES[recipe] == 0 for size in sizes)
