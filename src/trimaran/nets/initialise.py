"""First weights, the same under every plan."""

import hashlib
import math
import os
from concurrent.futures import Executor, ThreadPoolExecutor

import torch
from torch import Tensor, nn

from trimaran.models import Spec, VlmSpec
from trimaran.models.perception import PerceptionSpec
from trimaran.nets.shards import local_part, local_slices

CHUNK = 2**20
STD = 0.02
RESIDUAL = ("o_proj", "down_proj")  # what writes into the stream, 2 * layers times in all


def initialise(module: nn.Module, *, seed: int, spec: Spec) -> None:
    """Fill every parameter in place: matrices are normal, norms one, biases zero.

    A value depends on the seed, the parameter's name and shape and its own position there, and on nothing else:
    neither on the sharding nor on the order of the parameters. A rank draws no more than the rows it holds.
    """
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool, torch.no_grad():
        for name, parameter in module.named_parameters():
            local, here = local_part(parameter), local_slices(parameter)
            if name.endswith(".bias"):
                local.zero_()
            elif parameter.ndim == 1:
                local.fill_(1)
            elif local.numel():
                residual = any(part in RESIDUAL for part in name.split("."))
                std = _std(name, parameter.shape, spec) / math.sqrt(2 * _depth(name, spec) if residual else 1)
                rows = _normal_rows(parameter.shape, here[0], key=f"{seed}/{name}", pool=pool)
                local.copy_(rows[(slice(None), *here[1:])].mul_(std))


def _std(name: str, shape: torch.Size, spec: Spec) -> float:
    """Return how far the values of a matrix spread.

    What sees is narrow in small models, and with one constant for all widths it takes long to begin to look: there it
    goes with the number of values that a product takes in. A large eye has about the constant.
    """
    sees = isinstance(spec, VlmSpec) and name.endswith(".weight") and not name.startswith("language.")
    return 1 / math.sqrt(math.prod(shape[1:])) if sees or isinstance(spec, PerceptionSpec) else STD


def _depth(name: str, spec: Spec) -> int:
    """Return how many layers write into the stream that the parameter `name` writes into."""
    if isinstance(spec, VlmSpec):
        return (spec.vision if name.startswith("vision.") else spec.language).layers
    if isinstance(spec, PerceptionSpec):
        return spec.fusion_layers
    return spec.layers


def _normal_rows(shape: torch.Size, rows: slice, *, key: str, pool: Executor) -> Tensor:
    """Return the rows of the standard normal tensor of that shape and key, drawn chunk by chunk on the CPU."""
    width, total = math.prod(shape[1:]), math.prod(shape)
    first, last = rows.start * width, rows.stop * width
    flat = torch.empty(last - first, device="cpu", dtype=torch.float32)

    def draw(chunk: int) -> None:
        start = chunk * CHUNK
        values = torch.empty(min(CHUNK, total - start), device="cpu", dtype=torch.float32)
        values.normal_(generator=torch.Generator("cpu").manual_seed(_seed(f"{key}/{chunk}")))
        low, high = max(first, start), min(last, start + CHUNK)
        flat[low - first : high - first] = values[low - start : high - start]

    list(pool.map(draw, range(first // CHUNK, math.ceil(last / CHUNK))))  # the list lets an error of a thread out
    return flat.view(-1, *shape[1:])


def _seed(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1
