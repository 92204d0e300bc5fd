"""Converts linear layers to fp8 matmuls, on GPUs that support them."""

import logging

import torch
from torch import nn

from trimaran.core import Plan, UserError
from trimaran.core.engine_rules import MIN_FP8_FEATURES, RECIPE_MULTIPLES, no_fp8_layers, refused_recipe
from trimaran.core.traits import DEVICE_TRAITS
from trimaran.nets import Network
from trimaran.parallel.fp8_linear import LAYERS
from trimaran.parallel.mesh import RankMesh
from trimaran.parallel.precision import own_dtype
from trimaran.parallel.tower_plan import tower_of_blocks

log = logging.getLogger(__name__)

MIN_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0
RECIPE_MAJOR = {
    "block": 9,
    "mx": 10,
}  # the only generation whose tensor cores cuBLAS gives these scales: Hopper, Blackwell


def apply_fp8(network: Network, plan: Plan, ranks: RankMesh) -> None:
    """Convert the large linear layers of the blocks to fp8, in place. Runs first; parameter names do not change.

    Scaling is dynamic: per tensor, or per block, see `core.plan.Fp8`. Weights do not change; inputs and outputs are
    bf16. Not converted: the head, routers, experts, small layers, layers with a precision override, and the vision
    tower, whose matmuls are small and have a varying number of rows.
    """
    if plan.precision != "fp8":
        return
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
        each.__class__ = LAYERS[recipe]


def fp8_layers(network: Network, recipe: str = "tensor") -> list[nn.Module]:
    """Return the linear layers of the language tower that are large enough for fp8."""
    blocks = [block for tower, block in tower_of_blocks(network) if tower == "language"]
    return [each for block in blocks for each in block.modules() if _is_convertible(each, recipe)]


def require_fp8_device(device_type: str, recipe: str = "tensor") -> None:
    """Raise unless this rank's device supports fp8 matmuls with the recipe's scales."""
    on_gpu = DEVICE_TRAITS[device_type].has_kernels
    if not on_gpu or torch.cuda.get_device_capability() < MIN_CAPABILITY:
        name = torch.cuda.get_device_name() if on_gpu else "a CPU"
        raise UserError("P031", f"{name} does not compute in fp8", where="plan.precision",
                        fix="use bf16, or a GPU that has fp8: Ada, Hopper or newer")  # fmt: skip
    major = torch.cuda.get_device_capability()[0]
    if recipe in RECIPE_MAJOR and major != RECIPE_MAJOR[recipe]:
        raise refused_recipe(recipe, torch.cuda.get_device_name())


def _is_convertible(module: nn.Module, recipe: str) -> bool:
    if type(module) is not nn.Linear or own_dtype(module) is not None:
        return False
    sizes = (module.in_features, module.out_features)
    return min(sizes) >= MIN_FP8_FEATURES and all(size % RECIPE_MULTIPLES[recipe] == 0 for size in sizes)
