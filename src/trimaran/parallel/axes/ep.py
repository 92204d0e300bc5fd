"""Expert parallelism: each rank holds some of the experts, and tokens travel to the expert they chose."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

# The all-to-all with a backward sits under an underscore.
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.tensor import Shard, distribute_tensor

from trimaran.core import Plan
from trimaran.nets import Network
from trimaran.nets.moe import ExpertWeights, MoeLayer, as_autocast
from trimaran.parallel.mesh import RankMesh
from trimaran.parallel.precision import own_dtype

# The dimension of each stack that an axis splits: `ep` the experts, `tp` the width of each.
DIMS = {
    "gate_proj": {"ep": 0, "tp": 1},
    "up_proj": {"ep": 0, "tp": 1},
    "down_proj": {"ep": 0, "tp": 2},
}


def apply_ep(network: Network, plan: Plan, ranks: RankMesh) -> None:
    """Split the experts over `ep` and `tp`, in place, and send tokens to them. Parameter names do not change.

    Router and shared expert are `apply_tp`'s. A rank's gradient of its experts is that of the tokens of its whole `ep`
    group.
    """
    axes = [axis for axis in ("ep", "tp") if getattr(ranks.degrees, axis) > 1]
    if not axes:
        return
    for mixture in [each for each in network.module.modules() if isinstance(each, MoeLayer)]:
        mixture.tp = ranks.degrees.tp
        _split(mixture.experts, ranks, axes)
        if "ep" in axes:
            mixture.dispatch = Exchange(ranks.experts.get_group("ep"))


def _split(experts: ExpertWeights, ranks: RankMesh, axes: list[str]) -> None:
    for name, parameter in list(experts.named_parameters()):
        dims = [DIMS[name][axis] for axis in axes]
        for axis, dim in zip(axes, dims, strict=True):
            assert parameter.shape[dim] % getattr(ranks.degrees, axis) == 0, f"{name} does not split over {axis}"
        mesh = ranks.experts[tuple(axes)] if len(axes) > 1 else ranks.experts[axes[0]]
        # Every rank has the same values, or none yet: it keeps its slice and tells nobody.
        held = distribute_tensor(parameter, mesh, [Shard(dim) for dim in dims], src_data_rank=None)
        experts.register_parameter(name, nn.Parameter(held, requires_grad=parameter.requires_grad))


class Exchange:
    """Sends rows to the ranks of their experts and the results back. Every rank of the group must take part."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._size = group, group.size()

    @torch.compiler.disable  # the sizes are known only when it runs: no graph could hold them
    def __call__(self, experts: ExpertWeights, rows: Tensor, counts: Tensor) -> Tensor:
        """Return `rows`, of which the first `counts[0]` are for expert 0 and so on, through their experts, in order.

        Rows behind those of the last expert stay here and come out as zeros.
        """
        if own_dtype(experts) is None:
            rows = as_autocast(rows)  # half as many bytes to send
        sent, received = counts.view(self._size, -1), self._told(counts)
        # An uneven exchange needs its sizes on the host. This is the one place where a layer waits for the device.
        sends, receives = torch.stack([sent.sum(1), received.sum(1)]).tolist()
        arrived = self._moved(rows[: sum(sends)], sends, receives)
        results = _by_expert(experts, arrived, received)
        back = self._moved(results, receives, sends)
        return F.pad(back, (0, 0, 0, len(rows) - len(back)))

    def _told(self, counts: Tensor) -> Tensor:
        """Return how many rows for each expert here come from each rank, [ranks, experts]."""
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self._group)
        return received.view(self._size, -1)

    def _moved(self, rows: Tensor, sends: list[int], receives: list[int]) -> Tensor:
        return all_to_all_single_autograd(rows.contiguous(), receives, sends, self._group)


def _by_expert(experts: ExpertWeights, rows: Tensor, counts: Tensor) -> Tensor:
    """Return `rows`, which come rank by rank and for each rank expert by expert (`counts`), through the experts."""
    num_ranks, num_experts = counts.shape
    if not len(rows):  # the grouped product wants one, if only of zeros
        return experts(F.pad(rows, (0, 0, 0, 1)), counts.new_ones(num_experts))[:0]
    numbers = torch.arange(num_experts, device=rows.device).repeat(num_ranks)
    order = numbers.repeat_interleave(counts.flatten(), output_size=len(rows)).argsort(stable=True)
    results = experts(rows[order], counts.sum(0).cumsum(0, dtype=torch.int32))
    return results[order.argsort()]
