"""First weights, the same under every plan."""

import hashlib
import math
import os
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from trimaran.models import Spec, VlmSpec
from trimaran.models.perception_spec import PerceptionSpec
from trimaran.nets.local_shards import local_part, local_slices

CHUNK = 2**20
STD = 0.02
RESIDUAL = ("o_proj", "down_proj")  # what writes into the stream, 2 * layers times in all


def initialise(module: nn.Module, *, seed: int, spec: Spec) -> None:
    """Fill every parameter in place: matrices are normal, norms one, biases zero.

    A value depends on the seed, the parameter's name and shape and its own position there, and on nothing else:
    neither on the sharding nor on the order of the parameters. A rank draws no more than the rows it holds.
    """
    with ThreadPoolExecutor(max_workers=min(16, len(os.sched_getaffinity(0)))) as pool, torch.no_grad():
        draws: list[Future[None]] = []
        for name, parameter in module.named_parameters():
            local, here = local_part(parameter).detach(), local_slices(parameter)
            if name.endswith(".bias"):
                local.zero_()
            elif parameter.ndim == 1:
                local.fill_(1)
            elif local.numel():
                residual = any(part in RESIDUAL for part in name.split("."))
                std = _std(name, parameter.shape, spec) / math.sqrt(2 * _depth(name, spec) if residual else 1)
                draw = Draw(parameter.shape, here[0], key=f"{seed}/{name}", std=std)
                if local.is_contiguous() and local.shape[1:] == parameter.shape[1:]:
                    draws += [pool.submit(draw.chunk, number, local.view(-1)) for number in draw.chunks]
                else:
                    rows = torch.empty(draw.num_values, device="cpu", dtype=torch.float32)
                    list(pool.map(partial(draw.chunk, into=rows), draw.chunks))
                    local.copy_(rows.view(-1, *parameter.shape[1:])[(slice(None), *here[1:])])
        for each in draws:
            each.result()  # which lets an error of a thread out


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


def _seed(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1


class Draw:
    """Rows of the normal tensor of a shape and key, drawn chunk by chunk on the CPU, each chunk by any thread."""

    def __init__(self, shape: torch.Size, rows: slice, *, key: str, std: float) -> None:
        width = math.prod(shape[1:])
        self._total, self._first, self._last = math.prod(shape), rows.start * width, rows.stop * width
        self._key, self._std = key, np.float32(std)

    @property
    def num_values(self) -> int:
        return self._last - self._first

    @property
    def chunks(self) -> range:
        return range(self._first // CHUNK, math.ceil(self._last / CHUNK))

    def chunk(self, number: int, into: Tensor) -> None:
        """Put what chunk `number` has of the rows to its place in `into`, which holds them flat."""
        start = number * CHUNK
        values = torch.empty(min(CHUNK, self._total - start), device="cpu", dtype=torch.float32)
        values.normal_(generator=torch.Generator("cpu").manual_seed(_seed(f"{self._key}/{number}")))
        array = values.numpy()  # torch would have more threads multiply for each of ours
        array *= self._std
        low, high = max(self._first, start), min(self._last, start + CHUNK)
        into[low - self._first : high - self._first].copy_(values[low - start : high - start])
