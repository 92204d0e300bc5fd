"""Quantises a rank's slices of linear layers to the same numbers that one process would quantise the whole to."""

import logging
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimaran.core import UserError
from trimaran.nets import Network
from trimaran.nets.local_shards import is_sharded_by_inputs, local_part
from trimaran.parallel import RankMesh
from trimaran.parallel.axes.sharded_layers import ShardedLinear
from trimaran.serve.weight_quantisation import (
    GROUP,
    OUTPUTS,
    Quantisation,
    is_supported,
    nothing_to_quantise,
    quantise_linear,
)

log = logging.getLogger(__name__)


def refuse_inexact_slices(network: Network, kind: Quantisation) -> int:
    """Return how many layers of this rank's part would be quantised. Raises UserError if a slice cannot be.

    A layer that one process would quantise must not stay as it is: ranks would answer otherwise.
    """
    count = 0
    for name, layer in _layers(network):
        outputs, inputs = local_part(layer.weight).shape
        if inputs % GROUP or outputs % OUTPUTS:
            raise UserError("U020", f"a rank's slice of {name} has {inputs} inputs and {outputs} outputs, and {kind} "
                            f"weights need multiples of {GROUP} and {OUTPUTS}", where="--tp, --quantise",
                            fix="use a lower --tp, or --pp instead, or leave --quantise out")  # fmt: skip
        count += 1
    return count


@torch.no_grad()
def quantise_part(network: Network, kind: Quantisation, ranks: RankMesh) -> None:
    """Quantise this rank's slices in place, while its weights are still DTensors. Every rank must call it.

    int4 groups of inputs lie inside a slice. A scale of fp8 and int8 is that of a whole row: if ranks have parts of
    it, they agree on its largest value.
    """
    layers = list(_layers(network))
    count = torch.tensor([len(layers)])
    dist.all_reduce(count)
    if not int(count):
        raise nothing_to_quantise(kind)
    for _, layer in layers:
        maxima: Tensor | None = None
        if kind != "int4" and is_sharded_by_inputs(layer):
            maxima = local_part(layer.weight).float().abs().amax(dim=1)
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group=ranks.group("tp"))
        quantise_linear(layer, kind, maxima)
    if ranks.device_traits.has_own_memory:
        torch.cuda.empty_cache()  # the cache of keys and values may have the memory of the old weights
    log.info("%d linear layers of this rank have %s weights", len(layers), kind)


def _layers(network: Network) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers of the blocks that one process would quantise."""
    blocks = {part for block in network.blocks for part in block.modules()}
    for name, part in network.module.named_modules():
        if part in blocks and type(part) in (nn.Linear, ShardedLinear):
            assert isinstance(part, nn.Linear)
            if is_supported(part):
                yield name, part
