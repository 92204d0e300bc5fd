"""The images of a micro-batch: who encodes them, and the order, positions and attention segments of their patches."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trimaran.models import CHANNELS, VisionSpec
from trimaran.nets.decoder.attention import Rotation
from trimaran.nets.varlen_attention import Segments, max_length_tensor

ROPE_THETA = 10_000.0  # of the rotary positions of row and column, in every model that has them


@dataclass(frozen=True, slots=True)
class ImagePatches:
    """The patches of all images, concatenated, and the images' grids [N, 2]; `host_grids` is a copy on the host.

    `token_sources` [M, 4] are the rows of the projector's output that a token is the sum of, with `token_weights`; -1
    is the newline. Without them each row is a token.
    """

    patches: Tensor
    grids: Tensor
    host_grids: Tensor | None = None
    token_sources: Tensor | None = None
    token_weights: Tensor | None = None


class ImageAssignment:
    """Every rank encodes all images. `parallel/axes/image_split.py` replaces it by one that splits them over ranks."""

    gathers_after_projector = False  # whether rows are gathered after the projector, or before it

    def local_images(self, images: ImagePatches, empty: ImagePatches) -> ImagePatches:
        """Return the images that this rank encodes; `empty` if it has none."""
        return images

    def gather(self, local: Tensor, images: ImagePatches, *, per_token: int) -> Tensor:
        """Return the rows of all `images` in order, given this rank's rows; a row covers `per_token` patches."""
        return local


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchLayout:
    """The stream of a vision tower: `length` positions, of which the first of each tile may be a class token.

    Attention stays inside `image_segments`, or inside `window_segments` in layers with windows. With windows, the
    patches are permuted by `order`, so that those of a window are neighbours; `inverse_order` undoes that. `table` has
    the four rows [P, 4] of the table of positions that are nearest to each patch, and their weights.
    """

    length: int
    num_tiles: int  # used by tiled towers only
    patches_per_tile: int
    class_tokens: int
    image_segments: Segments
    window_segments: Segments | None = None
    rotation: Rotation | None = None
    order: Tensor | None = None
    inverse_order: Tensor | None = None
    table: tuple[Tensor, Tensor] | None = None

    def merged_patches(self, stream: Tensor, merge: int, parts: int = 1) -> Tensor:
        """Return the projector's input [tokens, width]: the patches of each token, concatenated; each part alone."""
        if parts > 1:
            return torch.cat([self.merged_patches(each, merge) for each in stream.chunk(parts, -1)], -1)
        x = stream[0]
        if self.class_tokens:
            x = x.unflatten(0, (self.num_tiles, -1))[:, self.class_tokens :].flatten(0, 1)
        if self.inverse_order is not None:
            x = x[self.inverse_order]
        return x.unflatten(0, (-1, merge * merge)).flatten(1)


def layout_patches(
    spec: VisionSpec, merge: int, patches: Tensor, grids: Tensor, *, host_grids: Tensor | None = None
) -> PatchLayout:
    """Return the layout of `patches` [P, pixels] of concatenated images with `grids` [N, 2] rows and columns.

    Nothing here synchronises with the device. Without `host_grids`, a copy of the grids on the host, the maximum length
    of a segment is only an upper bound.
    """
    if spec.variant == "tiled":
        each = min(spec.tile_side**2, len(patches))  # the black image is smaller than a tile
        tiles, tokens = len(patches) // each, int(spec.ends.class_token)
        assert tiles * each == len(patches), "the data splits images into complete tiles"
        length = tiles * (each + tokens)
        segments = Segments.of_lengths([each + tokens] * tiles, length, patches.device)
        return PatchLayout(
            length=length, num_tiles=tiles, patches_per_tile=each, class_tokens=tokens, image_segments=segments
        )
    host_grids = grids if grids.is_cpu else host_grids
    shapes = None if host_grids is None else host_grids.tolist()
    positions, counts = _PatchPositions.of(grids, len(patches), merge), grids.long().prod(1)
    lengths = counts if shapes is None else [rows * columns for rows, columns in shapes]
    order = inverse_order = windows = None
    if spec.window:
        side = spec.window // (spec.patch * merge) * merge
        # Windows are numbered row by row through an image, which has at most as many of them as patches: from its first
        # patch on the numbers are unique.
        across = (positions.columns + side - 1) // side
        number = positions.start + positions.row // side * across + positions.column // side
        order = number.argsort(stable=True)
        inverse_order = order.argsort()
        windows = _window_segments(number, side, shapes)
    row, column = (each if order is None else each[order] for each in (positions.row, positions.column))
    return PatchLayout(
        length=len(patches),
        num_tiles=len(grids),
        patches_per_tile=0,
        class_tokens=0,
        image_segments=Segments.of_lengths(lengths, len(patches), patches.device),
        window_segments=windows,
        rotation=_rotation(row, column, spec.head_dim),
        order=order,
        inverse_order=inverse_order,
        table=positions.nearest_in_table(spec.table_side) if spec.table_side else None,
    )


