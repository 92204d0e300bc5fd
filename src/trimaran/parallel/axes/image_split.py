"""Splits the images of a micro-batch over ranks that replicate the vision tower, so each image is encoded once."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.core import Plan
from trimaran.nets import ImageAssignment, ImagePatches, Network
from trimaran.parallel.comm.axis_waits import axis_span
from trimaran.parallel.comm.tensor_collectives import reduce_gradient_over
from trimaran.parallel.mesh import RankMesh, image_split_towers, takes_images


def apply_image_split(network: Network, plan: Plan, ranks: RankMesh) -> None:
    """Let context-parallel ranks, and tensor-parallel ranks with a replicated tower, encode different images."""
    if not takes_images(network):
        return
    towers, cp = image_split_towers(network, plan), ranks.degrees.cp > 1
    axes = (*(["cp"] if cp else []), *(["tp"] if towers else []))
    if not axes:
        return
    mesh = ranks.axes[axes]
    network.module.image_assignment = ImageSplit(  # pyrefly: ignore[bad-argument-type]
        mesh.get_group() if mesh.ndim == 1 else mesh._flatten("images").get_group(),
        gathers_after_projector=not towers or "projector" in towers,
        parts=ranks.group("cp") if cp else None,
    )


class ImageSplit(ImageAssignment):
    """Splits the images of a micro-batch over the ranks of `group`. The assignment depends only on the image sizes.

    The gradient of the gathered rows is complete on every rank, except for context-parallel ranks (`parts`): theirs is
    partial.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, gathers_after_projector: bool, parts: dist.ProcessGroup | None = None
    ) -> None:
        self._group, self._parts, self._rank, self._size = group, parts, group.rank(), group.size()
        self._axis = "cp" if parts is not None and parts.size() == group.size() else "tp"
        self.gathers_after_projector = gathers_after_projector

    def local_images(self, images: ImagePatches, empty: ImagePatches) -> ImagePatches:
        counts = _patches(images)
        ours = [number for number, rank in enumerate(assign_images(counts, self._size)) if rank == self._rank]
        if not ours:
            return empty
        ends = torch.tensor(counts).cumsum(0).tolist()
        patches = torch.cat([images.patches[ends[each] - counts[each] : ends[each]] for each in ours])
        grids = torch.stack([images.grids[each] for each in ours])
        host_grids = None if images.host_grids is None else torch.stack([images.host_grids[each] for each in ours])
        return ImagePatches(patches, grids, host_grids)

    def gather(self, local: Tensor, images: ImagePatches, *, per_token: int) -> Tensor:
        rows = [count // per_token for count in _patches(images)]
        owners = assign_images(_patches(images), self._size)
        by_rank = [[number for number, owner in enumerate(owners) if owner == rank] for rank in range(self._size)]
        totals = tuple(sum(rows[each] for each in numbers) for numbers in by_rank)
        row_ids = torch.arange(sum(rows)).split(rows)
        order = torch.cat([row_ids[each] for numbers in by_rank for each in numbers])  # the index of each gathered row
        order = order.to(local.device, non_blocking=True)
        all_rows = _GatherRows.apply(local, totals, order, self._group, self._axis)
        return all_rows if self._parts is None else reduce_gradient_over(all_rows, self._parts.group_name, "cp")


def assign_images(counts: Sequence[int], num_ranks: int) -> list[int]:
    """Return the rank of each image, given its number of patches: largest first, to the rank with the lowest load."""
    loads, owners = [0] * num_ranks, [0] * len(counts)
    for number in sorted(range(len(counts)), key=lambda each: -counts[each]):
        owners[number] = rank = loads.index(min(loads))
        loads[rank] += counts[number]
    return owners


def _patches(images: ImagePatches) -> list[int]:
    """Return the number of patches of each image. Synchronizes with the device if the host has no copy of the grids."""
    grids = images.grids if images.host_grids is None else images.host_grids
    return [rows * columns for rows, columns in grids.tolist()]


class _GatherRows(torch.autograd.Function):
    """All-gathers and reorders the rows of all ranks. `totals` are the valid rows per rank, the rest is padding."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, totals: tuple[int, ...], order: Tensor, group: dist.ProcessGroup, axis: str
    ) -> Tensor:
        ctx.totals, ctx.rank, ctx.shape = totals, group.rank(), local.shape
        ctx.save_for_backward(order)
        padded = local.new_zeros(max(totals), local.shape[1])
        ours = totals[group.rank()]
        padded[:ours] = local[:ours]
        gathered = [torch.empty_like(padded) for _ in totals]
        with axis_span(axis):
            dist.all_gather(gathered, padded, group=group)
        rows = torch.cat([each[:total] for each, total in zip(gathered, totals, strict=True)])
        return torch.empty_like(rows).index_copy_(0, order, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None, None]:
        (order,) = ctx.saved_tensors
        ours = gradients[0].index_select(0, order.split(list(ctx.totals))[ctx.rank])
        padded = ours.new_zeros(ctx.shape)
        padded[: len(ours)] = ours
        return padded, None, None, None, None
