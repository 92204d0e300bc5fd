"""Every architecture of Hugging Face that our decoder is read from and written as, and those with experts."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from trimaran.models.config_fields import Fields, bad_field, show
from trimaran.models.families import dense_families as dense
from trimaran.models.families.disk_parts import DiskPart, Shape, renamed_parts
from trimaran.models.families.family_fields import (
    ROUTER_GROUPS,
    SCALE,
    Family,
    Row,
    layer_types_lack,
    local_experts,
    read_corrected_experts,
    read_experts,
    read_rope,
    read_rows,
    read_shared_experts,
    read_windows,
    rope_lacks,
    rope_tree,
    write_losses,
    write_rows,
    write_shared_experts,
    written_types,
)
from trimaran.models.spec import (
    AttentionSpec,
    ExpertSpec,
    ExpertUnit,
    LatentSpec,
    ModelSpec,
    RouterSpec,
    TemperatureSpec,
    repeated_part,
)
from trimaran.models.validate_spec import MOST_LAYERS

NO_JITTER: dict[str, tuple[Any, ...]] = {"router_jitter_noise": (None, 0)}


# Qwen 2, 2.5 and 3, dense and with experts.

QWEN_EXPERTS: tuple[Row, ...] = (
    ("num_experts_per_tok", "top_k", None),
    ("moe_intermediate_size", "ffn", None),
    ("norm_topk_prob", "normalize_top_k", False),
)


def _qwen_block(fields: Fields, max_seq_len: int) -> dict[str, Any]:
    kind, windows = fields.word("model_type", default=""), ()
    if fields.boolean("use_sliding_window", default=False):
        layers = fields.size("num_hidden_layers", most=MOST_LAYERS)
        first = fields.integer("max_window_layers", default=28)
        window = fields.size("sliding_window", default=4096)
        windows = read_windows(fields, window, [number >= first for number in range(layers)])
    own: dict[str, Any] = {
        "qkv_bias": kind == "qwen2" or (kind == "qwen2_moe" and fields.boolean("qkv_bias", default=True)),
        "qk_norm": kind in ("qwen3", "qwen3_moe"),
        "attention": AttentionSpec(windows=windows),
    }
    if not kind.endswith("_moe"):
        return own
    # transformers 5 writes Qwen3-MoE's number of experts under the name that its kernels use.
    count = "num_local_experts" if "num_local_experts" in fields.config else "num_experts"
    shared = kind == "qwen2_moe"
    sizes = {"num_experts": fields.integer(count)}
    sizes |= {"shared_ffn": fields.integer("shared_expert_intermediate_size")} if shared else {}
    return own | {"experts": read_experts(fields, QWEN_EXPERTS, shared_gate=shared, **sizes)}


def _written_windows(spec: ModelSpec) -> dict[str, Any]:
    return {"use_sliding_window": True, **written_types(spec)} if any(spec.block.attention.windows) else {}


def _written_qwen_experts(experts: ExpertSpec) -> dict[str, Any]:
    """Return the fields of experts that Qwen's two architectures have in common."""
    return {"num_experts": experts.num_experts, **write_rows(experts, QWEN_EXPERTS), **write_losses(experts)}


def _qwen_lacks(config: Mapping[str, Any]) -> str:
    if lacking := layer_types_lack(config):
        return lacking
    if not config.get("use_sliding_window") and "sliding_attention" in (config.get("layer_types") or []):
        return "layer_types has a window, and use_sliding_window is off"
    return rope_lacks(config)


QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    positions=32768,
    block=_qwen_block,
    off=dense.SILU | dense.NO_MLP_BIAS | dense.NO_BIAS,
    write=_written_windows,
    lacks=_qwen_lacks,
)
QWEN3 = replace(QWEN2, architecture="Qwen3ForCausalLM")
QWEN2_MOE = replace(
    QWEN2,
    architecture="Qwen2MoeForCausalLM",
    off={**QWEN2.off, "decoder_sparse_step": (None, 1), "mlp_only_layers": (None, [])},
    write=lambda _: {},
    write_experts=lambda spec, experts: {
        **_written_qwen_experts(experts),
        "shared_expert_intermediate_size": experts.shared_ffn,
        "qkv_bias": spec.block.qkv_bias,
        **_written_windows(spec),
    },
)
QWEN3_MOE = replace(
    QWEN2_MOE,
    architecture="Qwen3MoeForCausalLM",
    write_experts=lambda spec, experts: {**_written_qwen_experts(experts), **_written_windows(spec)},
)


