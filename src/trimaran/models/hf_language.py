"""The outline of any Hugging Face decoder, from the language part of a config.json."""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby
from typing import Any

from trimaran.models.config_fields import Fields, bad_field, show, unknown_network
from trimaran.models.outline import Latent, LayerOperators, OutlineLayer, Tower
from trimaran.models.spec import ExpertSpec
from trimaran.models.validate_spec import MOST_LAYERS

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k")
WIDTH = ("moe_intermediate_size", "expert_intermediate_size")
# What a field is probably called that no known family has. Names that say more, as a size or a group, are not meant.
LIKE_TOP_K = re.compile(r"top_?k|per_?tok|activ|selected", re.IGNORECASE)
LIKE_EXPERTS = re.compile(r"experts?$|^(num|n|nr)_.*experts?|experts?_(count|num|number)$", re.IGNORECASE)
OTHER_MEANING = re.compile(r"shared|size|dim|layer|group|capacity|parallel|redundant", re.IGNORECASE)
ASSUMED_TOP_K = 2
WITHOUT_DEFAULT = ("deepseek_v2",)  # transformers has no default of their top_k, and fails in the first step

log = logging.getLogger(__name__)


def experts_of(fields: Fields, ffn: int) -> ExpertSpec | None:
    """Return the experts of a layer with experts, `ffn` wide by default; None if the model is dense.

    They are for the prediction alone, so an unknown name is guessed with a warning and not refused.
    """
    listed = {}
    for name in (*EXPERTS, *TOP_K, *WIDTH):
        values = fields.config.get(name)
        if isinstance(values, list) and values and all(type(each) is int for each in values):
            listed[name] = max(values)
            if min(values) != max(values):
                _warn(f"{fields.where}: {name} differs between layers; all are predicted with {max(values)}")
    fields = replace(fields, config={**fields.config, **listed})
    numbers = [
        (name, value)
        for name, value in fields.config.items()
        if type(value) is int and value > 0 and isinstance(name, str) and not OTHER_MEANING.search(name)
    ]
    # A known name wins, even if it is null.
    if fields.has(*EXPERTS) or any(name in fields.config for name in EXPERTS):
        count = fields.size(*EXPERTS, default=0, least=0)
    else:
        found = [each for each in numbers if LIKE_EXPERTS.search(each[0]) and not LIKE_TOP_K.search(each[0])]
        found = [(name, value) for name, value in found if value > 1]
        count = found[0][1] if len(found) == 1 else 0
        names = ", ".join(name for name, _ in found)
        if count:
            _warn(f"{fields.where}: {names} is read as the number of experts, and the prediction depends on it")
        elif found:
            _warn(f"{fields.where}: it is not known which field is the number of experts ({names}); predicted as dense")
    if count < 2:
        return None
    if fields.word("model_type", default="") in WITHOUT_DEFAULT or fields.has(*TOP_K):
        top_k = fields.size(*TOP_K, most=count)
    else:
        moe = re.compile("expert|moe|rout", re.IGNORECASE)
        found = [(name, value) for name, value in numbers if LIKE_TOP_K.search(name) and moe.search(name)]
        found = [(name, value) for name, value in found if value <= count]
        top_k = found[0][1] if len(found) == 1 else min(ASSUMED_TOP_K, count)
        guess = f"no known field gives the experts of a token; the time is predicted for {top_k} of {count}"
        if len(found) == 1:
            guess = f"{found[0][0]} is read as the experts of a token, and the prediction depends on it"
        _warn(f"{fields.where}: {guess}")
    width = fields.size(*WIDTH, default=ffn)
    gated = fields.size("shared_expert_intermediate_size", default=0, least=0)
    return ExpertSpec(
        num_experts=count,
        top_k=top_k,
        ffn=width,
        shared_ffn=gated or width * fields.size("n_shared_experts", "num_shared_experts", default=0, least=0),
        shared_gate=gated > 0,
    )


