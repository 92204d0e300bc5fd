"""Images shared out among ranks that hold a whole tower each: nobody looks at what another one looks at."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimaran.core import Plan
from trimaran.nets import Network
from trimaran.nets.image_balancing import ImageBalancer, Pictures
from trimaran.nets.local_shards import local_part
from trimaran.parallel.mesh import RankMesh
from trimaran.parallel.tower_plan import whole_towers


def apply_deal(network: Network, plan: Plan, ranks: RankMesh) -> None:
    """Let ranks that have the same images, and each the whole of a matrix, look at different ones.

    The parts of a sequence have the same images, and so have the ranks of a tensor-parallel group: these share them
    out where the tower stays whole.
    """
    if not _looks(network):
        return
    dealt, cp = dealt_towers(network, plan), ranks.degrees.cp > 1
    axes = (*(["cp"] if cp else []), *(["tp"] if dealt else []))
    if not axes:
        return
    mesh = ranks.axes[axes]
    network.module.deal = ImageDeal(  # pyrefly: ignore[bad-argument-type]
        mesh.get_group() if mesh.ndim == 1 else mesh._flatten("pictures").get_group(),
        past_projector=not dealt or "projector" in dealt,
        parts=ranks.group("cp") if cp else None,
    )


def dealt_towers(network: Network, plan: Plan) -> list[str]:
    """Return the whole towers in which every rank of a tensor-parallel group looks at other images.

    Of their gradients each of these ranks knows an addend.
    """
    whole = whole_towers(network, plan)
    return [tower for tower in ("vision", "projector") if tower in whole and "vision" in whole and _looks(network)]


def _looks(network: Network) -> bool:
    """Return whether the network takes images."""
    return isinstance(getattr(network.module, "deal", None), ImageBalancer)


class ImageDeal(ImageBalancer):
    """The ranks of `group` have the same micro-batch. Who gets which image is a function of their sizes alone.

    Of the gradient of all rows every rank knows the whole, but for those that have different `parts` of a sequence:
    they know an addend each.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, past_projector: bool, parts: dist.ProcessGroup | None = None
    ) -> None:
        self._group, self._parts, self._rank, self._size = group, parts, group.rank(), group.size()
        self.past_projector = past_projector

    def mine(self, images: Pictures, empty: Pictures) -> Pictures:
        counts = _patches(images)
        ours = [number for number, owner in enumerate(owners_of(counts, self._size)) if owner == self._rank]
        if not ours:
            return empty
        ends = torch.tensor(counts).cumsum(0).tolist()
        patches = torch.cat([images.patches[ends[each] - counts[each] : ends[each]] for each in ours])
        grids = torch.stack([images.grids[each] for each in ours])
        host = None if images.host is None else torch.stack([images.host[each] for each in ours])
        return Pictures(patches, grids, host)

    def whole(self, mine: Tensor, images: Pictures, *, per_token: int) -> Tensor:
        rows = [count // per_token for count in _patches(images)]
        owners = owners_of(_patches(images), self._size)
        by_rank = [[number for number, owner in enumerate(owners) if owner == rank] for rank in range(self._size)]
        totals = tuple(sum(rows[each] for each in numbers) for numbers in by_rank)
        places = torch.arange(sum(rows)).split(rows)
        dealt = torch.cat([places[each] for numbers in by_rank for each in numbers])  # where each gathered row belongs
        rows_of_all = _Gathered.apply(mine, totals, dealt.to(mine.device, non_blocking=True), self._group)
        return rows_of_all if self._parts is None else _Summed.apply(rows_of_all, self._parts)


def owners_of(counts: Sequence[int], num_ranks: int) -> list[int]:
    """Return which rank gets each image of so many patches: the largest first, to whoever has least."""
    loads, owners = [0] * num_ranks, [0] * len(counts)
    for number in sorted(range(len(counts)), key=lambda each: -counts[each]):
        owners[number] = rank = loads.index(min(loads))
        loads[rank] += counts[number]
    return owners


def sum_addends(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Give every rank of `group` the sum of their gradients, in place: each has those of its own images."""
    gradients = [local_part(each.grad) for each in parameters if each.grad is not None]
    gradients = [each for each in gradients if each.numel()]  # a rank may have nothing of a small parameter's shards
    if not gradients:
        return
    flat = torch.cat([each.flatten() for each in gradients])
    dist.all_reduce(flat, group=group)
    parts = flat.split([each.numel() for each in gradients])
    torch._foreach_copy_(gradients, [part.view_as(each) for part, each in zip(parts, gradients, strict=True)])


def _patches(images: Pictures) -> list[int]:
    """Return the patches of each image. A GPU without the grids on its host has to be waited for."""
    grids = images.grids if images.host is None else images.host
    return [rows * columns for rows, columns in grids.tolist()]


class _Gathered(torch.autograd.Function):
    """All ranks' rows, each where it belongs. `totals` are the rows of each rank; what has more is padding."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, totals: tuple[int, ...], places: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.totals, ctx.rank, ctx.shape = totals, group.rank(), mine.shape
        ctx.save_for_backward(places)
        room = mine.new_zeros(max(totals), mine.shape[1])
        ours = totals[group.rank()]
        room[:ours] = mine[:ours]
        gathered = [torch.empty_like(room) for _ in totals]
        dist.all_gather(gathered, room, group=group)
        rows = torch.cat([each[:total] for each, total in zip(gathered, totals, strict=True)])
        return torch.empty_like(rows).index_copy_(0, places, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        ours = gradients[0].index_select(0, places.split(list(ctx.totals))[ctx.rank])
        padded = ours.new_zeros(ctx.shape)
        padded[: len(ours)] = ours
        return padded, None, None, None


class _Summed(torch.autograd.Function):
    """Returns what came in; its gradient is the sum of all ranks' addends."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
