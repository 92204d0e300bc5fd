"""GPT-OSS: sinks, windows in every other layer, and experts with biases and a clamped SwiGLU."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trimaran.models.config_fields import Fields
from trimaran.models.families.architecture import Family
from trimaran.models.families.common_fields import OFF, read_decoder
from trimaran.models.families.disk_parts import DiskPart, Shape, plain_parts, renamed
from trimaran.models.families.expert_fields import read_losses, write_losses
from trimaran.models.families.layer_kinds import layer_types_lack, read_windows, written_types
from trimaran.models.families.rope_fields import read_rope, rope_lacks, rope_tree
from trimaran.models.layer_variations import AttentionSpec, ExpertUnit, Rope, RouterSpec
from trimaran.models.spec import Block, ExpertSpec, ModelSpec

_OFF = OFF | {"hidden_act": (None, "silu")}
# What transformers assumes if config.json has no settings of rotary positions.
USUAL_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
    "rope_theta": 150_000.0,
}


def _read(fields: Fields) -> ModelSpec:
    fields = replace(fields, config=_with_rope(fields.config))
    max_seq_len = fields.integer("max_position_embeddings", default=131_072)
    bias = fields.boolean("attention_bias", default=True)
    window, layers = fields.integer("sliding_window", default=0), fields.integer("num_hidden_layers")
    alternating = [number % 2 == 0 for number in range(layers)]
    block = Block(
        norm_eps=fields.number("rms_norm_eps", default=1e-5),
        qkv_bias=bias,
        rope=read_rope(fields, max_seq_len),
        attention=AttentionSpec(out_bias=bias, sinks=True, windows=read_windows(fields, window, alternating)),
        experts=ExpertSpec(
            num_experts=fields.integer("num_local_experts"),
            top_k=fields.integer("num_experts_per_tok", default=4),
            ffn=fields.integer("intermediate_size"),
            router=RouterSpec(bias=True),
            unit=ExpertUnit(
                bias=True,
                limit=fields.number("swiglu_limit", default=7.0),
                alpha=fields.number("swiglu_alpha", default=1.702),
            ),
            **read_losses(fields, balance=0.001),
        ),
    )
    return read_decoder(fields, block, max_seq_len=max_seq_len)


def _with_rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config if rope_tree(config) else {**config, "rope_parameters": USUAL_ROPE}


def _write(spec: ModelSpec) -> dict[str, Any]:
    experts, attention = spec.block.experts, spec.block.attention
    if experts is None:
        return {}
    return write_losses(experts) | {
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "intermediate_size": experts.ffn,
        "swiglu_limit": experts.unit.limit,
        "swiglu_alpha": experts.unit.alpha,
        "attention_bias": attention.out_bias,
        **written_types(spec),
        **_plain_rope(spec.block.rope),
    }


def _plain_rope(rope: Rope) -> dict[str, Any]:
    """Return the settings of positions without scaling, which are not the usual ones here."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": rope.theta}} if rope.factor == 1 else {}


def _lacks(config: Mapping[str, Any]) -> str:
    return layer_types_lack(config) or rope_lacks(_with_rope(config))


def _parts(name: str, shape: Shape, spec: ModelSpec) -> list[DiskPart]:
    """Return the parts: gate and up take turns in the columns of one tensor, and all experts share it."""
    layer, experts, leaf = name.rpartition(".experts.")
    if not experts:
        return renamed(plain_parts(name, shape, spec), {".mlp.gate.": ".mlp.router."})
    disk, first = f"model.{layer}.experts.", 1 if leaf.startswith("up") else 0
    if leaf == "down_proj_bias":
        return [DiskPart(disk + leaf, shape)]
    if leaf == "down_proj":
        whole = (shape[0], shape[2], shape[1])
        return [DiskPart(disk + leaf, whole, (expert,), transposed=True) for expert in range(shape[0])]
    turns = slice(first, None, 2)
    if leaf.endswith("_bias"):
        return [DiskPart(f"{disk}gate_up_proj_bias", (shape[0], 2 * shape[1]), (slice(None), turns))]
    whole = (shape[0], shape[2], 2 * shape[1])
    regions = ((expert, slice(None), turns) for expert in range(shape[0]))
    return [DiskPart(f"{disk}gate_up_proj", whole, each, transposed=True) for each in regions]


GPT_OSS = Family(architecture="GptOssForCausalLM", read=_read, write=_write, off=_OFF, lacks=_lacks, parts=_parts)
