"""The module names of a network, without building it, and the patterns that match them."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from trimaran.core import UserError, did_you_mean
from trimaran.models.any_spec import Spec
from trimaran.models.perception_spec import PARTS, PerceptionSpec
from trimaran.models.spec import ModelSpec, norm_names

FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
LINEAR = (*FEED_FORWARD, "q_proj", "k_proj", "v_proj", "o_proj", *LATENT, "linear_1", "linear_2", "lm_head")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")


def module_names(spec: Spec) -> list[str]:
    """Return the name of every module of the network that `spec` describes."""
    if isinstance(spec, ModelSpec):
        return _decoder(spec)
    if isinstance(spec, PerceptionSpec):
        names = [name for tower in spec.tower_names[:-1] for name in (tower, f"{tower}.layers")]
        for block in spec.block_names:
            kind = block.rpartition(".")[0] if ".layers." in block else block
            parts = [part for part in PARTS[kind] if part != "join" or len(spec.point_sensors) > 1]
            names += [block, *(f"{block}.{part}" for part in parts)]
        return names
    names = ["vision", "vision.stem", "vision.stem.patch_embed", "vision.layers", "projector", "language"]
    names += ["vision.stem.norm"] * spec.vision.ends.first_norm
    mlp = FEED_FORWARD if spec.vision.block.gated else FEED_FORWARD[1:]
    for number in range(spec.vision.layers):
        layer = f"vision.layers.{number}"
        names += [layer, f"{layer}.input_layernorm", f"{layer}.self_attn", f"{layer}.post_attention_layernorm"]
        names += [f"{layer}.self_attn.{part}" for part in ATTENTION]
        names += [f"{layer}.mlp", *(f"{layer}.mlp.{part}" for part in mlp)]
    names += ["projector.norm"] * (spec.projector.normed or spec.projector.kind == "pixel-shuffle")
    names += ["projector.linear_1", "projector.linear_2"]
    names += ["projector.deep"] * bool(spec.projector.deepstack)
    for number in range(len(spec.projector.deepstack)):
        deep = f"projector.deep.{number}"
        names += [deep, *(f"{deep}.{part}" for part in ("norm", "linear_1", "linear_2"))]
    return [*names, *(f"language.{name}" for name in [*_decoder(spec.language), "place"])]


def _decoder(spec: ModelSpec) -> list[str]:
    names, attention = ["embed_tokens", "layers", "norm", "lm_head"], ATTENTION
    if (latent := spec.block.attention.latent) is not None:
        queries = ("q_a_proj", "q_a_layernorm", "q_b_proj") if latent.query_rank else ("q_proj",)
        attention = (*queries, "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
    for number in range(spec.num_blocks):
        layer = f"layers.{number}"
        if number >= spec.layers:
            names += [f"{layer}.{part}" for part in ("enorm", "hnorm", "eh_proj", "shared_head", "shared_head.norm")]
        names += [layer, *(f"{layer}.{norm}" for norm in norm_names(spec.block.norm)), f"{layer}.self_attn"]
        names += [f"{layer}.self_attn.{part}" for part in attention]
        feed_forward = list(FEED_FORWARD)
        if (experts := spec.layer(number).experts) is not None:
            shared = ["shared_expert", *(f"shared_expert.{part}" for part in FEED_FORWARD)]
            feed_forward = ["gate", "experts", *(shared if experts.shared_ffn else [])]
            feed_forward += ["shared_expert_gate"] * experts.shared_gate
        names += [f"{layer}.mlp", *(f"{layer}.mlp.{part}" for part in feed_forward)]
    return names


def matches_module(name: str, pattern: str) -> bool:
    """Return whether the pattern matches, component by component; a star matches within one component."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and name != "" and all(map(fnmatchcase, parts, wanted))


def is_named(name: str, pattern: str) -> bool:
    """Return whether the last part of a module's name, or the whole name, matches. A star stays within one part."""
    return matches_module(name, pattern) if "." in pattern else fnmatchcase(name.rpartition(".")[2], pattern)


def linear_names(spec: Spec) -> list[str]:
    """Return the names of the linear layers of the network that can have an adapter."""
    return [name for name in module_names(spec) if name.rpartition(".")[2] in LINEAR]


def linear_sizes(spec: Spec) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of each of these layers."""
    return {name: _sizes(spec, name) for name in linear_names(spec)}


def _sizes(spec: Spec, name: str) -> tuple[int, int]:
    part = name.rpartition(".")[2]
    if spec.vision is not None:
        tower, _, rest = name.partition(".")
        if tower == "language":
            return _sizes(spec.language, rest)
        middle = spec.projector_middle
        ends = {"linear_1": (spec.feature_width, middle), "linear_2": (middle, spec.hidden)}
        hidden, ffn = spec.vision.hidden, spec.vision.ffn
        return ends.get(part) or _block_sizes(part, hidden, (hidden, hidden), ffn)
    decoder = spec.language
    assert decoder is not None, "a perception model has no adapter"
    if part == "lm_head":
        return decoder.hidden, decoder.vocab
    if (latent := decoder.block.attention.latent) is not None and ".self_attn." in name:
        queries = decoder.heads * latent.head_dim
        return {
            "q_proj": (decoder.hidden, queries),
            "q_a_proj": (decoder.hidden, latent.query_rank),
            "q_b_proj": (latent.query_rank, queries),
            "kv_a_proj_with_mqa": (decoder.hidden, latent.kv_rank + latent.rope_dim),
            "kv_b_proj": (latent.kv_rank, decoder.heads * (latent.nope_dim + latent.value_dim)),
            "o_proj": (decoder.heads * latent.value_dim, decoder.hidden),
        }[part]
    experts = decoder.layer(int(name.split(".")[1])).experts
    widths = decoder.heads * decoder.head_dim, decoder.kv_heads * decoder.head_dim
    return _block_sizes(part, decoder.hidden, widths, experts.shared_ffn if experts else decoder.ffn)


def _block_sizes(part: str, hidden: int, widths: tuple[int, int], ffn: int) -> tuple[int, int]:
    """Return inputs and outputs of a linear layer of a block; `widths` are those of all queries and of all keys."""
    queries, keys = widths
    outputs = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "gate_proj": ffn, "up_proj": ffn}
    return (hidden, outputs[part]) if part in outputs else ({"o_proj": queries, "down_proj": ffn}[part], hidden)


def refuse_unmatched(patterns: Iterable[str], names: Sequence[str]) -> None:
    """Raise for the first pattern of `train.precision` that matches none of these module names."""
    for pattern in patterns:
        if not any(matches_module(name, pattern) for name in names):
            raise UserError(
                "P033.no-module-called",
                where="train.precision",
                pattern=pattern,
                guess=did_you_mean(pattern, names),
                next=next(iter(names)),
            )