@cache
def _warn(text: str) -> None:
    """Log the warning once in a process: a config is read several times."""
    log.warning("%s", text)


HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads")
FFN = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff")
VOCAB = ("vocab_size", "n_vocab")
CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length", "n_ctx")
# Fields by which families scale or cap the logits before the loss; null means not at all.
LOGIT_SCALING_FIELDS = (
    "final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap", "logit_scale", "logits_scaling",
    "lm_head_multiplier", "output_multiplier",
)  # fmt: skip
LOGIT_SCALING_FAMILIES = ("cohere", "granite", "hyperclovax")  # these always scale them, if only by 1
# Families that transformers (5.22) has no SDPA for: their own attention keeps the scores of every layer. HF_LAUNCHES.
EAGER_FAMILIES = frozenset({"bloom", "codegen", "gpt_neo", "gpt_neox_japanese", "gptj", "mpt", "openai-gpt", "xglm"})
# Families whose linear attention (the gated delta rule) has an outline, and the tokens of one of its chunks.
LINEAR_FAMILIES, LINEAR_CHUNK = ("qwen3_next",), 64
EAGER_ATTENTION = LayerOperators(launches=150, keeps_scores=True)
NEEDED = {"width": HIDDEN, "layers": LAYERS, "heads": HEADS, "vocabulary": VOCAB}

Switch = bool | str


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyTraits:
    """What all sizes of a decoder family have in common.

    A bias is True, False, or the name of the field that switches it on. `norms` counts those of each layer; `shifted`
    norms have a bias. `learned` is how many rows a position table has beyond the longest sequence; None is no table.
    `usual` holds the defaults of the family's configuration class.
    """

    gated: bool = True
    norms: int = 2
    shifted: bool = False
    head_norms: bool = False
    qkv_bias: Switch = "attention_bias"
    out_bias: Switch = "attention_bias"
    ffn_bias: Switch = "mlp_bias"
    head_bias: bool = False
    stem_norm: bool = False
    learned: int | None = None
    tied: bool = False
    usual: Mapping[str, Any] = field(default_factory=dict)


_LLAMA_7B = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008}
_MISTRAL_7B = {**_LLAMA_7B, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000}
_QWEN = {**_LLAMA_7B, "intermediate_size": 22016, "vocab_size": 151936, "use_sliding_window": False}
_QWEN_2_MOE = {
    "decoder_sparse_step": 1, "use_sliding_window": False, "moe_intermediate_size": 1408, "num_experts": 60,
    "num_experts_per_tok": 4, "shared_expert_intermediate_size": 5632,
}  # fmt: skip
_QWEN_2_VL = {
    "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "intermediate_size": 29568, "vocab_size": 152064, "use_sliding_window": False,
}  # fmt: skip
_GEMMA = {
    "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 24576,
    "head_dim": 256, "vocab_size": 256000,
}  # fmt: skip
_GEMMA_2 = {
    "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 9216, "head_dim": 256, "vocab_size": 256000, "sliding_window": 4096,
    "sliding_window_pattern": 2, "final_logit_softcapping": 30.0,
}  # fmt: skip
_GEMMA_3 = {**_GEMMA_2, "vocab_size": 262208, "sliding_window_pattern": 6, "final_logit_softcapping": None}
_PLAIN = FamilyTraits(gated=False, shifted=True, qkv_bias=True, out_bias=True, ffn_bias=True)  # GPT-2's block
_QWEN_2 = FamilyTraits(qkv_bias=True, out_bias=False, usual=_QWEN)
_QWEN_3 = FamilyTraits(head_norms=True, usual={**_QWEN, "head_dim": 128, "num_key_value_heads": 32})
_QWEN_3_MOE = FamilyTraits(head_norms=True, usual={"use_sliding_window": False})
_QWEN_3_MOE_SIZES = {
    "use_sliding_window": False, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
}  # fmt: skip

