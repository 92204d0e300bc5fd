"""The storage dtype of frozen weights beside an adapter."""

import torch
from torch import nn

from trimaran.core import Plan
from trimaran.nets import Network
from trimaran.nets.decoder.moe import MoeLayer
from trimaran.nets.local_shards import own_dtype
from trimaran.nets.vlm.vision import Stem
from trimaran.parallel.precision import DTYPES

# The attributes of a transformers model that list modules whose weights stay in fp32.
KEPT_IN_FP32 = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")


def store_frozen_weights(network: Network, plan: Plan) -> None:
    """Store frozen parameters in the dtype that their module computes in, in place. Runs before `apply_plan`.

    That is the plan's, or the one that the recipe gives the module. Nothing updates them, so no wider copy is needed,
    and FSDP gathers them as they are stored. A parameter that several modules share has the widest of their dtypes.
    Weights that transformers keeps in fp32 stay so.
    """
    wanted: dict[nn.Parameter, torch.dtype] = {}
    routers = {id(each.gate) for each in network.module.modules() if isinstance(each, MoeLayer)}
    in_fp32 = routers | {id(each.patch_embed) for each in network.module.modules() if isinstance(each, Stem)}
    lists = (getattr(each, attribute, None) for each in network.module.modules() for attribute in KEPT_IN_FP32)
    kept = {name for names in lists for name in names or ()}
    for path, module in network.module.named_modules():
        dtype = torch.float32 if id(module) in in_fp32 else own_dtype(module) or DTYPES[plan.precision]
        for name, each in module.named_parameters(path, recurse=False):
            if not each.requires_grad and each.is_floating_point():
                here = torch.float32 if any(f".{part}." in f".{name}." for part in kept) else dtype
                wanted[each] = torch.promote_types(wanted.get(each, here), here)
    for each, dtype in wanted.items():
        each.data = each.data.to(dtype)
