"""The fields of config.json about rotary positions, in the names of transformers 4 and 5."""

from collections.abc import Mapping
from typing import Any

from trimaran.models.config_fields import Fields, bad_field, show
from trimaran.models.layer_variations import LongRope, Rope, Yarn

ROPE_KINDS = ("default", "llama3", "linear", "yarn")
_YARN_NUMBERS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")


def rope_lacks(config: Mapping[str, Any], *, partial: bool = False, kinds: tuple[str, ...] = ROPE_KINDS) -> str:
    """Return what the decoder lacks of a config's rotary positions; an empty string if nothing.

    `partial`: the architecture may rotate a part of each head.
    """
    rope = rope_tree(config)
    if not isinstance(rope, Mapping) or any(isinstance(each, Mapping) for each in rope.values()):
        return f"rotary positions are {show(rope)}"
    for tree in (config, rope):
        if not partial and tree.get("partial_rotary_factor") not in (None, 1):
            return f"partial_rotary_factor is {show(tree['partial_rotary_factor'])}"
    if (kind := rope_kind(rope)) not in kinds:
        return f"rope_type is {show(kind)}"
    return ""


def read_rope(fields: Fields, max_seq_len: int, *, theta: float = 10_000.0) -> Rope:
    """Return the rotary positions of all features of a head. `theta` is the default of the architecture."""
    tree = rope_tree(fields.config)
    theta = Fields({**fields.config, **tree}, fields.where).number("rope_theta", default=theta)
    return read_scaling(Fields(tree, f"{fields.where} (rotary positions)"), theta, max_seq_len)


def read_scaling(fields: Fields, theta: float, max_seq_len: int) -> Rope:
    """Return the rotary positions with the scaling that `fields` describe."""
    original = fields.integer("original_max_position_embeddings", default=max_seq_len)
    match rope_kind(fields.config):
        case "llama3":
            return Rope(
                theta=theta,
                factor=fields.number("factor"),
                low_freq_factor=fields.number("low_freq_factor"),
                high_freq_factor=fields.number("high_freq_factor"),
                original_max_seq_len=original,
            )
        case "linear":
            return Rope(theta=theta, factor=fields.number("factor"), scaling="linear")
        case "yarn":
            numbers = {name: fields.number(name) for name in _YARN_NUMBERS if fields.has(name)}
            yarn = Yarn(**numbers, truncate=fields.boolean("truncate", default=True))
            factor = fields.number("factor", default=max_seq_len / max(original, 1))
            return Rope(theta=theta, factor=factor, scaling="yarn", original_max_seq_len=original, yarn=yarn)
        case _:
            return Rope(theta=theta)


def read_longrope(fields: Fields, max_seq_len: int, original: int) -> Rope:
    """Return LongRoPE's positions (Phi-3), whose divisors config.json lists."""
    tree = rope_tree(fields.config)
    theta = Fields({**fields.config, **tree}, fields.where).number("rope_theta", default=10_000.0)
    scaling = Fields(tree, f"{fields.where} (rotary positions)")
    original = scaling.size("original_max_position_embeddings", default=original)
    return Rope(
        theta=theta,
        factor=scaling.number("factor", default=max_seq_len / original),
        original_max_seq_len=original,
        scaling="longrope",
        longrope=LongRope(
            short_factors=_factors(scaling, "short_factor"),
            long_factors=_factors(scaling, "long_factor"),
            attention_factor=scaling.number("attention_factor", default=0.0),
        ),
    )


def rotary_dim(fields: Fields, head_dim: int, default: float = 1.0) -> int:
    """Return how many features of a head are rotated, 0 for all of them."""
    tree = {**fields.config, **rope_tree(fields.config)}
    width = int(head_dim * Fields(tree, fields.where).number("partial_rotary_factor", default=default))
    return 0 if width == head_dim else width


def write_rope(rope: Rope, head_dim: int) -> dict[str, Any]:
    """Return the fields as transformers 4 has them and 5 still reads them."""
    config: dict[str, Any] = {"rope_theta": rope.theta, "rope_scaling": write_scaling(rope)}
    return config | ({"partial_rotary_factor": rope.rotary_dim / head_dim} if rope.rotary_dim else {})


def write_scaling(rope: Rope) -> dict[str, Any] | None:
    """Return `rope_scaling`; None without scaling."""
    if rope.longrope is not None:
        factors = {"short_factor": list(rope.longrope.short_factors), "long_factor": list(rope.longrope.long_factors)}
        own = {"attention_factor": rope.longrope.attention_factor} if rope.longrope.attention_factor else {}
        return {"rope_type": "longrope", "factor": rope.factor, **factors, **own} | _original(rope)
    if rope.factor == 1:
        return None
    match rope.scaling:
        case "linear":
            return {"rope_type": "linear", "factor": rope.factor}
        case "yarn":
            yarn = rope.yarn or Yarn()
            numbers = {name: getattr(yarn, name) for name in _YARN_NUMBERS if getattr(yarn, name)}
            return {"rope_type": "yarn", "factor": rope.factor, **numbers, "truncate": yarn.truncate} | _original(rope)
        case _:
            return {
                "rope_type": "llama3",
                "factor": rope.factor,
                "low_freq_factor": rope.low_freq_factor,
                "high_freq_factor": rope.high_freq_factor,
            } | _original(rope)


def rope_tree(config: Mapping[str, Any]) -> Any:
    """Return the rotary settings from where transformers 5 writes them, or from where 4 does."""
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def rope_kind(tree: Mapping[str, Any]) -> Any:
    return tree.get("rope_type") or tree.get("type") or "default"


def _original(rope: Rope) -> dict[str, int]:
    return {"original_max_position_embeddings": rope.original_max_seq_len}


def _factors(fields: Fields, name: str) -> tuple[float, ...]:
    values = fields.config.get(name)
    if not isinstance(values, list) or not all(type(each) in (int, float) and 0 < each < 1e300 for each in values):
        raise bad_field(name, f"{show(values)} is not a list of positive numbers", fields.where)
    return tuple(float(each) for each in values)
