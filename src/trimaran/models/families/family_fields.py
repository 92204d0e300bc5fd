"""What an architecture of Hugging Face needs, and the fields of config.json that several have in common.

A field that is read and written alike is a row: its name in config.json, the attribute, and the default of
transformers.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import fields as fields_of
from typing import Any

from trimaran.models.config_fields import Fields, bad_field, show
from trimaran.models.families.disk_parts import PartsOf, plain_parts
from trimaran.models.spec import Block, ExpertSpec, LongRope, ModelSpec, Rope, RouterSpec, Yarn, repeated_part
from trimaran.models.validate_spec import MOST_LAYERS

HF_NAMES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "rope.theta": "rope_theta",
    "rope.original_max_seq_len": "rope.original_max_position_embeddings",
    "experts.num_experts": "num_experts",
    "experts.top_k": "num_experts_per_tok",
    "experts.ffn": "moe_intermediate_size",
    "experts.shared_ffn": "shared_expert_intermediate_size",
    "experts.balance": "router_aux_loss_coef",
    "experts.z_loss": "router_z_loss_coef",
    "experts.capacity": "expert_capacity_factor",
}
# Features that our decoder lacks in every architecture, with the values that switch them off.
OFF: dict[str, tuple[Any, ...]] = {"attention_dropout": (None, 0), "quantization_config": (None,)}
ROPE_KINDS = ("default", "llama3", "linear", "yarn")
_LLAMA_3_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor")
_YARN_NUMBERS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
FULL, SLIDING = "full_attention", "sliding_attention"

Row = tuple[str, str, Any]  # without a default the field is a whole number that config.json must have
# transformers ignores and preserves these fields, which only matter for training.
Z_LOSS, CAPACITY, CORRECTION_RATE = "router_z_loss_coef", "expert_capacity_factor", "router_bias_update_rate"
EXTRA_LOSSES: tuple[Row, ...] = ((Z_LOSS, "z_loss", 0.0), (CAPACITY, "capacity", 0.0))
SHARED_EXPERTS: tuple[Row, ...] = (
    ("n_routed_experts", "num_experts", None),
    ("num_experts_per_tok", "top_k", None),
    ("moe_intermediate_size", "ffn", None),
)
ROUTER_GROUPS: tuple[Row, ...] = (("n_group", "groups", 1), ("topk_group", "top_groups", 1))
SCALE: Row = ("routed_scaling_factor", "scale", 1.0)


def rope_lacks(config: Mapping[str, Any], *, partial: bool = False, kinds: tuple[str, ...] = ROPE_KINDS) -> str:
    """Return what the decoder lacks of rotary positions, or an empty text. `partial`: heads may be rotated in part."""
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
    scaling, theta = _rope_fields(fields, theta)
    return read_scaling(scaling, theta, max_seq_len)


def _rope_fields(fields: Fields, theta: float) -> tuple[Fields, float]:
    tree = rope_tree(fields.config)
    theta = Fields({**fields.config, **tree}, fields.where).number("rope_theta", default=theta)
    return Fields(tree, f"{fields.where} (rotary positions)"), theta


def read_scaling(fields: Fields, theta: float, max_seq_len: int) -> Rope:
    """Return the rotary positions with the scaling that `fields` describe."""
    original = fields.integer("original_max_position_embeddings", default=max_seq_len)
    match rope_kind(fields.config):
        case "llama3":
            numbers: dict[str, Any] = {name: fields.number(name) for name in _LLAMA_3_NUMBERS}
            return Rope(theta=theta, original_max_seq_len=original, **numbers)
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
    scaling, theta = _rope_fields(fields, 10_000.0)
    original = scaling.size("original_max_position_embeddings", default=original)
    factor = scaling.number("factor", default=max_seq_len / original)
    factors: dict[str, Any] = {}
    for name in ("short_factor", "long_factor"):
        values = scaling.config.get(name)
        if not isinstance(values, list) or not all(type(each) in (int, float) and 0 < each < 1e300 for each in values):
            raise bad_field(name, f"{show(values)} is not a list of positive numbers", scaling.where)
        factors[f"{name}s"] = tuple(float(each) for each in values)
    longrope = LongRope(**factors, attention_factor=scaling.number("attention_factor", default=0.0))
    return Rope(theta=theta, factor=factor, original_max_seq_len=original, scaling="longrope", longrope=longrope)


def rotary_dim(fields: Fields, head_dim: int, default: float = 1.0) -> int:
    """Return how many features of a head are rotated, 0 for all of them."""
    tree = {**fields.config, **rope_tree(fields.config)}
    width = int(head_dim * Fields(tree, fields.where).number("partial_rotary_factor", default=default))
    return 0 if width == head_dim else width


def write_scaling(rope: Rope) -> dict[str, Any] | None:
    """Return `rope_scaling`; None without scaling."""
    original = {"original_max_position_embeddings": rope.original_max_seq_len}
    if rope.longrope is not None:
        factors = {"short_factor": list(rope.longrope.short_factors), "long_factor": list(rope.longrope.long_factors)}
        own = {"attention_factor": rope.longrope.attention_factor} if rope.longrope.attention_factor else {}
        return {"rope_type": "longrope", "factor": rope.factor, **factors, **own} | original
    if rope.factor == 1:
        return None
    match rope.scaling:
        case "linear":
            return {"rope_type": "linear", "factor": rope.factor}
        case "yarn":
            yarn = rope.yarn or Yarn()
            numbers = {name: getattr(yarn, name) for name in _YARN_NUMBERS if getattr(yarn, name)}
            return {"rope_type": "yarn", "factor": rope.factor, **numbers, "truncate": yarn.truncate} | original
        case _:
            numbers = {name: getattr(rope, name) for name in _LLAMA_3_NUMBERS}
            return {"rope_type": "llama3", **numbers} | original


def rope_tree(config: Mapping[str, Any]) -> Any:
    """Return the rotary settings from where transformers 5 writes them, or from where 4 does."""
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def rope_kind(tree: Mapping[str, Any]) -> Any:
    return tree.get("rope_type") or tree.get("type") or "default"


def layer_types_lack(config: Mapping[str, Any]) -> str:
    """Return the layer types if the decoder lacks one of them; an empty string if not."""
    types = config.get("layer_types") or []
    known = isinstance(types, list) and all(each in (FULL, SLIDING) for each in types)
    return "" if known else f"layer_types is {show(types)}"


def read_windows(fields: Fields, window: int, sliding: Sequence[bool]) -> tuple[int, ...]:
    """Return the layers' windows up to where they repeat. `sliding`: which have it, unless `layer_types` says so."""
    types, layers = fields.config.get("layer_types"), len(sliding)
    if types:
        if len(types) != layers:
            raise bad_field("layer_types", f"{len(types)} types for {layers} layers", fields.where)
        sliding = [each == SLIDING for each in types]
    windows = [window if each else 0 for each in sliding]
    return repeated_part(windows) if any(windows) else ()