# Mixtral: Mistral with experts in every layer.

MIXTRAL_EXPERTS = local_experts(8, top_k=2)
# The weights of a block have other names on disk, and so have those of an expert.
MIXTRAL_NAMES = {".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."}


MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    positions=131_072,
    block=lambda fields, _: {"attention": dense.one_window(fields), "experts": read_experts(fields, MIXTRAL_EXPERTS)},
    off=dense.SILU | NO_JITTER,
    norm=("rms_norm_eps", 1e-5),
    write_experts=lambda spec, experts: {
        **write_losses(experts),
        **write_rows(experts, MIXTRAL_EXPERTS),
        "sliding_window": spec.layer(0).window,
    },
    parts=partial(renamed_parts, MIXTRAL_NAMES),
)


# On disk the shared experts of DeepSeek and GLM have the plural, and the correction belongs to the gate.
SHARED_NAMES = {
    ".mlp.shared_expert.": ".mlp.shared_experts.", ".mlp.correction_bias": ".mlp.gate.e_score_correction_bias",
}  # fmt: skip


# DeepSeek-V2 and V3, and Kimi-K2, which is a DeepSeek-V3: latent attention, groups of experts, shared experts.

DEEPSEEK_LATENT: tuple[Row, ...] = (
    ("kv_lora_rank", "kv_rank", None),
    ("q_lora_rank", "query_rank", 0),
    ("qk_nope_head_dim", "nope_dim", None),
    ("qk_rope_head_dim", "rope_dim", None),
    ("v_head_dim", "value_dim", None),
    ("attention_bias", "bias", False),
)
DEEPSEEK_OFF = dense.SILU | {"moe_layer_freq": (None, 1)} | dense.NO_MLP_BIAS


def _deepseek_block(fields: Fields, max_seq_len: int, experts: ExpertSpec, *, interleaved: bool) -> dict[str, Any]:
    latent = LatentSpec(**read_rows(fields, DEEPSEEK_LATENT))
    rope = replace(read_rope(fields, max_seq_len), interleaved=interleaved, rotary_dim=latent.rope_dim)
    return {"rope": rope, "attention": AttentionSpec(latent=latent), "experts": experts}


def _deepseek_v2_block(fields: Fields, max_seq_len: int) -> dict[str, Any]:
    grouped = fields.word("topk_method", default="greedy") == "group_limited_greedy"
    router = RouterSpec(**read_rows(fields, (*ROUTER_GROUPS, SCALE) if grouped else (SCALE,)))
    experts = read_shared_experts(fields, router, balance=0.001, normalize=False)
    return _deepseek_block(fields, max_seq_len, experts, interleaved=True)


def _finished_deepseek(fields: Fields, spec: ModelSpec) -> ModelSpec:
    latent = spec.block.attention.latent
    assert latent is not None
    return replace(spec, head_dim=latent.head_dim, kv_heads=spec.heads)


def _written_deepseek(spec: ModelSpec, experts: ExpertSpec) -> dict[str, Any]:
    if (latent := spec.block.attention.latent) is None:
        return {}
    return {
        **write_shared_experts(experts),
        "head_dim": latent.rope_dim,  # as transformers writes it: all of these features are rotated
        "partial_rotary_factor": 1.0,
        "num_key_value_heads": spec.heads,
        **write_rows(latent, DEEPSEEK_LATENT),
        "q_lora_rank": latent.query_rank or None,
        "moe_layer_freq": 1,
    }


def _deepseek_lacks(config: Mapping[str, Any]) -> str:
    kv_heads = config.get("num_key_value_heads")
    if kv_heads not in (None, config.get("num_attention_heads")):
        return f"num_key_value_heads is {show(kv_heads)}, and latent attention has a key for each head"
    return rope_lacks(config)


