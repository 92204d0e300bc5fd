"""The first values of an adapter, which are the same under every plan, and its values from a PEFT folder."""

import hashlib
import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimaran.nets.adapters.lora_linear import DOWN, LoraLinear
from trimaran.nets.local_shards import local_part, local_slices
from trimaran.nets.shard_types import is_dtensor


@torch.no_grad()
def initialise_adapter(module: nn.Module, *, seed: int) -> None:
    """Fill the adapter's parameters in place, after the base weights: the network's output does not change by them.

    `lora_A` is uniform as in PEFT (Kaiming with a = sqrt(5)) and depends only on the seed and its name. `lora_B` is
    zero, and `lora_magnitude` is the norm of each row of the base weight. A collective for sharded DoRA layers.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, LoraLinear):
            values = uniform_values(layer.lora_A.shape, key=f"{seed}/{name}.{DOWN}")
            local_part(layer.lora_A).copy_(values[local_slices(layer.lora_A)])
            local_part(layer.lora_B).zero_()
            if layer.lora_magnitude is not None:
                norms = base_row_norms(layer)
                local_part(layer.lora_magnitude).copy_(norms[local_slices(layer.lora_magnitude)])


def uniform_values(shape: torch.Size, *, key: str) -> Tensor:
    """Return values between plus and minus 1 / sqrt(inputs), drawn on the CPU, that depend only on `key`."""
    digest = hashlib.sha256(key.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape, device="cpu", dtype=torch.float32).uniform_(-bound, bound, generator=generator)


def base_row_norms(layer: LoraLinear) -> Tensor:
    """Return the norm of each row of the frozen weight, unsharded. Sums in fp64, so that sharding changes no bit."""
    weight = layer.base_weight()
    rows, _ = local_slices(weight)
    squares = torch.linalg.vector_norm(local_part(weight), dim=1, dtype=torch.float64).square()
    if not is_dtensor(weight):
        return squares.sqrt()
    mesh = weight.device_mesh
    whole = torch.zeros(weight.shape[0], dtype=torch.float64, device=mesh.device_type)
    whole[rows] = squares.to(whole.device)
    for dim, placement in enumerate(weight.placements):
        if not placement.is_replicate():
            dist.all_reduce(whole, group=mesh.get_group(dim))
    return whole.sqrt()
