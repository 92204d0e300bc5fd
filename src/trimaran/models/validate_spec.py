"""Checks that the shape of a decoder, or of a vision-language model, is possible."""

from collections.abc import Iterator

from trimaran.models.spec import ExpertSpec, ModelSpec, Rope
from trimaran.models.vlm_spec import VlmSpec

MOST_LAYERS = 4096
MOST = 2**24  # wider than any published network; larger sizes overflow the integers of a device

InvalidField = tuple[str, str]


def first_invalid_field(spec: ModelSpec | VlmSpec) -> InvalidField | None:
    """Return the first invalid field of `spec` and the problem, or None. Types are assumed to be right."""
    return next(_invalid_vlm_fields(spec) if isinstance(spec, VlmSpec) else _invalid_fields(spec), None)


def _invalid_fields(spec: ModelSpec) -> Iterator[InvalidField]:
    experts = spec.block.experts
    sizes = ("hidden", "heads", "kv_heads", "head_dim", "vocab", "max_seq_len")
    yield from out_of_bounds(
        ("layers", spec.layers, 1, MOST_LAYERS),
        *((field, getattr(spec, field), 1, MOST) for field in sizes),
        ("ffn", spec.ffn, 0 if experts else 1, MOST),
    )
    if spec.heads % spec.kv_heads:
        yield "kv_heads", f"{spec.kv_heads} key-value heads do not divide {spec.heads} heads"
    if spec.head_dim % 2:
        yield "head_dim", f"{spec.head_dim} is odd, and rotary positions need pairs"
    if not 0 < spec.block.norm_eps < 1:
        yield "norm_eps", f"{spec.block.norm_eps} is not between 0 and 1"
    yield from _rope_flaws(spec.block.rope, spec.head_dim)
    attention, ends = spec.block.attention, spec.block.ends
    for window in attention.windows:
        yield from out_of_bounds(("attention.windows", window, 0, MOST))
    yield from out_of_bounds(
        ("attention.scale", attention.scale, 0, 1e6),
        ("attention.softcap", attention.softcap, 0, 1e6),
        ("ends.embedding_scale", ends.embedding_scale, 0, 1e6),
        ("ends.logit_scale", ends.logit_scale, 1e-6, 1e6),
        ("ends.logit_softcap", ends.logit_softcap, 0, 1e6),
    )
    if attention.local_rope is not None:
        yield from _rope_flaws(attention.local_rope, spec.head_dim)
    if experts:
        yield from _expert_flaws(experts, spec.hidden)
        for number in experts.dense_layers:
            yield from out_of_bounds(("experts.dense_layers", number, 0, spec.layers - 1))
        if experts.dense_layers:
            yield from out_of_bounds(("ffn", spec.ffn, 1, MOST))
    if (latent := attention.latent) is not None:
        for field in ("kv_rank", "nope_dim", "rope_dim", "value_dim"):
            yield from out_of_bounds((f"attention.latent.{field}", getattr(latent, field), 1, MOST))
        yield from out_of_bounds(("attention.latent.query_rank", latent.query_rank, 0, MOST))
        if latent.rope_dim % 2:
            yield "attention.latent.rope_dim", f"{latent.rope_dim} is odd, and rotary positions need pairs"
        if spec.head_dim != latent.head_dim:
            yield "head_dim", f"{spec.head_dim} is not nope_dim + rope_dim of the latent attention, {latent.head_dim}"
        if spec.kv_heads != spec.heads:
            yield "kv_heads", "latent attention has a key for each head"
        if spec.block.rope.rotary_dim != latent.rope_dim:
            yield "rope.rotary_dim", f"{spec.block.rope.rotary_dim} is not rope_dim of the latent attention"


def _rope_flaws(rope: Rope, head_dim: int) -> Iterator[InvalidField]:
    yield from out_of_bounds(
        ("rope.theta", rope.theta, 1, 1e15),
        ("rope.factor", rope.factor, 1, 1e6),
        ("rope.original_max_seq_len", rope.original_max_seq_len, 1, MOST),
        ("rope.rotary_dim", rope.rotary_dim, 0, head_dim),
    )
    if not 0 < rope.low_freq_factor < rope.high_freq_factor < 1e6:
        yield "rope.high_freq_factor", f"{rope.high_freq_factor} is not above low_freq_factor {rope.low_freq_factor}"
    if rope.rotary_dim % 2:
        yield "rope.rotary_dim", f"{rope.rotary_dim} is odd, and rotary positions need pairs"
    if (longrope := rope.longrope) is not None:
        pairs = (rope.rotary_dim or head_dim) // 2
        for name, factors in (("short_factors", longrope.short_factors), ("long_factors", longrope.long_factors)):
            if len(factors) != pairs:
                yield f"rope.longrope.{name}", f"{len(factors)} numbers for {pairs} pairs of features"


