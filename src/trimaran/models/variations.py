"""The names of what a decoder has beyond Llama and Qwen, for messages."""

from trimaran.models.spec import ModelSpec


def variations(spec: ModelSpec) -> list[str]:
    """Return what the layers and ends of `spec` have that no Llama or Qwen has."""
    block, attention, norm, rope = spec.block, spec.block.attention, spec.block.norm, spec.block.rope
    has = {
        "an attention window": any(attention.windows),
        "layers without rotary positions": not all(attention.rope_layers),
        "a bias after attention": attention.out_bias,
        "a norm over all heads": attention.wide_qk_norm,
        "its own scale of scores": attention.scale > 0,
        "a soft cap of scores": attention.softcap > 0,
        "sinks": attention.sinks,
        "LayerNorm": norm.kind == "layer",
        "norms with a unit offset": norm.unit_offset,
        f"norms {norm.placement} attention": norm.placement != "before",
        "a parallel feed-forward": norm.parallel,
        "a scaled embedding": block.ends.embedding_scale != 1,
        "scaled or capped logits": not block.ends.bare_head,
        f"the activation {block.activation}": block.activation != "silu",
        f"{rope.scaling} positions": rope.scaling != "llama3",
        "partly rotated heads": rope.rotary_dim > 0,
        "interleaved rotary pairs": rope.interleaved,
        "latent attention": attention.latent is not None,
        "chunked attention": attention.chunk > 0,
        "multi-token prediction": block.prediction is not None,
        "varied routing or experts": block.experts is not None and not block.experts.is_plain,
    }
    return [name for name, present in has.items() if present]
