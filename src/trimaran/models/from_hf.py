"""Converts a Hugging Face config.json to a ModelSpec, and back."""

from collections.abc import Mapping
from typing import Any

from trimaran.core import UserError
from trimaran.models.config_fields import Fields, bad_field, show
from trimaran.models.spec import Block, ExpertSpec, ModelSpec, Rope
from trimaran.models.validate_spec import first_invalid_field

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}

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

# Features that our decoder lacks, with the values that switch them off.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "hidden_act": (None, "silu"),
    "mlp_bias": (None, False),
    "attention_bias": (None, False),
    "attention_dropout": (None, 0),
    "use_sliding_window": (None, False),
    "partial_rotary_factor": (None, 1),
    "decoder_sparse_step": (None, 1),
    "mlp_only_layers": (None, []),
    "quantization_config": (None,),
}


def unsupported(config: Mapping[str, Any]) -> str | None:
    """Return the first feature of `config` that our decoder lacks; None if it supports all of them."""
    if (kind := config.get("model_type")) not in list(ARCHITECTURES):
        return f"model_type is {show(kind)}; the decoder supports {', '.join(ARCHITECTURES)}"
    for key, plain in _PLAIN.items():
        if config.get(key) not in plain:
            return f"{key} is {show(config[key])}"
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list) or any(each != "full_attention" for each in layer_types):
        return f"layer_types is {show(layer_types)}"
    rope = _rope_tree(config)
    if not isinstance(rope, Mapping) or any(isinstance(each, Mapping) for each in rope.values()):
        return f"rotary positions are {show(rope)}"
    if rope.get("partial_rotary_factor") not in _PLAIN["partial_rotary_factor"]:
        return f"partial_rotary_factor is {show(rope['partial_rotary_factor'])}"
    if (kind := _rope_type(rope)) not in ("default", "llama3"):
        return f"rope_type is {show(kind)}"
    return None


def lacks_expert_field(config: Mapping[str, Any]) -> bool:
    """Return whether `config` leaves a size of its experts to the defaults of transformers, or has another name for it.

    transformers builds such a model, so that the family `hf` trains it; our decoder does not guess.
    """
    if not str(config.get("model_type")).endswith("_moe"):
        return False
    needed = [("num_experts", "num_local_experts"), ("num_experts_per_tok",), ("moe_intermediate_size",)]
    if config["model_type"] == "qwen2_moe":
        needed.append(("shared_expert_intermediate_size",))
    return any(all(config.get(name) is None for name in names) for names in needed)


def spec_from_hf(config: Mapping[str, Any], *, where: str) -> ModelSpec:
    """Return the shape that `config` describes. `where` names the configuration in errors.

    `router_aux_loss_coef` becomes the weight of our per-sequence balance loss, unchanged.
    """
    if reason := unsupported(config):
        raise UserError("M006", f"the decoder does not support this model: {reason}", where=where,
                        fix="train it unchanged with model.family=hf")  # fmt: skip
    fields = Fields(config, where)
    kind = config["model_type"]
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    max_seq_len = fields.integer("max_position_embeddings", default=2048 if kind == "llama" else 32768)
    block = Block(
        norm_eps=fields.number("rms_norm_eps", default=1e-6),
        qkv_bias=kind == "qwen2" or (kind == "qwen2_moe" and fields.boolean("qkv_bias", default=True)),
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        rope=_rope(config, max_seq_len, where),
        experts=_experts(fields, kind) if kind.endswith("_moe") else None,
    )
    spec = ModelSpec(
        name=kind,
        layers=fields.integer("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", default=heads),
        head_dim=fields.integer("head_dim", default=0) or _head_dim(hidden, heads, where),
        ffn=fields.integer("intermediate_size", default=0 if block.experts else None),
        vocab=fields.integer("vocab_size"),
        max_seq_len=max_seq_len,
        tied=fields.boolean("tie_word_embeddings", default=False),
        block=block,
    )
    if problem := first_invalid_field(spec):
        raise bad_field(HF_NAMES.get(problem[0], problem[0]), problem[1], where)
    return spec


