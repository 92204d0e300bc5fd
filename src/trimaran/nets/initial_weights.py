"""Initial weights of a network and of an adapter, which are the same under every plan."""

import hashlib
import math
import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimaran.models import InitialRules, Spec
from trimaran.nets.adapters.lora_linear import DOWN, LoraLinear
from trimaran.nets.local_shards import is_dtensor, local_part, local_slices
from trimaran.nets.nf4_linear import loadable_weights, weight_to_fill

CHUNK_VALUES = 2**20
STD = 0.02
RESIDUAL = ("o_proj", "down_proj")  # modules that add to the residual stream, 2 * layers times in total
UNKNOWN = InitialRules(depth=0)  # of a plug-in's network, whose residual streams have names of their own


def initialise(module: nn.Module, *, seed: int, spec: Spec | None, within: tuple[str, ...] = ("",)) -> None:
    """Fill every parameter in place: matrices are normal, norms one, biases and sinks zero. An adapter is not filled.

    `within` are the prefixes of the names of those to fill; by default all. Without a `spec`, as for a plug-in's
    network, all matrices have the same standard deviation.

    A value depends only on the seed, the parameter's name and shape, and its position in the parameter: not on the
    sharding or the order of the parameters. A rank draws only the rows that it holds.
    """
    with ThreadPoolExecutor(max_workers=min(16, len(os.sched_getaffinity(0)))) as pool, torch.no_grad():
        futures: list[Future[None]] = []
        named = loadable_weights(module).items()
        for name, weight in ((name, weight) for name, weight in named if name.startswith(within)):
            with weight_to_fill(module, name, weight) as parameter:
                started = _fill(name, parameter, seed, spec, pool)
                if weight.is_meta:  # it is packed now
                    wait(started)
                futures += started
        for each in futures:
            each.result()  # raises the error of a thread


def _fill(name: str, parameter: Tensor, seed: int, spec: Spec | None, pool: ThreadPoolExecutor) -> list[Future[None]]:
    """Fill one parameter, and return the threads that still write to it."""
    local, here = local_part(parameter).detach(), local_slices(parameter)
    rules = UNKNOWN if spec is None else spec.initial_rules(name)
    if name.endswith((".bias", "_proj_bias")) or name == "bias":
        local.zero_()
    elif parameter.ndim == 1:
        local.fill_(0.0 if name.endswith(".sinks") else rules.norm)
    elif local.numel():
        std = 1 / math.sqrt(math.prod(parameter.shape[1:])) if rules.by_fan_in else STD
        if rules.depth and any(part in RESIDUAL for part in name.split(".")):
            std /= math.sqrt(2 * rules.depth)
        normal = NormalRows(parameter.shape, here[0], key=f"{seed}/{name}", std=std)
        if local.is_contiguous() and local.shape[1:] == parameter.shape[1:]:
            return [pool.submit(normal.draw_chunk, number, local.view(-1)) for number in normal.chunks]
        rows = torch.empty(normal.num_values, device="cpu", dtype=torch.float32)
        list(pool.map(partial(normal.draw_chunk, into=rows), normal.chunks))
        local.copy_(rows.view(-1, *parameter.shape[1:])[(slice(None), *here[1:])])
    return []


def _seed(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1


class NormalRows:
    """Rows of a normal tensor given by its shape and key, drawn on the CPU in chunks, which threads can share."""

    def __init__(self, shape: torch.Size, rows: slice, *, key: str, std: float) -> None:
        width = math.prod(shape[1:])
        self._total, self._first, self._last = math.prod(shape), rows.start * width, rows.stop * width
        self._key, self._std = key, np.float32(std)
        self.num_values = self._last - self._first
        self.chunks = range(self._first // CHUNK_VALUES, math.ceil(self._last / CHUNK_VALUES))

    def draw_chunk(self, number: int, into: Tensor) -> None:
        """Copy the part of chunk `number` that belongs to the rows into `into`, which holds them flat."""
        start = number * CHUNK_VALUES
        values = torch.empty(min(CHUNK_VALUES, self._total - start), device="cpu", dtype=torch.float32)
        values.normal_(generator=torch.Generator("cpu").manual_seed(_seed(f"{self._key}/{number}")))
        array = values.numpy()  # torch would start more threads for each of ours
        array *= self._std
        low, high = max(self._first, start), min(self._last, start + CHUNK_VALUES)
        into[low - self._first : high - self._first].copy_(values[low - start : high - start])


@torch.no_grad()
def initialise_adapter(module: nn.Module, *, seed: int) -> None:
    """Fill the adapter's parameters in place, after the base weights: the network's output does not change by them.

    `lora_A` is uniform as in PEFT (Kaiming with a = sqrt(5)) and depends only on the seed and its name. `lora_B` is
    zero, and `lora_magnitude` is the norm of each row of the base weight. A collective for sharded DoRA layers.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, LoraLinear):
            generator = torch.Generator().manual_seed(_seed(f"{seed}/{name}.{DOWN}"))
            bound = 1 / math.sqrt(layer.lora_A.shape[1])
            values = torch.empty(layer.lora_A.shape, device="cpu", dtype=torch.float32)
            values.uniform_(-bound, bound, generator=generator)
            local_part(layer.lora_A).copy_(values[local_slices(layer.lora_A)])
            local_part(layer.lora_B).zero_()
            if layer.lora_magnitude is not None:
                norms = base_row_norms(layer)
                local_part(layer.lora_magnitude).copy_(norms[local_slices(layer.lora_magnitude)])


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