DEEPSEEK_V3 = Family(
    architecture="DeepseekV3ForCausalLM",
    positions=4096,
    block=lambda fields, max_seq_len: _deepseek_block(
        fields,
        max_seq_len,
        read_corrected_experts(fields),
        interleaved=fields.boolean("rope_interleave", default=True),
    ),
    off=DEEPSEEK_OFF | {"scoring_func": (None, "sigmoid"), "topk_method": (None, "noaux_tc")},
    finish=_finished_deepseek,
    write_experts=lambda spec, experts: {
        **_written_deepseek(spec, experts),
        "rope_interleave": spec.block.rope.interleaved,
        "num_nextn_predict_layers": spec.prediction_layers,
    },
    lacks=_deepseek_lacks,
    parts=partial(renamed_parts, SHARED_NAMES),
    extra_layers=True,
)
DEEPSEEK_V2 = replace(
    DEEPSEEK_V3,
    architecture="DeepseekV2ForCausalLM",
    positions=2048,
    block=_deepseek_v2_block,
    off=DEEPSEEK_OFF
    | {
        "scoring_func": (None, "softmax"),
        "topk_method": (None, "greedy", "group_limited_greedy"),
        "norm_topk_prob": (None, False),  # transformers ignores it here, and DeepSeek's own code does not
    },
    write_experts=lambda spec, experts: {
        **_written_deepseek(spec, experts),
        "topk_method": "group_limited_greedy" if experts.router.groups > 1 else "greedy",
    },
    extra_layers=False,
)
KIMI_K2 = replace(  # transformers loads it as a DeepSeek-V3
    DEEPSEEK_V3, finish=lambda fields, spec: replace(_finished_deepseek(fields, spec), family="deepseek_v3")
)


# GLM-4.5: grouped attention with partial rotary positions, and DeepSeek-V3's experts.

GLM4_MOE = Family(
    architecture="Glm4MoeForCausalLM",
    positions=131_072,
    block=lambda fields, max_seq_len: {
        "qkv_bias": fields.boolean("attention_bias", default=False),
        "qk_norm": fields.boolean("use_qk_norm", default=False),
        "rope": dense.half_rotated(fields, max_seq_len),
        "experts": read_corrected_experts(fields),
    },
    off=dense.SILU,
    norm=("rms_norm_eps", 1e-5),
    write_experts=lambda spec, experts: {
        **write_shared_experts(experts),
        **dense.written_bias(spec),
        "use_qk_norm": spec.block.qk_norm,
        **dense.written_rotation(spec),
        "num_nextn_predict_layers": spec.prediction_layers,
    },
    lacks=dense.partly_rotated_lacks,
    parts=partial(renamed_parts, SHARED_NAMES),
    extra_layers=True,
)


# GPT-OSS: sinks, windows in every other layer, and experts with biases and a clamped SwiGLU.

# What transformers assumes if config.json has no settings of rotary positions.
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
    "rope_theta": 150_000.0,
}
GPT_OSS_EXPERTS = local_experts(None, top_k=4)
GPT_OSS_UNIT: tuple[Row, ...] = (("swiglu_limit", "limit", 7.0), ("swiglu_alpha", "alpha", 1.702))


def _gpt_oss_block(fields: Fields, max_seq_len: int) -> dict[str, Any]:
    bias = fields.boolean("attention_bias", default=True)
    window, layers = fields.integer("sliding_window", default=0), fields.integer("num_hidden_layers")
    windows = read_windows(fields, window, [number % 2 == 0 for number in range(layers)])
    unit = ExpertUnit(bias=True, **read_rows(fields, GPT_OSS_UNIT))
    experts = read_experts(fields, GPT_OSS_EXPERTS, router=RouterSpec(bias=True), unit=unit)
    return {
        "qkv_bias": bias,
        "rope": read_rope(replace(fields, config=_with_rope(fields.config)), max_seq_len),
        "attention": AttentionSpec(out_bias=bias, sinks=True, windows=windows),
        "experts": experts,
    }


