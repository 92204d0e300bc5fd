"""Router statistics of mixture-of-experts layers, for the metrics of a step."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.models import ExpertSpec
from trimaran.nets import Decoder, Network
from trimaran.nets.moe import MoeLayer
from trimaran.nets.moe_router import NUM_EXTRA_STATS
from trimaran.parallel import RankMesh


def router_statistics(networks: Sequence[Network], ranks: RankMesh) -> Callable[[], dict[str, Any]]:
    """Return a function that returns the statistics since the last call. Call it one step later.

    Every rank must call this: it is one small all-reduce for all layers, or none without our own MoE layers. It does
    not synchronise with the device. Only training is counted. Counts that tp or recompute repeat are repeated for the
    complete layer, and the statistics are means over layers of ratios, so they do not change.
    """
    module = networks[0].module
    if not isinstance(module, Decoder) or (experts := module.spec.block.experts) is None:
        return dict
    stats = {layer: moe_layer.take_routing_stats() for layer, moe_layer in _moe_layers(networks)}
    device = next(iter(stats.values())).device  # the device of the counts; weights may be offloaded
    table = torch.zeros(module.spec.layers, experts.num_experts + NUM_EXTRA_STATS, dtype=torch.float64, device=device)
    for layer, layer_stats in stats.items():
        table[layer] = layer_stats
    if ranks.degrees.world_size > 1:
        dist.all_reduce(table)  # layers of other stages are zero rows on this rank
    copy = table.to("cpu", non_blocking=True)
    copied = torch.cuda.Event() if device.type == "cuda" else None
    if copied is not None:
        copied.record()

    def read() -> dict[str, Any]:
        if copied is not None:
            copied.synchronize()
        return {"router": _router_metrics(copy, experts)}

    return read


def _moe_layers(networks: Sequence[Network]) -> Iterator[tuple[int, MoeLayer]]:
    """Yield this rank's MoE layers, each with its layer number."""
    for network in networks:
        for number, layer in network.module.get_submodule("layers").named_children():
            for moe_layer in layer.children():
                if isinstance(moe_layer, MoeLayer):
                    yield int(number), moe_layer


def _router_metrics(table: Tensor, experts: ExpertSpec) -> dict[str, float]:
    """Return the router metrics of a `table` of counts, one row per layer.

    Loads count the router's choices, before the capacity drops any of them.
    """
    loads = table[:, :-NUM_EXTRA_STATS]
    choices = loads.sum(1).clamp(min=1)
    dropped, squares = table[:, -NUM_EXTRA_STATS:].unbind(1)
    fractions = loads / choices[:, None]
    max_entropy = math.log(experts.num_experts)
    entropy = -torch.special.xlogy(fractions, fractions).sum(1)
    metrics = {
        "imbalance": fractions.amax(1) * experts.num_experts,
        "idle": (loads == 0).double().mean(1),
        "dropped": dropped / choices,
        "z": squares * experts.top_k / choices,
        "entropy": entropy / max_entropy if max_entropy else torch.ones_like(choices),
    }
    return {name: layers.mean().item() for name, layers in metrics.items()}