def spec_to_hf(spec: ModelSpec) -> dict[str, Any]:
    """Return a config.json that transformers 4.57 and newer loads as the same network.

    The ids of special tokens are left out: they belong to the tokenizer.
    """
    kind, rope, experts = _model_type(spec), spec.block.rope, spec.block.experts
    config: dict[str, Any] = {"architectures": [ARCHITECTURES[kind]], "model_type": kind}
    config |= {HF_NAMES[name]: getattr(spec, name) for name in HF_NAMES if hasattr(spec, name)}
    config |= {
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.block.norm_eps,
        "tie_word_embeddings": spec.tied,
        "rope_theta": rope.theta,
        "rope_scaling": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if rope.factor != 1:
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_seq_len,
        }
    if experts:
        config |= {
            "num_experts": experts.num_experts,
            "num_experts_per_tok": experts.top_k,
            "moe_intermediate_size": experts.ffn,
            "norm_topk_prob": experts.normalize_top_k,
            "router_aux_loss_coef": experts.balance,
        }
        # transformers' MoE models ignore and preserve both fields, which only matter for training.
        extras = {"router_z_loss_coef": experts.z_loss, "expert_capacity_factor": experts.capacity}
        config |= {name: value for name, value in extras.items() if value}
    if kind == "qwen2_moe":
        assert experts
        config |= {"shared_expert_intermediate_size": experts.shared_ffn, "qkv_bias": spec.block.qkv_bias}
    return config


def _model_type(spec: ModelSpec) -> str:
    """Return the Hugging Face architecture that has exactly the features of `spec`."""
    block, experts = spec.block, spec.block.experts
    if experts is None and not (block.qkv_bias and block.qk_norm):
        kind = "qwen2" if block.qkv_bias else "qwen3" if block.qk_norm else "llama"
        # Only LlamaConfig requires this.
        if kind != "llama" or spec.hidden % spec.heads == 0:
            return kind
    elif experts and experts.shared_ffn and experts.shared_gate and not block.qk_norm:
        return "qwen2_moe"
    elif experts and not experts.shared_ffn and block.qk_norm and not block.qkv_bias:
        return "qwen3_moe"
    features = {
        "qkv_bias": block.qkv_bias,
        "qk_norm": block.qk_norm,
        "experts": experts is not None,
        "a shared expert": experts is not None and experts.shared_ffn > 0,
        "its gate": experts is not None and experts.shared_gate,
        "heads that do not divide hidden": spec.hidden % spec.heads != 0,
    }
    has = ", ".join(name for name, present in features.items() if present)
    raise UserError("M010", f"Hugging Face has no architecture with exactly {has}", where="model.shape",
                    fix="choose the features of Llama, Qwen2, Qwen3, Qwen2-MoE or Qwen3-MoE")  # fmt: skip


def _experts(fields: Fields, kind: str) -> ExpertSpec:
    # transformers 5 writes Qwen3-MoE's number of experts under the name that its kernels use.
    count = "num_local_experts" if "num_local_experts" in fields.config else "num_experts"
    shared = kind == "qwen2_moe"
    return ExpertSpec(
        num_experts=fields.integer(count),
        top_k=fields.integer("num_experts_per_tok"),
        ffn=fields.integer("moe_intermediate_size"),
        shared_ffn=fields.integer("shared_expert_intermediate_size") if shared else 0,
        shared_gate=shared,
        normalize_top_k=fields.boolean("norm_topk_prob", default=False),
        balance=fields.number("router_aux_loss_coef", default=0.001),
        z_loss=fields.number("router_z_loss_coef", default=0.0),
        capacity=fields.number("expert_capacity_factor", default=0.0),
    )


def _rope(config: Mapping[str, Any], max_seq_len: int, where: str) -> Rope:
    tree = _rope_tree(config)
    theta = Fields({**config, **tree}, where).number("rope_theta", default=10_000.0)
    if _rope_type(tree) == "default":
        return Rope(theta=theta)
    fields = Fields(tree, f"{where} (rotary positions)")
    return Rope(
        theta=theta,
        factor=fields.number("factor"),
        low_freq_factor=fields.number("low_freq_factor"),
        high_freq_factor=fields.number("high_freq_factor"),
        original_max_seq_len=fields.integer("original_max_position_embeddings", default=max_seq_len),
    )


def _rope_tree(config: Mapping[str, Any]) -> Any:
    """Return the rotary settings from where transformers 5 writes them, or from where 4 does."""
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _rope_type(tree: Mapping[str, Any]) -> Any:
    return tree.get("rope_type") or tree.get("type") or "default"


def _head_dim(hidden: int, heads: int, where: str) -> int:
    if heads < 1 or hidden % heads:
        raise bad_field("num_attention_heads", f"{heads} heads do not divide hidden_size {hidden}", where)
    return hidden // heads