def _expert_flaws(experts: ExpertSpec, hidden: int) -> Iterator[InvalidField]:
    yield from out_of_bounds(
        ("experts.num_experts", experts.num_experts, 1, MOST),
        ("experts.top_k", experts.top_k, 1, experts.num_experts),
        ("experts.ffn", experts.ffn, 1, MOST),
        ("experts.shared_ffn", experts.shared_ffn, 0, MOST),
        ("experts.balance", experts.balance, 0, 1e6),
        ("experts.z_loss", experts.z_loss, 0, 1e6),
        ("experts.capacity", experts.capacity, 0, 1e6),
    )
    if experts.shared_gate and not experts.shared_ffn:
        yield "experts.shared_gate", "there is no shared expert to gate"
    # The grouped matmul of the tensor cores reads 16 bytes at a time.
    if experts.ffn % 8:
        yield "experts.ffn", f"{experts.ffn} is not a multiple of 8"
    if hidden % 8:
        yield "hidden", f"{hidden} is not a multiple of 8, which experts need"
    router, unit = experts.router, experts.unit
    yield from out_of_bounds(
        ("experts.router.groups", router.groups, 1, experts.num_experts),
        ("experts.router.top_groups", router.top_groups, 1, router.groups),
        ("experts.router.scale", router.scale, 1e-6, 1e6),
        ("experts.router.correction_rate", router.correction_rate, 0, 1e6),
        ("experts.unit.limit", unit.limit, 0, 1e6),
        ("experts.unit.alpha", unit.alpha, 1e-6, 1e6),
    )
    size = experts.num_experts // router.groups
    if experts.num_experts % router.groups:
        yield "experts.router.groups", f"{router.groups} groups do not divide {experts.num_experts} experts"
    elif experts.top_k > size * router.top_groups:
        yield "experts.top_k", f"{router.top_groups} groups have only {size * router.top_groups} experts"
    yield from out_of_bounds(("experts.router.group_top", router.group_top, 1, size))
    if router.correction_rate and not router.correction:
        yield "experts.router.correction_rate", "there is no correction bias to update"


def out_of_bounds(*bounds: tuple[str, float, float, float]) -> Iterator[InvalidField]:
    """Yield (field, problem) for each (field, value, least, most) whose value is out of bounds."""
    for field, value, least, most in bounds:
        if not least <= value <= most:  # written this way, NaN is out of bounds too
            yield field, f"{value} is not between {least} and {most}"


def _invalid_vlm_fields(spec: VlmSpec) -> Iterator[InvalidField]:
    yield from ((f"language.{field}", problem) for field, problem in _invalid_fields(spec.language))
    yield from out_of_bounds(("vision.layers", spec.vision.layers, 1, MOST_LAYERS))
    for field in ("hidden", "heads", "ffn", "patch", "frames"):
        yield from out_of_bounds((f"vision.{field}", getattr(spec.vision, field), 1, MOST))
    if not 0 < spec.vision.block.norm_eps < 1:
        yield "vision.block.norm_eps", f"{spec.vision.block.norm_eps} is not between 0 and 1"
    if spec.vision.hidden % spec.vision.heads:
        yield "vision.heads", f"{spec.vision.heads} heads do not divide hidden {spec.vision.hidden}"
    if spec.vision.variant == "native" and spec.vision.head_dim % 4:
        yield "vision.heads", f"{spec.vision.head_dim} features per head do not split into pairs for row and column"
    yield from out_of_bounds(("vision.ends.positions_per_second", spec.vision.ends.positions_per_second, 0, MOST))
    if min(spec.vision.ends.std) <= 0:
        yield "vision.ends.std", f"{list(spec.vision.ends.std)} must be above 0"
    cell = spec.vision.patch * max(spec.projector.merge, 1)
    if spec.vision.variant == "anyres" and (spec.vision.tile < cell or cell != spec.vision.patch):
        yield "vision.tile", f"{spec.vision.tile} pixels are less than a patch, or patches are merged"
    if spec.vision.variant == "tiled" and (spec.vision.tile < cell or spec.vision.tile % cell):
        yield "vision.tile", f"{spec.vision.tile} pixels are not a multiple of patch x merge, {cell}"
    if spec.vision.variant == "tiled" and spec.vision.window:
        yield "vision.window", "tiles have no windows"
    if spec.vision.variant == "native" and (spec.vision.ends.class_token or spec.vision.tile):
        yield "vision.variant", "only a tiled tower has a class token and a tile"
    if spec.vision.window and spec.vision.window < cell:
        yield "vision.window", f"{spec.vision.window} pixels are less than patch x merge, {cell}"
    for layer in spec.vision.full_layers:
        yield from out_of_bounds(("vision.full_layers", layer, 0, spec.vision.layers - 1))
    yield from out_of_bounds(
        ("projector.merge", spec.projector.merge, 1, 64),
        ("projector.hidden", spec.projector.hidden, 0, MOST),
        ("image_token", spec.image_token, 0, spec.vocab - 1),
        ("min_pixels", spec.min_pixels, 1, spec.max_pixels),
        ("max_tiles", spec.max_tiles, 1, 4096),
    )
    taps = spec.projector.deepstack
    if taps != tuple(sorted(set(taps))):
        yield "projector.deepstack", f"{list(taps)} are not in ascending order"
    yield from out_of_bounds(*(("projector.deepstack", each, 0, spec.vision.layers - 1) for each in taps))
    if len(taps) > spec.language.layers:
        yield "projector.deepstack", f"{len(taps)} layers are more than the {spec.language.layers} of the decoder"
    if taps and spec.vision.variant == "tiled":
        yield "projector.deepstack", "only a native tower has it"
    pairs = spec.language.head_dim // 2
    if spec.sections and (sum(spec.sections) != pairs or min(spec.sections) < 0):
        yield "sections", f"{list(spec.sections)} do not add up to the {pairs} pairs of a head's features"
    for name in ("before", "after"):
        yield from out_of_bounds(*((name, token, 0, spec.vocab - 1) for token in getattr(spec, name)))
