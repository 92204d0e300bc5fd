"""Linear layers whose products are fp8, for GPUs that have it."""

import logging

import torch
from torch import nn

from trimaran.core import Plan, UserError
from trimaran.core.optional_packages import FP8_MULTIPLE, FP8_SMALLEST
from trimaran.nets import Network
from trimaran.parallel.fp8_linear import Fp8Linear
from trimaran.parallel.mesh import RankMesh
from trimaran.parallel.precision import own_dtype
from trimaran.parallel.tower_plan import tower_of_blocks

log = logging.getLogger(__name__)

CAPABILITY = (8, 9)  # Ada; Hopper is 9.0


def apply_fp8(network: Network, plan: Plan, ranks: RankMesh) -> None:
    """Let the large linear layers of the blocks multiply in fp8, in place. Comes first; names do not change.

    Each tensor has one scale, found anew in every step. Weights stay as they are, and what goes in and comes out is
    bf16. The head, routers, experts, small layers and those with an arithmetic of their own are left as they are; so is
    a tower that sees, whose products are small and have any number of rows.
    """
    if plan.precision != "fp8":
        return
    refuse_device(ranks.axes.device_type)
    if not plan.compile:
        log.warning("fp8 without plan.compile is slower than bf16: the casts are not fused")
    convert(network)


def convert(network: Network) -> None:
    """Give the linear layers that are worth it the class that multiplies in fp8."""
    blocks = [block for tower, block in tower_of_blocks(network) if tower == "language"]
    worth = [each for block in blocks for each in block.modules() if _worth(each)]
    if not worth:
        raise UserError("P034", "no layer of this model is large enough for fp8", where="plan.precision",
                        fix=f"use bf16: fp8 takes linear layers of at least {FP8_SMALLEST} x {FP8_SMALLEST} "
                        f"features, both multiples of {FP8_MULTIPLE}")  # fmt: skip
    for each in worth:
        each.__class__ = Fp8Linear


def refuse_device(device_type: str) -> None:
    """Raise unless this rank's device multiplies in fp8."""
    on_gpu = device_type == "cuda"
    if not on_gpu or torch.cuda.get_device_capability() < CAPABILITY:
        name = torch.cuda.get_device_name() if on_gpu else "a CPU"
        raise UserError("P031", f"{name} does not compute in fp8", where="plan.precision",
                        fix="use bf16, or a GPU that has fp8: Ada, Hopper or newer")  # fmt: skip


def _worth(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or own_dtype(module) is not None:
        return False
    sizes = (module.in_features, module.out_features)
    return min(sizes) >= FP8_SMALLEST and all(size % FP8_MULTIPLE == 0 for size in sizes)
