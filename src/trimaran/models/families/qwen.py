"""Qwen 2, 2.5 and 3, dense and with experts."""

from collections.abc import Mapping
from typing import Any

from trimaran.models.config_fields import Fields
from trimaran.models.families.architecture import Family
from trimaran.models.families.common_fields import OFF, read_decoder
from trimaran.models.families.layer_kinds import layer_types_lack, read_windows, written_types
from trimaran.models.families.rope_fields import read_rope, rope_lacks
from trimaran.models.layer_variations import AttentionSpec
from trimaran.models.spec import Block, ExpertSpec, ModelSpec
from trimaran.models.validate_spec import MOST_LAYERS

_OFF = OFF | {"hidden_act": (None, "silu"), "mlp_bias": (None, False), "attention_bias": (None, False)}  # fmt: skip
_MOE_OFF = _OFF | {"decoder_sparse_step": (None, 1), "mlp_only_layers": (None, [])}


def _read(fields: Fields) -> ModelSpec:
    kind = fields.word("model_type", default="")
    max_seq_len = fields.integer("max_position_embeddings", default=32768)
    block = Block(
        norm_eps=fields.number("rms_norm_eps", default=1e-6),
        qkv_bias=kind == "qwen2" or (kind == "qwen2_moe" and fields.boolean("qkv_bias", default=True)),
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        rope=read_rope(fields, max_seq_len),
        experts=_experts(fields, kind) if kind.endswith("_moe") else None,
        attention=AttentionSpec(windows=_windows(fields)),
    )
    return read_decoder(fields, block, max_seq_len=max_seq_len)


def _windows(fields: Fields) -> tuple[int, ...]:
    """Return the windows of the layers from `max_window_layers` on, unless `layer_types` says otherwise."""
    if not fields.boolean("use_sliding_window", default=False):
        return ()
    layers, first = fields.size("num_hidden_layers", most=MOST_LAYERS), fields.integer("max_window_layers", default=28)
    window = fields.size("sliding_window", default=4096)
    return read_windows(fields, window, [number >= first for number in range(layers)])


def _write_windows(spec: ModelSpec) -> dict[str, Any]:
    return {"use_sliding_window": True, **written_types(spec)} if any(spec.block.attention.windows) else {}


def _experts(fields: Fields, kind: str) -> ExpertSpec:
    """Return the experts. `router_aux_loss_coef` becomes the weight of our per-sequence balance loss, unchanged."""
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


def write_experts(experts: ExpertSpec) -> dict[str, Any]:
    """Return the fields of experts that Qwen's two architectures have in common."""
    config: dict[str, Any] = {
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.ffn,
        "norm_topk_prob": experts.normalize_top_k,
        "router_aux_loss_coef": experts.balance,
    }
    # transformers' MoE models ignore and preserve both fields, which only matter for training.
    extras = {"router_z_loss_coef": experts.z_loss, "expert_capacity_factor": experts.capacity}
    return config | {name: value for name, value in extras.items() if value}


def _write_qwen2_moe(spec: ModelSpec) -> dict[str, Any]:
    if (experts := spec.block.experts) is None:
        return {}
    own = {"shared_expert_intermediate_size": experts.shared_ffn, "qkv_bias": spec.block.qkv_bias}
    return write_experts(experts) | own | _write_windows(spec)


def _write_qwen3_moe(spec: ModelSpec) -> dict[str, Any]:
    return write_experts(spec.block.experts) | _write_windows(spec) if spec.block.experts else {}


def _lacks(config: Mapping[str, Any]) -> str:
    if lacking := layer_types_lack(config):
        return lacking
    if not config.get("use_sliding_window") and "sliding_attention" in (config.get("layer_types") or []):
        return "layer_types has a window, and use_sliding_window is off"
    return rope_lacks(config)


QWEN2 = Family(architecture="Qwen2ForCausalLM", read=_read, write=_write_windows, off=_OFF, lacks=_lacks)
QWEN3 = Family(architecture="Qwen3ForCausalLM", read=_read, write=_write_windows, off=_OFF, lacks=_lacks)
QWEN2_MOE = Family(architecture="Qwen2MoeForCausalLM", read=_read, write=_write_qwen2_moe, off=_MOE_OFF, lacks=_lacks)
QWEN3_MOE = Family(architecture="Qwen3MoeForCausalLM", read=_read, write=_write_qwen3_moe, off=_MOE_OFF, lacks=_lacks)