FAMILY_TRAITS: dict[str, FamilyTraits] = {
    "llama": FamilyTraits(usual={**_LLAMA_7B, "vocab_size": 32000}),
    "internlm2": FamilyTraits(qkv_bias="bias", out_bias="bias", ffn_bias=False),
    "mistral": FamilyTraits(usual={**_MISTRAL_7B, "sliding_window": 4096}),
    "mixtral": FamilyTraits(usual={**_MISTRAL_7B, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen2": _QWEN_2,
    "qwen2_vl_text": replace(_QWEN_2, usual=_QWEN_2_VL),
    "qwen2_5_vl_text": replace(_QWEN_2, usual=_QWEN_2_VL),
    "qwen2_moe": FamilyTraits(qkv_bias="qkv_bias", out_bias=False, usual={**_QWEN_2_MOE, "qkv_bias": True}),
    "qwen3": _QWEN_3,
    "qwen3_vl_text": _QWEN_3,
    "qwen3_moe": replace(_QWEN_3_MOE, usual=_QWEN_3_MOE_SIZES),
    "qwen3_vl_moe_text": _QWEN_3_MOE,
    "gemma": FamilyTraits(tied=True, usual=_GEMMA),
    "gemma2": FamilyTraits(norms=4, tied=True, usual=_GEMMA_2),
    "gemma3_text": FamilyTraits(norms=4, head_norms=True, tied=True, usual=_GEMMA_3),
    "phi3": FamilyTraits(ffn_bias=False, qkv_bias=False, out_bias=False),
    "phi": replace(_PLAIN, norms=1, head_bias=True),
    "deepseek_v2": FamilyTraits(usual={"moe_layer_freq": 1}),
    "deepseek_v3": FamilyTraits(usual={"moe_layer_freq": 1}),
    "olmo2": FamilyTraits(),
    "gpt_oss": FamilyTraits(usual={"attention_bias": True, "sliding_window": 128, "sliding_window_pattern": 2}),
    "gpt2": replace(_PLAIN, learned=0, tied=True, usual={"n_positions": 1024}),
    "gpt_neox": replace(_PLAIN, qkv_bias="attention_bias", out_bias="attention_bias", usual={"attention_bias": True}),
    "gptj": replace(_PLAIN, norms=1, qkv_bias=False, out_bias=False, head_bias=True),
    "opt": replace(
        _PLAIN, qkv_bias="enable_bias", out_bias="enable_bias", ffn_bias="enable_bias", learned=2, tied=True,
        usual={"enable_bias": True, "max_position_embeddings": 2048},
    ),
    "falcon": replace(_PLAIN, qkv_bias="bias", out_bias="bias", ffn_bias="bias", tied=True),
    "bloom": replace(_PLAIN, stem_norm=True, tied=True),
    "mpt": FamilyTraits(gated=False, qkv_bias=False, out_bias=False, ffn_bias=False, tied=True),
    "starcoder2": replace(
        _PLAIN, qkv_bias="use_bias", out_bias="use_bias", ffn_bias="use_bias", tied=True, usual={"use_bias": True}
    ),
    "qwen3_next": FamilyTraits(
        head_norms=True,
        usual={
            "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512, "head_dim": 256, "num_key_value_heads": 2,
        },
    ),
    "hunyuan_v1_moe": FamilyTraits(head_norms=True, usual={"n_shared_experts": 1}),
    "glm": FamilyTraits(out_bias=False, usual={"attention_bias": True, "head_dim": 128, "num_key_value_heads": 2}),
    "glm4": FamilyTraits(
        norms=4, out_bias=False, usual={"attention_bias": True, "head_dim": 128, "num_key_value_heads": 2}
    ),
    "cohere": FamilyTraits(norms=1, tied=True),
    "cohere2": FamilyTraits(norms=1, tied=True, usual={"sliding_window": 4096, "sliding_window_pattern": 4}),
}  # fmt: skip

# Sizes belong to one model and not to its family: only a nested config may leave them out.
_SIZES = {*HIDDEN, *LAYERS, *HEADS, *FFN, *VOCAB}


def language_tower(fields: Fields, *, tied: bool | None = None, nested: bool = False) -> Tower:
    """Return the decoder that `fields` describe. `tied` overrides what they say about the head.

    An unknown family is treated like Llama, or like GPT-2 if it has GPT-2's norms.
    """
    kind = fields.word("model_type", default="")
    traits = FAMILY_TRAITS.get(kind) or _guess(fields)
    usual = {name: value for name, value in traits.usual.items() if nested or name not in _SIZES}
    fields = fields.assuming(usual)
    if kind in _ODD_FIELDS:
        fields, traits = _ODD_FIELDS[kind](fields, traits)
    if fields.boolean("is_encoder_decoder", default=False):
        raise unknown_network(f"{kind or 'the model'} is an encoder and a decoder", fields.where,
                              fix="train it in your own loop with trimaran.prepare")  # fmt: skip
    if missing := fields.missing(NEEDED | {"feed-forward": FFN} if traits.gated else NEEDED):
        raise unknown_network(f"it lacks {', '.join(missing)}", fields.where)
    types = fields.config.get("layer_types") or []
    known = ("full_attention", "sliding_attention", "chunked_attention")
    known += ("linear_attention",) if kind in LINEAR_FAMILIES else ()
    for each in types if isinstance(types, list) else [types]:
        if each not in known:
            raise unknown_network(f"a layer of the type {show(each)} has no outline yet", fields.where)
    layers = fields.size(*LAYERS, most=MOST_LAYERS)
    layer = replace(_layer(fields, traits), operators=EAGER_ATTENTION if kind in EAGER_FAMILIES else None)
    # Parameters of a layer that are in no matmul: norms and biases, of which a layer with experts has fewer.
    width, keys = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    extras = traits.norms * layer.hidden * (1 + traits.shifted) + 2 * layer.head_dim * traits.head_norms
    biases = width + 2 * keys
    if latent := layer.latent:
        extras += latent.query_rank + latent.kv_rank
        biases = latent.query_rank + latent.kv_rank + latent.rope_dim
    extras += biases * is_on(traits.qkv_bias, fields) + layer.hidden * is_on(traits.out_bias, fields)
    extras += (width + keys) * (kind == "olmo2")  # norms over all heads
    extras += layer.heads * (kind == "gpt_oss")  # an attention sink of each head
    experts = experts_of(fields, layer.ffn)
    windows, sparse = _windows(fields, layers), _sparse(fields, layers) if experts else [False] * layers
    blocks = []
    for window, mixed in zip(windows, sparse, strict=True):
        if mixed and experts:  # GPT-OSS has biases of the router and of every expert
            own = experts.num_experts * (1 + 2 * experts.ffn + layer.hidden) * (kind == "gpt_oss")
            blocks.append(replace(layer, window=window, experts=experts, extras=extras + own))
        else:
            own = (layer.ffn * (layer.matrices - 1) + layer.hidden) * is_on(traits.ffn_bias, fields)
            blocks.append(replace(layer, window=window, extras=extras + own))
    if kind in LINEAR_FAMILIES:
        blocks = [_next_layer(block, fields, number) for number, block in enumerate(blocks)]
    vocab, norm = fields.size(*VOCAB), layer.hidden * (1 + traits.shifted)
    table = 0 if traits.learned is None else layer.hidden * (fields.size(*CONTEXT) + traits.learned)
    # An explicit null means that the logits are not scaled or capped, whatever the default.
    scales = (fields.config.get(name, fields.usual.get(name)) for name in LOGIT_SCALING_FIELDS)
    scales_logits = kind.startswith(LOGIT_SCALING_FAMILIES) or any(each is not None for each in scales)
    if tied is None:
        tied = fields.boolean("tie_word_embeddings", default=traits.tied)
    return Tower(
        name="language",
        runs=tuple((block, len(list(run))) for block, run in groupby(blocks)),
        hidden=layer.hidden,
        vocab=vocab,
        outputs=vocab,
        bare_head=not traits.head_bias and not scales_logits,
        tied=tied,
        extras=norm * (1 + traits.stem_norm) + table + vocab * traits.head_bias,
    )


def longest(fields: Fields) -> int:
    """Return the longest sequence that the configuration allows; 0 if it gives none."""
    kind = fields.word("model_type", default="")
    usual = FAMILY_TRAITS[kind].usual if kind in FAMILY_TRAITS else {}
    return fields.assuming(usual).size(*CONTEXT, default=0, least=0)


def _layer(fields: Fields, traits: FamilyTraits) -> OutlineLayer:
    """Return a layer without its window, experts and small parameters, which are added later."""
    hidden, heads = fields.size(*HIDDEN), fields.size(*HEADS)
    latent = None
    if fields.has("kv_lora_rank"):
        latent = Latent(
            query_rank=fields.size("q_lora_rank", default=0, least=0),
            kv_rank=fields.size("kv_lora_rank"),
            rope_dim=fields.size("qk_rope_head_dim"),
            value_dim=fields.size("v_head_dim"),
        )
        kv_heads, head_dim = heads, fields.size("qk_nope_head_dim") + latent.rope_dim
    else:
        kv_heads = fields.size(*KV_HEADS, default=heads)
        head_dim = fields.size("head_dim", default=0, least=0) or fields.divided(hidden, heads)
    if heads % kv_heads:
        raise bad_field("num_key_value_heads", f"{kv_heads} key-value heads do not divide {heads} heads", fields.where)
    ffn = fields.size(*FFN, default=None if traits.gated else 4 * hidden)
    return OutlineLayer(
        hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim, ffn=ffn, gated=traits.gated, latent=latent,
        qk_norm=traits.head_norms,
    )  # fmt: skip


def is_on(switch: Switch, fields: Fields) -> bool:
    return fields.boolean(switch, default=False) if isinstance(switch, str) else switch


def _sparse(fields: Fields, layers: int) -> list[bool]:
    """Return which layers have experts, under any family's field names."""
    types = fields.config.get("mlp_layer_types")
    if isinstance(types, list) and len(types) == layers:
        return [each == "sparse" for each in types]
    first, every = fields.size("first_k_dense_replace", default=0, least=0), fields.size("moe_layer_freq", default=1)
    step, dense = fields.size("decoder_sparse_step", default=1), fields.numbers("mlp_only_layers")
    return [
        number >= first and number % every == 0 and (number + 1) % step == 0 and number not in dense
        for number in range(layers)
    ]


def _windows(fields: Fields, layers: int) -> list[int]:
    """Return the attention window of each layer; 0 is unlimited."""
    window = fields.size("sliding_window", "attention_chunk_size", default=0, least=0)
    nulled = fields.config.get("sliding_window", window) is None  # an explicit null differs from a missing field
    if not window or nulled or not fields.boolean("use_sliding_window", default=True):
        return [0] * layers
    types = fields.config.get("layer_types")
    if isinstance(types, list) and len(types) == layers:
        return [0 if each == "full_attention" else window for each in types]
    # Every n-th layer has full attention (Gemma), or all layers up to a given one (Qwen).
    pattern, first = fields.size("sliding_window_pattern", default=MOST_LAYERS + 1), 0
    if fields.has("max_window_layers"):
        first = fields.size("max_window_layers", least=0)
    return [window if number >= first and (number + 1) % pattern else 0 for number in range(layers)]


def _guess(fields: Fields) -> FamilyTraits:
    """Return the traits of a family that is not in the table, guessed from its fields."""
    shifted = fields.has("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon") and not fields.has("rms_norm_eps")
    activation = fields.word("hidden_act", "activation_function", "hidden_activation", default="silu")
    bias = next((name for name in ("attention_bias", "use_bias", "bias") if fields.has(name)), False)
    ffn_bias = "mlp_bias" if fields.has("mlp_bias") else bias
    return FamilyTraits(
        gated=not shifted or activation in ("silu", "swish", "swiglu"), shifted=shifted, qkv_bias=bias, out_bias=bias,
        ffn_bias=ffn_bias,
    )  # fmt: skip


def _next_layer(layer: OutlineLayer, fields: Fields, number: int) -> OutlineLayer:
    """Return a layer of Qwen3-Next: its full attention has a gate as wide as the queries, the others are linear.

    A linear layer is described as attention with a window: a token meets its chunk, and the state of each head twice,
    to read and to write it. Its projections are counted by their weights.
    """
    types = fields.config.get("layer_types")
    interval = fields.size("full_attention_interval", default=4)
    kind = types[number] if isinstance(types, list) and number < len(types) else ""
    if kind == "full_attention" or (not kind and (number + 1) % interval == 0):
        return replace(layer, extras=layer.extras + layer.hidden * layer.heads * layer.head_dim)
    heads, width = fields.size("linear_num_value_heads", default=32), fields.size("linear_value_head_dim", default=128)
    keys = fields.size("linear_num_key_heads", default=16) * fields.size("linear_key_head_dim", default=128)
    values, kernel = heads * width, fields.size("linear_conv_kernel_dim", default=4)
    weights = layer.hidden * (2 * keys + 3 * values + 2 * heads)
    linear = replace(layer, heads=heads, kv_heads=heads, head_dim=width, window=LINEAR_CHUNK + 2 * width, qk_norm=False)
    small = kernel * (2 * keys + values) + 2 * heads + width  # convolution, step and decay, norm
    extras = 2 * layer.hidden + small + weights - linear.attention_weights
    return replace(linear, extras=extras)


def _falcon(fields: Fields, traits: FamilyTraits) -> tuple[Fields, FamilyTraits]:
    """Resolve Falcon's three generations, which differ in key-value heads and norms."""
    new, heads = fields.boolean("new_decoder_architecture", default=False), fields.integer(*HEADS, default=1)
    one = fields.boolean("multi_query", default=True)
    kv_heads = fields.integer("num_kv_heads", default=heads) if new else 1 if one else heads
    parallel = fields.boolean("parallel_attn", default=True)
    norms = fields.integer("num_ln_in_parallel_attn", default=1 + new) if parallel else 2
    return replace(fields, config={**fields.config, "num_key_value_heads": kv_heads}), replace(traits, norms=norms)


def _opt(fields: Fields, traits: FamilyTraits) -> tuple[Fields, FamilyTraits]:
    width = fields.integer(*HIDDEN, default=0)
    if fields.integer("word_embed_proj_dim", default=width) != width:
        raise unknown_network("its embedding is narrower than its layers (word_embed_proj_dim)", fields.where)
    return fields, traits


def _hunyuan(fields: Fields, traits: FamilyTraits) -> tuple[Fields, FamilyTraits]:
    """Read HunYuan's experts of a token, listed for each layer. Every expert has the width of a dense layer."""
    listed = fields.config.get("moe_topk")
    config = {name: value for name, value in fields.config.items() if name != "moe_intermediate_size"}
    if isinstance(listed, list) and len(set(map(str, listed))) == 1:
        config |= {"moe_topk": listed[0]}
    return replace(fields, config=config), traits


_ODD_FIELDS: dict[str, Callable[[Fields, FamilyTraits], tuple[Fields, FamilyTraits]]] = {
    "falcon": _falcon,
    "hunyuan_v1_moe": _hunyuan,
    "opt": _opt,
}
