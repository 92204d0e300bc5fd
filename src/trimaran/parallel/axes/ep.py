"""Expert parallelism: each rank holds some experts, and tokens are sent to the ranks of their experts."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from trimaran.core import Plan
from trimaran.models.hf_facts import refuse_ep_degree
from trimaran.nets import Network
from trimaran.nets.decoder.moe import ExpertWeights, MoeLayer, as_autocast
from trimaran.nets.decoder.scattered_rows import gather_rows, scatter_rows, sorted_places
from trimaran.nets.hf.hf_sharding import count_experts, spread, spreadable_experts, stacked_experts
from trimaran.parallel.axes.sharded_layers import compute_some_experts
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
    """Shard the experts over `ep` and `tp`, in place, and dispatch tokens to them. Parameter names do not change.

    `apply_tp` handles the router and the shared expert. The gradient of a rank's experts covers the tokens of its `ep`
    group.
    """
    axes = [axis for axis in ("ep", "tp") if getattr(ranks.degrees, axis) > 1]
    if not axes:
        return
    if "ep" in axes and network.is_foreign:
        _spread_hf_experts(network, ranks)
    for mixture in [each for each in network.module.modules() if isinstance(each, MoeLayer)]:
        mixture.tp = mixture.experts.tp = ranks.degrees.tp
        _shard_experts(mixture.experts, ranks, axes)
        if "ep" in axes:
            mixture.dispatch = TokenDispatcher(ranks.experts.get_group("ep"))


def _spread_hf_experts(network: Network, ranks: RankMesh) -> None:
    """Shard the stacked experts of a Hugging Face model over `ep`, and dispatch tokens to them.

    Tensor-parallel ranks have the same tokens: each holds and computes some of the experts of an `ep` rank. A pipeline
    stage may have no layer with experts; the whole model has.
    """
    ep, tp = ranks.degrees.ep, ranks.degrees.tp
    refuse_ep_degree(ep, tp, count_experts(network.whole_module))
    mesh = ranks.experts["ep", "tp"] if tp > 1 else ranks.experts["ep"]
    split = partial(compute_some_experts, mesh=ranks.experts["tp"]) if tp > 1 else None
    dispatcher = TokenDispatcher(ranks.experts.get_group("ep"))
    for experts in spreadable_experts(network.module) if stacked_experts(network.module) else ():
        for name, parameter in list(experts.named_parameters(recurse=False)):
            shard = distribute_tensor(parameter, mesh, [Shard(0)] * mesh.ndim, src_data_rank=None)
            experts.register_parameter(name, nn.Parameter(shard, requires_grad=parameter.requires_grad))
        spread(experts, partial(dispatcher.exchange, own_dtype(experts) is None), ep, split)


def _shard_experts(experts: ExpertWeights, ranks: RankMesh, axes: list[str]) -> None:
    mesh = ranks.experts[tuple(axes)] if len(axes) > 1 else ranks.experts[axes[0]]
    for name, parameter in list(experts.named_parameters()):
        for axis in axes:
            dim = DIMS[name].get(axis)
            is_even = dim is None or parameter.shape[dim] % getattr(ranks.degrees, axis) == 0
            assert is_even, f"{name} cannot be sharded over {axis}"
        placements = [Shard(DIMS[name][axis]) if axis in DIMS[name] else Replicate() for axis in axes]
        # All ranks have equal values, or meta tensors: each takes its shard without communication.
        shard = distribute_tensor(parameter, mesh, placements, src_data_rank=None)
        experts.register_parameter(name, nn.Parameter(shard, requires_grad=parameter.requires_grad))


class SentRows(NamedTuple):
    """Rows on their way to the ranks of their experts, and what is needed to bring the results back."""

    pending: Tensor
    received: Tensor  # the number of rows from each rank for each local expert
    places: Tensor  # of the received rows in the order of experts
    sends: list[int]
    receives: list[int]
    num_rows: int


class TokenDispatcher:
    """Sends rows to the ranks of their experts and the results back. Every rank of the group must call it.

    Rows after those of the last expert are not sent; their output is zero.
    """

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
        sent, received = counts.view(self._size, -1), self._exchange_counts(counts)
        # An uneven all-to-all needs its sizes on the host. This is the only device synchronization of a layer.
        sends, receives = torch.stack([sent.sum(1), received.sum(1)]).tolist()
        pending = start_exchange(rows[: sum(sends)], sends, receives, self._group, axis=EP)
        places = _places_by_expert(received, num_rows=sum(receives))  # while rows arrive
        return SentRows(pending, received, places, sends, receives, len(rows))

    @torch.compiler.disable
    def compute(self, experts: Compute, sent: SentRows) -> Tensor:
        """Return the expert outputs of the rows that were sent, in their order."""
        results = _apply_experts(experts, await_rows(sent.pending, axis=EP), sent.received, sent.places)
        back = exchange_rows(results, sent.receives, sent.sends, self._group, axis=EP)
        return F.pad(back, (0, 0, 0, sent.num_rows - len(back)))

    def _exchange_counts(self, counts: Tensor) -> Tensor:
        """Return the number of rows from each rank for each local expert, [ranks, experts]."""
        received = torch.empty_like(counts)
        with AXIS_WAITS.span(EP):
            dist.all_to_all_single(received, counts, group=self._group)
        return received.view(self._size, -1)


def _places_by_expert(counts: Tensor, *, num_rows: int) -> Tensor:
    """Return the place of each row, ordered by rank, then by expert (`counts`), among rows ordered by expert."""
    num_ranks, num_experts = counts.shape
    numbers = torch.arange(num_experts, device=counts.device).repeat(num_ranks)
    return sorted_places(numbers.repeat_interleave(counts.flatten(), output_size=num_rows)).unsqueeze(1)


def _apply_experts(experts: Compute, rows: Tensor, counts: Tensor, places: Tensor) -> Tensor:
    """Return the expert outputs of `rows`, which are ordered by rank, then by expert (`counts`)."""
    if not len(rows):  # the grouped matmul needs at least one row
        return experts(F.pad(rows, (0, 0, 0, 1)), counts.new_ones(counts.shape[1]))[:0]
    results = experts(scatter_rows(rows, places), counts.sum(0).cumsum(0, dtype=torch.int32))
    return gather_rows(results, places)
