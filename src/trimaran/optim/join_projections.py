"""Which layers of a network compute projections of the same input as one product."""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from trimaran.core import Plan
from trimaran.nets import Network
from trimaran.nets.attention import Attention
from trimaran.nets.decoder import DecoderLayer
from trimaran.nets.joint_projections import joint_slices
from trimaran.nets.module_dtype import own_dtype
from trimaran.nets.moe import FeedForward
from trimaran.parallel.tower_plan import recompute_of, tower_of_blocks


def join_projections(networks: Sequence[Network], plan: Plan, split: Collection[Tensor]) -> dict[Tensor, Tensor]:
    """Return where in memory the upper half of some weights is to lie, and let their layers compute as one product.

    `split` are the weights that are kept in halves. A tower that is recomputed selectively stays as it is.
    """
    if not plan.joins_projections:
        return {}
    homes: dict[Tensor, Tensor] = {}
    for layer in _layers(networks, plan):
        layer.joint = all(own_dtype(each) is None for each in layer.modules())
        for part in (each for each in layer.modules() if isinstance(each, Attention | FeedForward)):
            weights = [each.weight for each in part.projections]
            if layer.joint and weights and all(each in split for each in _needed(part)):
                homes.update(joint_slices(part.projections, torch.bfloat16))
                part.joint = True
    return homes


def _layers(networks: Sequence[Network], plan: Plan) -> Iterator[DecoderLayer]:
    for network in networks:
        for tower, block in tower_of_blocks(network):
            if isinstance(block, DecoderLayer) and recompute_of(tower, plan) != "selective":
                yield block


def _needed(part: Attention | FeedForward) -> list[Tensor]:
    down = [part.down_proj] if isinstance(part, FeedForward) else []
    return [each.weight for each in (*part.projections, *down)]
