"""How evenly the routers spread their tokens: numbers for the metrics of a step."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.models import ExpertSpec
from trimaran.nets import Decoder, Network
from trimaran.nets.moe import MoeLayer
from trimaran.nets.moe_router import CENSUS
from trimaran.parallel import RankMesh


def router_statistics(networks: Sequence[Network], ranks: RankMesh) -> Callable[[], dict[str, Any]]:
    """Return a reader of what the routers did since the last call, to be used a step later. Every rank must call.

    One small collective for all layers together, and nothing waits for the device; without a mixture of ours, none.
    Only training counts. What is counted on several ranks (tp) or more than once (recompute) is so for the whole layer,
    and the numbers are means over layers of ratios: they stay the same.
    """
    module = networks[0].module
    if not isinstance(module, Decoder) or (experts := module.spec.block.experts) is None:
        return dict
    tallies = {layer: mixture.take_tally() for layer, mixture in _mixtures(networks)}
    device = next(iter(tallies.values())).device  # where it was counted; the weights may be elsewhere
    table = torch.zeros(module.spec.layers, experts.num_experts + CENSUS, dtype=torch.float64, device=device)
    for layer, tally in tallies.items():
        table[layer] = tally
    if ranks.degrees.world_size > 1:
        dist.all_reduce(table)  # the layers of other stages are rows of zeros here
    copy = table.to("cpu", non_blocking=True)
    copied = torch.cuda.Event() if device.type == "cuda" else None
    if copied is not None:
        copied.record()

    def read() -> dict[str, Any]:
        if copied is not None:
            copied.synchronize()
        return {"router": _ratios(copy, experts)}

    return read


def _mixtures(networks: Sequence[Network]) -> Iterator[tuple[int, MoeLayer]]:
    """Yield the mixtures that are here, each with the number of its layer."""
    for network in networks:
        for number, layer in network.module.get_submodule("layers").named_children():
            for mixture in layer.children():
                if isinstance(mixture, MoeLayer):
                    yield int(number), mixture


def _ratios(table: Tensor, experts: ExpertSpec) -> dict[str, float]:
    """Return the numbers of a `table` that has a census in each row, one for each layer.

    Loads are what the router chose, before the capacity drops any of it.
    """
    loads = table[:, :-CENSUS]
    choices = loads.sum(1).clamp(min=1)
    dropped, squares = table[:, -CENSUS:].unbind(1)
    shares = loads / choices[:, None]
    evenest = math.log(experts.num_experts)
    numbers = {
        "imbalance": shares.amax(1) * experts.num_experts,
        "idle": (loads == 0).double().mean(1),
        "dropped": dropped / choices,
        "z": squares * experts.top_k / choices,
        "entropy": -torch.special.xlogy(shares, shares).sum(1) / evenest if evenest else torch.ones_like(choices),
    }
    return {name: of_layers.mean().item() for name, of_layers in numbers.items()}
