"""Expert parallelism: each rank holds some experts, and tokens are sent to the ranks of their experts."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from trimaran.core import Plan
from trimaran.models.hf_facts import refuse_ep_degree
from trimaran.nets import Network, gather_rows, scatter_rows, sorted_places
from trimaran.nets.decoder.moe import ExpertWeights, MoeLayer, as_autocast
from trimaran.nets.hf.hf_sharding import count_experts, spread, spreadable_experts, stacked_experts
from trimaran.parallel.axes.sharded_layers import compute_some_experts, sharded
from trimaran.parallel.comm.axis_waits import AXIS_WAITS
from trimaran.parallel.comm.tensor_collectives import await_rows, exchange_rows, start_exchange
from trimaran.parallel.mesh import RankMesh
from trimaran.parallel.precision import own_dtype

EP = "ep"
Compute = Callable[[Tensor, Tensor], Tensor]  # takes rows sorted by local expert and where those of each end
# The dim of each stacked weight that a mesh dim shards: `ep` shards the experts, `tp` the width of each.
DIMS = {
    "gate_proj": {"ep": 0, "tp": 1},
    "up_proj": {"ep": 0, "tp": 1},
    "down_proj": {"ep": 0, "tp": 2},
    "gate_proj_bias": {"ep": 0, "tp": 1},
    "up_proj_bias": {"ep": 0, "tp": 1},
    "down_proj_bias": {"ep": 0},  # every slice of an expert adds its part of it
}


def apply_ep(network: Network, plan: Plan, ranks: RankMesh) -> None:
    """Shard experts over `ep` and `tp` in place; `apply_tp` handles routers and shared experts. Names do not change."""
    axes = [axis for axis in ("ep", "tp") if getattr(ranks.degrees, axis) > 1]
    if not axes:
        return
    if "ep" in axes and network.is_foreign:
        # A pipeline stage may have no layer with experts; the whole model has. Tensor-parallel ranks have the same
        # tokens: each holds and computes some of the experts of an `ep` rank.
        tp = ranks.degrees.tp
        refuse_ep_degree(ranks.degrees.ep, tp, count_experts(network.whole_module))
        mesh = ranks.experts["ep", "tp"] if tp > 1 else ranks.experts["ep"]
        split = partial(compute_some_experts, mesh=ranks.experts["tp"]) if tp > 1 else None
        dispatcher = TokenDispatcher(ranks.experts.get_group("ep"))
        for experts in spreadable_experts(network.module) if stacked_experts(network.module) else ():
            for name, parameter in list(experts.named_parameters(recurse=False)):
                experts.register_parameter(name, sharded(parameter, mesh, *[Shard(0)] * mesh.ndim))
            exchange = partial(dispatcher.exchange, own_dtype(experts) is None)
            spread(experts, exchange, ranks.degrees.ep, split)
    for mixture in [each for each in network.module.modules() if isinstance(each, MoeLayer)]:
        mixture.tp = mixture.experts.tp = ranks.degrees.tp
        mesh = ranks.experts[tuple(axes)] if len(axes) > 1 else ranks.experts[axes[0]]
        for name, parameter in list(mixture.experts.named_parameters()):
            for axis in axes:
                dim = DIMS[name].get(axis)
                is_even = dim is None or parameter.shape[dim] % getattr(ranks.degrees, axis) == 0
                assert is_even, f"{name} cannot be sharded over {axis}"
            placements = [Shard(DIMS[name][axis]) if axis in DIMS[name] else Replicate() for axis in axes]
            mixture.experts.register_parameter(name, sharded(parameter, mesh, *placements))
        if "ep" in axes:
            mixture.dispatch = TokenDispatcher(ranks.experts.get_group("ep"))


class SentRows(NamedTuple):
    """Rows on their way to the ranks of their experts, and what is needed to bring the results back."""

    pending: Tensor
    received: Tensor  # the number of rows from each rank for each local expert
    places: Tensor  # of the received rows in the order of experts
    sends: list[int]
    receives: list[int]
    num_rows: int


class TokenDispatcher:
    """Sends rows to the ranks of their experts and back, collectively. Rows after the last expert's become zero."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._size = group, group.size()

    def send(self, experts: ExpertWeights, rows: Tensor, counts: Tensor) -> SentRows:
        """Start to send `rows`. The first `counts[0]` rows are for expert 0, and so on."""
        return self._start(rows, counts, in_autocast=own_dtype(experts) is None)

    def exchange(self, in_autocast: bool, experts: Compute, rows: Tensor, counts: Tensor) -> Tensor:
        """Send `rows`, in the autocast dtype if `in_autocast`, and return the outputs of `experts` in their order."""
        return self.compute(experts, self._start(rows, counts, in_autocast=in_autocast))

    @torch.compiler.disable  # the sizes depend on the data
    def _start(self, rows: Tensor, counts: Tensor, *, in_autocast: bool) -> SentRows:
        if in_autocast:
            rows = as_autocast(rows)  # halves the bytes to send
        received = torch.empty_like(counts)  # from each rank, for each local expert
        with AXIS_WAITS.span(EP):
            dist.all_to_all_single(received, counts, group=self._group)
        sent, received = counts.view(self._size, -1), received.view(self._size, -1)
        # An uneven all-to-all needs its sizes on the host. This is the only device synchronization of a layer.
        sends, receives = torch.stack([sent.sum(1), received.sum(1)]).tolist()
        pending = start_exchange(rows[: sum(sends)], sends, receives, self._group, axis=EP)
        # While rows arrive: the place of each, ordered by rank, then by expert, among rows ordered by expert.
        num_ranks, num_experts = received.shape
        numbers = torch.arange(num_experts, device=received.device).repeat(num_ranks)
        owners = numbers.repeat_interleave(received.flatten(), output_size=sum(receives))
        places = sorted_places(owners).unsqueeze(1)
        return SentRows(pending, received, places, sends, receives, len(rows))

    @torch.compiler.disable
    def compute(self, experts: Compute, sent: SentRows) -> Tensor:
        """Return the expert outputs of the rows that were sent, in their order."""
        rows, counts = await_rows(sent.pending, axis=EP), sent.received
        if len(rows):
            results = experts(scatter_rows(rows, sent.places), counts.sum(0).cumsum(0, dtype=torch.int32))
            results = gather_rows(results, sent.places)
        else:  # the grouped matmul needs at least one row
            results = experts(F.pad(rows, (0, 0, 0, 1)), counts.new_ones(counts.shape[1]))[:0]
        back = exchange_rows(results, sent.receives, sent.sends, self._group, axis=EP)
        return F.pad(back, (0, 0, 0, sent.num_rows - len(back)))