def read_periodic_windows(fields: Fields, period: int) -> tuple[int, ...]:
    """Return the windows of the layers, of which every `period`-th, counted from 1, has none."""
    layers, window = fields.size("num_hidden_layers", most=MOST_LAYERS), fields.size("sliding_window", default=4096)
    return read_windows(fields, window, [(number + 1) % period != 0 for number in range(layers)])


def written_types(spec: ModelSpec) -> dict[str, Any]:
    """Return `layer_types`, and the window: the only one, or one that no layer has."""
    windows = [spec.layer(number).window for number in range(spec.layers)]
    return {
        "layer_types": [FULL if each is None else SLIDING for each in windows],
        "sliding_window": max((each for each in windows if each is not None), default=None),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture of Hugging Face.

    `positions` are those of a config.json that does not say, or that says fewer than in `more_positions`. `norm` is the
    field of the norms' epsilon, with its default. `usual` are defaults of other fields. `block` returns the fields of a
    Block in which the architecture differs from Llama, and `finish` what differs outside of it; a field with an
    impossible value raises. `write` and `write_experts` return the fields of config.json beyond those that all
    architectures have: what `read` makes of the result must be the same spec, or the architecture cannot express it.
    `off` are features that the decoder lacks in this architecture, with the values that switch them off; `lacks`
    returns any other such feature, or an empty string. `extra_layers`: folders may have layers after the last one,
    which predict later tokens (MTP). They are read if the recipe trains them.
    """

    architecture: str
    positions: int
    block: Callable[[Fields, int], dict[str, Any]]
    off: Mapping[str, tuple[Any, ...]]
    more_positions: str = ""
    norm: tuple[str, float] = ("rms_norm_eps", 1e-6)
    usual: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = False
    finish: Callable[[Fields, ModelSpec], ModelSpec] = lambda _, spec: spec
    write: Callable[[ModelSpec], dict[str, Any]] = lambda _: {}
    write_experts: Callable[[ModelSpec, ExpertSpec], dict[str, Any]] = lambda _, __: {}
    lacks: Callable[[Mapping[str, Any]], str] = rope_lacks
    parts: PartsOf = plain_parts
    extra_layers: bool = False

    def read(self, fields: Fields) -> ModelSpec:
        """Return the spec that config.json describes."""
        fields = fields.assuming(self.usual)
        max_seq_len = fields.integer("max_position_embeddings", default=self.positions)
        if self.more_positions:
            max_seq_len = max(max_seq_len, fields.integer(self.more_positions, default=0))
        name, usual = self.norm
        own: dict[str, Any] = {"norm_eps": fields.number(name, default=usual), **self.block(fields, max_seq_len)}
        block = Block(**own if "rope" in own else own | {"rope": read_rope(fields, max_seq_len)})
        heads, kind = fields.integer("num_attention_heads"), fields.word("model_type", default="")
        spec = ModelSpec(
            name=kind,
            family=kind,
            layers=fields.integer("num_hidden_layers"),
            hidden=fields.integer("hidden_size"),
            heads=heads,
            kv_heads=fields.integer("num_key_value_heads", default=heads),
            head_dim=read_head_dim(fields),
            ffn=fields.integer("intermediate_size", default=0 if block.experts else None),
            vocab=fields.integer("vocab_size"),
            max_seq_len=max_seq_len,
            tied=fields.boolean("tie_word_embeddings", default=self.tied),
            block=block,
        )
        return self.finish(fields, spec)

    def config(self, kind: str, spec: ModelSpec) -> dict[str, Any]:
        """Return config.json, with the `model_type` kind. The ids of special tokens belong to the tokenizer."""
        experts, rope = spec.block.experts, spec.block.rope
        return {
            "architectures": [self.architecture],
            "model_type": kind,
            **{HF_NAMES[each.name]: getattr(spec, each.name) for each in fields_of(spec) if each.name in HF_NAMES},
            "head_dim": spec.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": spec.block.norm_eps,
            "tie_word_embeddings": spec.tied,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            # As transformers 4 has them and 5 still reads them.
            "rope_theta": rope.theta,
            "rope_scaling": write_scaling(rope),
            **({"partial_rotary_factor": rope.rotary_dim / spec.head_dim} if rope.rotary_dim else {}),
            **self.write(spec),
            **(self.write_experts(spec, experts) if experts else {}),
        }


def read_rows(fields: Fields, rows: Iterable[Row]) -> dict[str, Any]:
    """Return the attributes of these rows; a default says what type a field has."""
    found: dict[str, Any] = {}
    for name, attribute, usual in rows:
        if isinstance(usual, bool):
            found[attribute] = fields.boolean(name, default=usual)
        else:
            found[attribute] = (fields.number if isinstance(usual, float) else fields.integer)(name, default=usual)
    return found


def write_rows(value: object, rows: Iterable[Row]) -> dict[str, Any]:
    """Return the fields of config.json that `read_rows` reads."""
    return {name: getattr(value, attribute) for name, attribute, _ in rows}


def read_head_dim(fields: Fields) -> int:
    """Return the width of a head, which is the hidden size divided by the heads if config.json does not say."""
    if width := fields.integer("head_dim", default=0):
        return width
    return fields.divided(fields.integer("hidden_size"), fields.integer("num_attention_heads"))


def local_experts(usual: int | None, top_k: int) -> tuple[Row, ...]:
    """Return the rows of Mixtral, GPT-OSS and Llama-4, whose experts have the width of the feed-forward."""
    count: Row = ("num_local_experts", "num_experts", usual)
    return ("intermediate_size", "ffn", None), count, ("num_experts_per_tok", "top_k", top_k)


def read_experts(fields: Fields, rows: Iterable[Row], **own: Any) -> ExpertSpec:
    # The coefficient becomes the weight of our per-sequence balance loss, unchanged.
    losses = (("router_aux_loss_coef", "balance", 0.001), *EXTRA_LOSSES)
    return ExpertSpec(**own, **read_rows(fields, rows), **read_rows(fields, losses))


def write_losses(experts: ExpertSpec, *, name: str = "router_aux_loss_coef") -> dict[str, Any]:
    """Return the fields of config.json about the losses of experts; those that are off are left out."""
    extras = write_rows(experts, EXTRA_LOSSES)
    return {name: experts.balance} | {key: value for key, value in extras.items() if value}


def read_corrected_experts(fields: Fields) -> ExpertSpec:
    """Return the experts of DeepSeek-V3 and GLM-4.5: shared ones, sigmoid scores, groups, and a correction bias."""
    rate: Row = (CORRECTION_RATE, "correction_rate", 0.001)  # DeepSeek-V3's
    own = read_rows(fields, (*ROUTER_GROUPS, SCALE, rate))
    group_top = 2 if own["groups"] > own["top_groups"] else 1
    router = RouterSpec(scoring="sigmoid", correction=True, group_top=group_top, **own)
    normalize = fields.boolean("norm_topk_prob", default=True)
    return read_shared_experts(fields, router, balance=0.0001, normalize=normalize)


def read_shared_experts(fields: Fields, router: RouterSpec, *, balance: float, normalize: bool) -> ExpertSpec:
    """Return the experts of DeepSeek and GLM: shared ones as wide as the others, and some dense layers first."""
    sizes, losses = read_rows(fields, SHARED_EXPERTS), (("aux_loss_alpha", "balance", balance), *EXTRA_LOSSES)
    layers, dense = fields.integer("num_hidden_layers"), fields.integer("first_k_dense_replace", default=0)
    return ExpertSpec(
        **sizes,
        shared_ffn=sizes["ffn"] * fields.integer("n_shared_experts", default=0),
        normalize_top_k=normalize,
        router=router,
        dense_layers=tuple(range(min(layers, dense))),
        **read_rows(fields, losses),
    )


def write_shared_experts(experts: ExpertSpec) -> dict[str, Any]:
    """Return the fields of config.json that `read_shared_experts` and `read_corrected_experts` read."""
    return write_losses(experts, name="aux_loss_alpha") | {
        **write_rows(experts, SHARED_EXPERTS),
        "n_shared_experts": experts.shared_ffn // experts.ffn,
        "norm_topk_prob": experts.normalize_top_k,
        **write_rows(experts.router, (SCALE, *ROUTER_GROUPS)),
        "first_k_dense_replace": len(experts.dense_layers),
        CORRECTION_RATE: experts.router.correction_rate,
    }
