"""Checks that the shape of a vision-language model is possible."""

from collections.abc import Iterator

from trimaran.models.validate_spec import MOST, MOST_LAYERS, InvalidField, first_invalid_field, out_of_bounds
from trimaran.models.vlm_spec import VisionSpec, VlmSpec


def first_invalid_vlm_field(spec: VlmSpec) -> InvalidField | None:
    """Return the first invalid field of `spec` and the problem, or None. Types are assumed to be right."""
    if problem := first_invalid_field(spec.language):
        return f"language.{problem[0]}", problem[1]
    return next(_invalid_fields(spec), None)


def _invalid_fields(spec: VlmSpec) -> Iterator[InvalidField]:
    yield from _vision_flaws(spec.vision, spec.projector.merge)
    yield from out_of_bounds(
        ("projector.merge", spec.projector.merge, 1, 64),
        ("projector.hidden", spec.projector.hidden, 0, MOST),
        ("image_token", spec.image_token, 0, spec.vocab - 1),
        ("min_pixels", spec.min_pixels, 1, spec.max_pixels),
        ("max_tiles", spec.max_tiles, 1, 4096),
    )
    yield from _deepstack_flaws(spec)
    pairs = spec.language.head_dim // 2
    if spec.sections and (sum(spec.sections) != pairs or min(spec.sections) < 0):
        yield "sections", f"{list(spec.sections)} do not add up to the {pairs} pairs of a head's features"
    for name in ("before", "after"):
        yield from out_of_bounds(*((name, token, 0, spec.vocab - 1) for token in getattr(spec, name)))


def _deepstack_flaws(spec: VlmSpec) -> Iterator[InvalidField]:
    taps = spec.projector.deepstack
    if taps != tuple(sorted(set(taps))):
        yield "projector.deepstack", f"{list(taps)} are not in ascending order"
    yield from out_of_bounds(*(("projector.deepstack", each, 0, spec.vision.layers - 1) for each in taps))
    if len(taps) > spec.language.layers:
        yield "projector.deepstack", f"{len(taps)} layers are more than the {spec.language.layers} of the decoder"
    if taps and spec.vision.variant == "tiled":
        yield "projector.deepstack", "only a native tower has it"


def _vision_flaws(vision: VisionSpec, merge: int) -> Iterator[InvalidField]:
    yield from out_of_bounds(("vision.layers", vision.layers, 1, MOST_LAYERS))
    for field in ("hidden", "heads", "ffn", "patch", "frames"):
        yield from out_of_bounds((f"vision.{field}", getattr(vision, field), 1, MOST))
    if not 0 < vision.block.norm_eps < 1:
        yield "vision.block.norm_eps", f"{vision.block.norm_eps} is not between 0 and 1"
    if vision.hidden % vision.heads:
        yield "vision.heads", f"{vision.heads} heads do not divide hidden {vision.hidden}"
    if vision.variant == "native" and vision.head_dim % 4:
        yield "vision.heads", f"{vision.head_dim} features per head do not split into pairs for row and column"
    yield from out_of_bounds(("vision.ends.positions_per_second", vision.ends.positions_per_second, 0, MOST))
    if min(vision.ends.std) <= 0:
        yield "vision.ends.std", f"{list(vision.ends.std)} must be above 0"
    yield from _invalid_variant_fields(vision, vision.patch * max(merge, 1))


def _invalid_variant_fields(vision: VisionSpec, cell: int) -> Iterator[InvalidField]:
    """Yield problems with native or tiled images; `cell` is the pixels per side that become a token."""
    if vision.variant == "anyres" and (vision.tile < cell or cell != vision.patch):
        yield "vision.tile", f"{vision.tile} pixels are less than a patch, or patches are merged"
    if vision.variant == "tiled" and (vision.tile < cell or vision.tile % cell):
        yield "vision.tile", f"{vision.tile} pixels are not a multiple of patch x merge, {cell}"
    if vision.variant == "tiled" and vision.window:
        yield "vision.window", "tiles have no windows"
    if vision.variant == "native" and (vision.ends.class_token or vision.tile):
        yield "vision.variant", "only a tiled tower has a class token and a tile"
    if vision.window and vision.window < cell:
        yield "vision.window", f"{vision.window} pixels are less than patch x merge, {cell}"
    for layer in vision.full_layers:
        yield from out_of_bounds(("vision.full_layers", layer, 0, vision.layers - 1))
