"""Where the patches of a micro-batch's images lie: positions, who sees whom, and the way back to their order."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trimaran.models.vlm_spec import CHANNELS, VisionSpec
from trimaran.nets.attention import Rotation
from trimaran.nets.varlen_attention import Segments, reach_of

THETA = 10_000.0  # of the rotary positions of row and column, in every model that has them


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchLayout:
    """The stream of a vision tower: `length` positions, of which the first of each tile may be a class token.

    `whole` keeps attention inside images, `windows` inside their windows. With windows, patches stand in the order of
    `order`, those of a window together, and `back` undoes that.
    """

    length: int
    images: int  # of a tiled tower; the number of native ones is of no use
    tile_patches: int
    class_tokens: int
    whole: Segments
    windows: Segments | None = None
    rotation: Rotation | None = None
    order: Tensor | None = None
    back: Tensor | None = None

    def ordered(self, patches: Tensor) -> Tensor:
        """Return rows, one for each patch, in the order of the stream."""
        return patches if self.order is None else patches[self.order]

    def groups(self, stream: Tensor, merge: int) -> Tensor:
        """Return what the projector takes in: the patches that become a token side by side, [tokens, width]."""
        x = stream[0]
        if self.class_tokens:
            x = x.unflatten(0, (self.images, -1))[:, self.class_tokens :].flatten(0, 1)
        if self.back is not None:
            x = x[self.back]
        return x.unflatten(0, (-1, merge * merge)).flatten(1)


def lay_out(spec: VisionSpec, merge: int, patches: Tensor, grids: Tensor, *, host: Tensor | None = None) -> PatchLayout:
    """Return the layout of `patches` [P, pixels], images one behind the other, of `grids` [N, 2] rows and columns.

    Nothing here waits for the device: what must be known beforehand is told by shapes, and by `host`, the grids on the
    host. Without it a kernel has to allow for longer segments than there are.
    """
    if spec.variant == "tiled":
        return _tiles(spec, patches)
    host = grids if grids.device.type == "cpu" else host
    known = None if host is None else host.tolist()
    places, counts = _Places.of(grids, len(patches), merge), grids.long().prod(1)
    lengths = counts if known is None else [rows * columns for rows, columns in known]
    order = back = windows = None
    if spec.window:
        side = spec.window // (spec.patch * merge) * merge
        number = places.windows(side)
        order = number.argsort(stable=True)
        back = order.argsort()
        windows = _windows(number, side, known)
    row, column = (each if order is None else each[order] for each in (places.row, places.column))
    return PatchLayout(
        length=len(patches),
        images=len(grids),
        tile_patches=0,
        class_tokens=0,
        whole=Segments.of_lengths(lengths, len(patches), patches.device),
        windows=windows,
        rotation=_rotation(row, column, spec.head_dim),
        order=order,
        back=back,
    )


def rows_and_columns(grids: Tensor, total: int, merge: int) -> Tensor:
    """Return [P, 2]: where each of the `total` patches stands in its image."""
    places = _Places.of(grids, total, merge)
    return torch.stack([places.row, places.column], 1)


def empty_group(spec: VisionSpec, merge: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the patches and the grid of one black group: what the tower sees where there is no image."""
    pixels = CHANNELS * spec.patch * spec.patch
    patches = torch.zeros(merge * merge, pixels, dtype=torch.uint8, device=device)
    return patches, torch.full((1, 2), merge, dtype=torch.int32, device=device)


def _tiles(spec: VisionSpec, patches: Tensor) -> PatchLayout:
    each = min(spec.tile_side**2, len(patches))  # an empty group is smaller than a tile
    tiles, tokens = len(patches) // each, int(spec.ends.class_token)
    assert tiles * each == len(patches), "the data cuts images into whole tiles"
    length = tiles * (each + tokens)
    whole = Segments.of_lengths([each + tokens] * tiles, length, patches.device)
    return PatchLayout(length=length, images=tiles, tile_patches=each, class_tokens=tokens, whole=whole)


@dataclass(frozen=True, slots=True)
class _Places:
    """Of each patch, all [P]: its row and column, how many columns its image has, and where that begins."""

    row: Tensor
    column: Tensor
    columns: Tensor
    start: Tensor

    @classmethod
    def of(cls, grids: Tensor, total: int, merge: int) -> "_Places":
        grids, device = grids.long(), grids.device
        counts = grids.prod(1)
        image = torch.arange(len(grids), device=device).repeat_interleave(counts, output_size=total)
        start, columns = (counts.cumsum(0) - counts)[image], grids[image, 1]
        inside, across = torch.arange(total, device=device) - start, columns // merge
        group, corner = inside // (merge * merge), inside % (merge * merge)
        row = group // across * merge + corner // merge
        column = group % across * merge + corner % merge
        return cls(row, column, columns, start)

    def windows(self, side: int) -> Tensor:
        """Return the number of each patch's window, [P]: they go row by row through an image, `side` patches a side.

        An image has no more windows than patches, so its numbers begin where its patches do.
        """
        across = (self.columns + side - 1) // side
        return self.start + self.row // side * across + self.column // side


def _windows(number: Tensor, side: int, grids: list[list[int]] | None) -> Segments:
    """Return the segments of patches sorted by the number of their window, at most `side` x `side` patches each."""
    total = len(number)
    if grids is not None:
        each = [(_pieces(rows, side), _pieces(columns, side)) for rows, columns in grids]
        lengths = [tall * wide for rows, columns in each for tall in rows for wide in columns]
        return Segments.of_lengths(lengths, total, number.device)
    # How many windows there are is on the device. Those that are not have no length, and no kernel minds.
    counts = torch.zeros_like(number).scatter_add_(0, number, torch.ones_like(number))
    return replace(Segments.of_lengths(counts, total, number.device), reach=reach_of(side * side))


def _pieces(length: int, side: int) -> list[int]:
    whole, rest = divmod(length, side)
    return [side] * whole + ([rest] if rest else [])


def _rotation(row: Tensor, column: Tensor, head_dim: int) -> Rotation:
    """Return fp32 cosines and sines [1, 1, P, head_dim]: half of the pairs turn by the row, half by the column."""
    half = head_dim // 2
    exponents = torch.arange(0, half, 2, dtype=torch.float32, device=row.device) / half
    frequencies = 1.0 / THETA**exponents
    angles = torch.cat([row[:, None] * frequencies, column[:, None] * frequencies], 1)
    angles = torch.cat([angles, angles], 1)[None, None]
    return angles.cos(), angles.sin()