def _with_rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config if rope_tree(config) else {**config, "rope_parameters": GPT_OSS_ROPE}


def _written_gpt_oss(spec: ModelSpec, experts: ExpertSpec) -> dict[str, Any]:
    rope = spec.block.rope
    own: dict[str, Any] = {
        **write_losses(experts),
        **write_rows(experts, GPT_OSS_EXPERTS),
        **write_rows(experts.unit, GPT_OSS_UNIT),
        "attention_bias": spec.block.attention.out_bias,
        **written_types(spec),
    }
    # Positions without scaling are not the usual ones here.
    return own | ({"rope_parameters": {"rope_type": "default", "rope_theta": rope.theta}} if rope.factor == 1 else {})


def stacked_parts(disk: str, leaf: str, shape: Shape, columns: slice) -> list[DiskPart]:
    """Return the parts of a projection of all experts, which share a tensor; gate and up are columns of another."""
    if leaf == "down_proj":
        whole, rest = (shape[0], shape[2], shape[1]), ()
    else:
        whole, rest, leaf = (shape[0], shape[2], 2 * shape[1]), (slice(None), columns), "gate_up_proj"
    return [DiskPart(disk + leaf, whole, (expert, *rest), transposed=True) for expert in range(shape[0])]


def _gpt_oss_parts(name: str, shape: Shape, spec: ModelSpec) -> list[DiskPart]:
    """Return the parts: gate and up take turns in the columns of one tensor."""
    layer, experts, leaf = name.rpartition(".experts.")
    if not experts:
        return renamed_parts({".mlp.gate.": ".mlp.router."}, name, shape, spec)
    disk, turns = f"model.{layer}.experts.", slice(1 if leaf.startswith("up") else 0, None, 2)
    if leaf == "down_proj_bias":
        return [DiskPart(disk + leaf, shape)]
    if leaf.endswith("_bias"):
        return [DiskPart(f"{disk}gate_up_proj_bias", (shape[0], 2 * shape[1]), (slice(None), turns))]
    return stacked_parts(disk, leaf, shape, turns)


GPT_OSS = Family(
    architecture="GptOssForCausalLM",
    positions=131_072,
    block=_gpt_oss_block,
    off=dense.SILU,
    norm=("rms_norm_eps", 1e-5),
    write_experts=_written_gpt_oss,
    lacks=lambda config: layer_types_lack(config) or rope_lacks(_with_rope(config)),
    parts=_gpt_oss_parts,
)


# Llama-4's language model: chunks, layers without rotary positions, and experts that weight their inputs.

LLAMA4_NAMES = {".mlp.gate.": ".feed_forward.router.", ".mlp.": ".feed_forward."}
LLAMA4_EXPERTS = local_experts(16, top_k=1)


def _llama4_block(fields: Fields, max_seq_len: int) -> dict[str, Any]:
    layers, bias = fields.integer("num_hidden_layers"), fields.boolean("attention_bias", default=False)
    width, with_experts = fields.integer("intermediate_size"), fields.config.get("moe_layers")
    if with_experts is None:
        step = max(1, fields.integer("interleave_moe_layer_step", default=1))
        with_experts = range(step - 1, layers, step)
    elif not isinstance(with_experts, list) or not all(type(each) is int for each in with_experts):
        raise bad_field("moe_layers", f"{show(with_experts)} is not a list of layers", fields.where)
    listed = fields.config.get("no_rope_layers")
    if not listed:
        interval = max(1, fields.integer("no_rope_layer_interval", default=4))
        listed = [(number + 1) % interval != 0 for number in range(layers)]
    elif not isinstance(listed, list) or len(listed) < layers or not all(each in (0, 1) for each in listed):
        raise bad_field("no_rope_layers", f"{show(listed)} does not say 1 or 0 for {layers} layers", fields.where)
    rotated = [bool(each) for each in listed[:layers]]
    temperature = None
    if fields.config.get("attn_temperature_tuning", True):
        interval = fields.integer("floor_scale", default=8192)
        temperature = TemperatureSpec(interval=interval, scale=fields.number("attn_scale", default=0.1))
    return {
        "qkv_bias": bias,
        "rope": replace(read_rope(fields, max_seq_len, theta=500_000.0), interleaved=True),
        "attention": AttentionSpec(
            out_bias=bias,
            rope_layers=() if all(rotated) else repeated_part(rotated),
            chunk=fields.integer("attention_chunk_size", default=8192),
            unit_qk_norm=fields.boolean("use_qk_norm", default=True),
            temperature=temperature,
        ),
        "experts": read_experts(
            fields,
            LLAMA4_EXPERTS,
            shared_ffn=width,
            normalize_top_k=False,
            router=RouterSpec(scoring="sigmoid", weights_input=True),
            dense_layers=tuple(number for number in range(layers) if number not in with_experts),
        ),
    }


