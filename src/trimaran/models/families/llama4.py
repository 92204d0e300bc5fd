"""Llama-4's language model: chunks, layers without rotary positions, and experts that weight their inputs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trimaran.models.config_fields import Fields, bad_field, show
from trimaran.models.families.architecture import Family
from trimaran.models.families.common_fields import OFF, read_decoder
from trimaran.models.families.disk_parts import DiskPart, Shape, plain_parts, renamed
from trimaran.models.families.expert_fields import read_losses, write_losses
from trimaran.models.families.rope_fields import read_rope, rope_lacks
from trimaran.models.layer_variations import AttentionSpec, RouterSpec, TemperatureSpec
from trimaran.models.spec import Block, ExpertSpec, ModelSpec

_OFF = OFF | {"hidden_act": (None, "silu"), "router_jitter_noise": (None, 0)}
_SIZES = {"head_dim": 128}
_NAMES = {".mlp.gate.": ".feed_forward.router.", ".mlp.": ".feed_forward."}


def _read(fields: Fields) -> ModelSpec:
    fields, max_seq_len = fields.assuming(_SIZES), fields.integer("max_position_embeddings", default=131_072)
    layers, bias = fields.integer("num_hidden_layers"), fields.boolean("attention_bias", default=False)
    width = fields.integer("intermediate_size")
    chunk = fields.integer("attention_chunk_size", default=8192)
    with_experts = _moe_layers(fields, layers)
    block = Block(
        norm_eps=fields.number("rms_norm_eps", default=1e-5),
        qkv_bias=bias,
        rope=replace(read_rope(fields, max_seq_len, theta=500_000.0), interleaved=True),
        attention=AttentionSpec(
            out_bias=bias,
            rope_layers=_shortest(_rope_layers(fields, layers)),
            chunk=chunk,
            unit_qk_norm=fields.boolean("use_qk_norm", default=True),
            temperature=_temperature(fields),
        ),
        experts=ExpertSpec(
            num_experts=fields.integer("num_local_experts", default=16),
            top_k=fields.integer("num_experts_per_tok", default=1),
            ffn=width,
            shared_ffn=width,
            normalize_top_k=False,
            router=RouterSpec(scoring="sigmoid", weights_input=True),
            dense_layers=tuple(number for number in range(layers) if number not in with_experts),
            **read_losses(fields, balance=0.001),
        ),
    )
    spec = read_decoder(fields, block, max_seq_len=max_seq_len)
    return replace(spec, ffn=fields.integer("intermediate_size_mlp", default=16_384))


def _temperature(fields: Fields) -> TemperatureSpec | None:
    if not fields.config.get("attn_temperature_tuning", True):
        return None
    interval = fields.integer("floor_scale", default=8192)
    return TemperatureSpec(interval=interval, scale=fields.number("attn_scale", default=0.1))


def _moe_layers(fields: Fields, layers: int) -> Sequence[int]:
    listed = fields.config.get("moe_layers")
    if listed is None:
        step = max(1, fields.integer("interleave_moe_layer_step", default=1))
        return range(step - 1, layers, step)
    if not isinstance(listed, list) or not all(type(each) is int for each in listed):
        raise bad_field("moe_layers", f"{show(listed)} is not a list of layers", fields.where)
    return listed


def _rope_layers(fields: Fields, layers: int) -> list[bool]:
    listed = fields.config.get("no_rope_layers")
    if not listed:
        interval = max(1, fields.integer("no_rope_layer_interval", default=4))
        return [(number + 1) % interval != 0 for number in range(layers)]
    if not isinstance(listed, list) or len(listed) < layers or not all(each in (0, 1) for each in listed):
        raise bad_field("no_rope_layers", f"{show(listed)} does not say 1 or 0 for {layers} layers", fields.where)
    return [bool(each) for each in listed[:layers]]


def _shortest(layers: list[bool]) -> tuple[bool, ...]:
    """Return the shortest sequence that gives these layers if it is repeated; empty if all have rotary positions."""
    if all(layers):
        return ()
    sizes = range(1, len(layers) + 1)
    size = next(each for each in sizes if all(layers[i] == layers[i % each] for i in range(len(layers))))
    return tuple(layers[:size])


def _write(spec: ModelSpec) -> dict[str, Any]:
    experts, attention = spec.block.experts, spec.block.attention
    if experts is None:
        return {}
    ropes = [attention.has_rope(number) for number in range(spec.layers)]
    tuning = attention.temperature or TemperatureSpec()
    return write_losses(experts) | {
        "intermediate_size": experts.ffn,
        "intermediate_size_mlp": spec.ffn,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
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


def _lacks(config: Mapping[str, Any]) -> str:
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


def _parts(name: str, shape: Shape, spec: ModelSpec) -> list[DiskPart]:
    """Return the parts: all experts share a tensor, in which gate and up are side by side."""
    layer, experts, leaf = name.rpartition(".mlp.experts.")
    if not experts:
        return renamed(plain_parts(name, shape, spec), _NAMES)
    disk = f"model.{layer}.feed_forward.experts."
    if leaf == "down_proj":
        whole = (shape[0], shape[2], shape[1])
        return [DiskPart(disk + leaf, whole, (expert,), transposed=True) for expert in range(shape[0])]
    start = shape[1] if leaf == "up_proj" else 0
    whole, columns = (shape[0], shape[2], 2 * shape[1]), slice(start, start + shape[1])
    regions = ((expert, slice(None), columns) for expert in range(shape[0]))
    return [DiskPart(f"{disk}gate_up_proj", whole, each, transposed=True) for each in regions]


LLAMA4_TEXT = Family(architecture="Llama4ForCausalLM", read=_read, write=_write, off=_OFF, lacks=_lacks, parts=_parts)