def patch_positions(grids: Tensor, total: int, merge: int) -> Tensor:
    """Return the row and column of each of the `total` patches inside its image, [P, 2]."""
    positions = _PatchPositions.of(grids, total, merge)
    return torch.stack([positions.row, positions.column], 1)


def black_image(spec: VisionSpec, side: int, device: torch.device) -> ImagePatches:
    """Return a black image of `side` x `side` patches: the tower's input if there are no images."""
    patches = torch.zeros(side * side, CHANNELS * spec.patch * spec.patch, dtype=torch.uint8, device=device)
    # Created on both: a copy to the host would synchronise with the device.
    grids, on_host = (torch.full((1, 2), side, dtype=torch.int32, device=each) for each in (device, "cpu"))
    return ImagePatches(patches, grids, on_host)


@dataclass(frozen=True, slots=True)
class _PatchPositions:
    """For each patch, all [P]: its row and column, the rows, columns and first patch of its image."""

    row: Tensor
    column: Tensor
    rows: Tensor
    columns: Tensor
    start: Tensor

    @classmethod
    def of(cls, grids: Tensor, total: int, merge: int) -> "_PatchPositions":
        grids, device = grids.long(), grids.device
        counts = grids.prod(1)
        image = torch.arange(len(grids), device=device).repeat_interleave(counts, output_size=total)
        start, columns = (counts.cumsum(0) - counts)[image], grids[image, 1]
        inside, across = torch.arange(total, device=device) - start, columns // merge
        group, corner = inside // (merge * merge), inside % (merge * merge)
        row = group // across * merge + corner // merge
        column = group % across * merge + corner % merge
        return cls(row, column, grids[image, 0], columns, start)

    def nearest_in_table(self, side: int) -> tuple[Tensor, Tensor]:
        """Return the nearest rows [P, 4] of a `side` x `side` table, and bilinear weights with aligned corners."""
        top, down = _between(self.row, self.rows, side)
        left, right = _between(self.column, self.columns, side)
        bottom, far = (top + 1).clamp(max=side - 1), (left + 1).clamp(max=side - 1)
        rows = torch.stack([top * side + left, top * side + far, bottom * side + left, bottom * side + far], 1)
        weights = [(1 - down) * (1 - right), (1 - down) * right, down * (1 - right), down * right]
        return rows, torch.stack(weights, 1)


def _between(position: Tensor, length: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Return where `position` of `length` lies in a table of `side`: the last entry before it, and the rest."""
    at = position * ((side - 1) / (length - 1).clamp(min=1).float())
    first = at.floor()
    return first.long(), at - first


def _window_segments(number: Tensor, side: int, shapes: list[list[int]] | None) -> Segments:
    """Return the segments of patches sorted by window number; a window has at most `side` x `side` patches."""
    total = len(number)
    if shapes is not None:
        sides = [(_window_sides(rows, side), _window_sides(columns, side)) for rows, columns in shapes]
        lengths = [tall * wide for rows, columns in sides for tall in rows for wide in columns]
        return Segments.of_lengths(lengths, total, number.device)
    # Only the device knows the number of windows. The others have length 0, which the kernels accept.
    counts = torch.zeros_like(number).scatter_add_(0, number, torch.ones_like(number))
    return replace(Segments.of_lengths(counts, total, number.device), max_length_carrier=max_length_tensor(side * side))


def _window_sides(length: int, side: int) -> list[int]:
    """Return the sizes of the windows along one side of an image; the last one may be smaller."""
    full, rest = divmod(length, side)
    return [side] * full + ([rest] if rest else [])


def _rotation(row: Tensor, column: Tensor, head_dim: int) -> Rotation:
    """Return fp32 cosines and sines [1, 1, P, head_dim]: half of the pairs use the row, half the column."""
    half = head_dim // 2
    exponents = torch.arange(0, half, 2, dtype=torch.float32, device=row.device) / half
    frequencies = 1.0 / ROPE_THETA**exponents
    angles = torch.cat([row[:, None] * frequencies, column[:, None] * frequencies], 1)
    angles = torch.cat([angles, angles], 1)[None, None]
    return angles.cos(), angles.sin()