def _written_llama4(spec: ModelSpec, experts: ExpertSpec) -> dict[str, Any]:
    attention = spec.block.attention
    ropes = [attention.has_rope(number) for number in range(spec.layers)]
    tuning = attention.temperature or TemperatureSpec()
    return write_losses(experts) | {
        **write_rows(experts, LLAMA4_EXPERTS),
        "intermediate_size_mlp": spec.ffn,
        "moe_layers": [number for number in range(spec.layers) if number not in experts.dense_layers],
        "no_rope_layers": [int(each) for each in ropes],
        "layer_types": ["chunked_attention" if each else "full_attention" for each in ropes],
        "attention_chunk_size": attention.chunk,
        "use_qk_norm": attention.unit_qk_norm,
        "attention_bias": attention.out_bias,
        "attn_temperature_tuning": attention.temperature is not None,
        "floor_scale": tuning.interval,
        "attn_scale": tuning.scale,
    }


def _llama4_lacks(config: Mapping[str, Any]) -> str:
    types, ropes = config.get("layer_types"), config.get("no_rope_layers")
    if (
        types
        and isinstance(ropes, list)
        and types != ["chunked_attention" if each else "full_attention" for each in ropes]
    ):
        return f"layer_types is {show(types)}, and no_rope_layers is {show(ropes)}"
    if config.get("attention_chunk_size", 8192) is None:
        return "attention_chunk_size is null"
    return rope_lacks(config)


def _llama4_parts(name: str, shape: Shape, spec: ModelSpec) -> list[DiskPart]:
    """Return the parts: gate and up are side by side in one tensor."""
    layer, experts, leaf = name.rpartition(".mlp.experts.")
    if not experts:
        return renamed_parts(LLAMA4_NAMES, name, shape, spec)
    start = shape[1] if leaf == "up_proj" else 0
    return stacked_parts(f"model.{layer}.feed_forward.experts.", leaf, shape, slice(start, start + shape[1]))


LLAMA4_TEXT = Family(
    architecture="Llama4ForCausalLM",
    positions=131_072,
    block=_llama4_block,
    off=dense.SILU | NO_JITTER,
    norm=("rms_norm_eps", 1e-5),
    usual={"head_dim": 128},
    finish=lambda fields, spec: replace(spec, ffn=fields.integer("intermediate_size_mlp", default=16_384)),
    write_experts=_written_llama4,
    lacks=_llama4_lacks,
    parts=_llama4_parts,
)


# A spec that names no family is written as the first one here that can express it.
FAMILIES: dict[str, Family] = {
    "llama": dense.LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen2_moe": QWEN2_MOE,
    "qwen3_moe": QWEN3_MOE,
    "mixtral": MIXTRAL,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v2": DEEPSEEK_V2,
    "kimi_k2": KIMI_K2,
    "glm4_moe": GLM4_MOE,
    "gpt_oss": GPT_OSS,
    "llama4_text": LLAMA4_TEXT,
    "mistral": dense.MISTRAL,
    "gemma": dense.GEMMA,
    "gemma2": dense.GEMMA2,
    "gemma3_text": dense.GEMMA3_TEXT,
    "phi3": dense.PHI3,
    "olmo2": dense.OLMO2,
    "cohere": dense.COHERE,
    "cohere2": dense.COHERE2,
    "glm": dense.GLM,
    "glm4": dense.GLM4,
}
