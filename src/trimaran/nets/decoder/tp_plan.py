"""The tensor-parallel plans of our networks: for each module name pattern a style of `parallel.axes.tp`.

Between the sharded matmuls the stream is sharded along the sequence (sequence parallelism), so each rank computes only
its part of the norms and residuals.
"""

from trimaran.models import ModelSpec, VlmSpec

ENDS = {"embed_tokens": "embedding-to-sequence", "norm": "parameters", "lm_head": "sequence-to-logits"}
ATTENTION = {
    "layers.*.input_layernorm": "parameters",
    "layers.*.self_attn": "gather-sequence",
    "layers.*.self_attn.q_proj": "partial-colwise",
    "layers.*.self_attn.k_proj": "partial-colwise",
    "layers.*.self_attn.v_proj": "partial-colwise",
    "layers.*.self_attn.q_norm": "head-norm",
    "layers.*.self_attn.k_norm": "head-norm",
    "layers.*.self_attn.o_proj": "rowwise-to-sequence",
    "layers.*.post_attention_layernorm": "parameters",
    "layers.*.pre_feedforward_layernorm": "parameters",
    "layers.*.post_feedforward_layernorm": "parameters",
}
FEED_FORWARD = {
    "layers.*.mlp": "gather-sequence",
    "layers.*.mlp.gate_proj": "partial-colwise",
    "layers.*.mlp.up_proj": "partial-colwise",
    "layers.*.mlp.down_proj": "rowwise-to-sequence",
}
# An MoE layer takes the full sequence as a plain tensor and returns this rank's partial sum. `parallel.axes.ep` shards
# the experts.
MOE = {
    "layers.*.mlp": "moe",
    "layers.*.mlp.gate": "parameters",
    "layers.*.mlp.shared_expert.gate_proj": "partial-colwise",
    "layers.*.mlp.shared_expert.up_proj": "partial-colwise",
    "layers.*.mlp.shared_expert.down_proj": "partial-rowwise",
    "layers.*.mlp.shared_expert_gate": "partial-replicated",
}


# Latent attention: every rank has the narrow projections and their norms, and some of the heads.
LATENT = {
    "layers.*.self_attn.q_a_proj": "partial-replicated",
    "layers.*.self_attn.q_a_layernorm": "parameters",
    "layers.*.self_attn.q_b_proj": "partial-colwise",
    "layers.*.self_attn.kv_a_proj_with_mqa": "partial-replicated",
    "layers.*.self_attn.kv_a_layernorm": "parameters",
    "layers.*.self_attn.kv_b_proj": "partial-colwise",
}


# The layers that predict later tokens. Each rank joins its own part of the sequence, so that all have the whole weight.
PREDICTION = {
    "layers.*.enorm": "parameters",
    "layers.*.hnorm": "parameters",
    "layers.*.eh_proj": "partial-replicated",
    "layers.*.shared_head.norm": "parameters",
}


# The styles of a network that only computes forwards: the stream is replicated on every rank, because `tp` need not
# divide the tokens of a step of a serving engine. What has no style here (norms, routers) is a plain tensor, which each
# rank has all of. The output of an MoE layer is a partial sum of its experts, which `parallel.axes.ep` slices, and of
# the shared one.
SERVING_STYLES = {
    "embedding-to-sequence": "embedding",
    "sequence-to-logits": "colwise-logits",
    "partial-colwise": "partial-colwise",
    "partial-rowwise": "partial-rowwise",
    "rowwise-to-sequence": "rowwise",
    "moe": "partial-to-sum",
}


def tensor_plan(spec: ModelSpec) -> dict[str, str]:
    """Return the style of every module of a decoder that has parameters or moves the stream."""
    prediction, experts = PREDICTION if spec.prediction_layers else {}, spec.block.experts
    feed_forward = FEED_FORWARD if experts is None else MOE
    if experts is not None and experts.dense_layers:
        feed_forward = {
            name.replace("*", str(number), 1): style
            for number in range(spec.num_blocks)
            for name, style in (FEED_FORWARD if spec.layer(number).experts is None else MOE).items()
        }
    return ENDS | ATTENTION | LATENT | prediction | feed_forward


def serving_tensor_plan(spec: ModelSpec) -> dict[str, str]:
    """Return the style of every module of a decoder that a serving engine shards."""
    plan = {name: SERVING_STYLES[style] for name, style in tensor_plan(spec).items() if style in SERVING_STYLES}
    if spec.block.attention.wide_qk_norm:
        plan |= {"layers.*.self_attn.q_norm": "head-norm", "layers.*.self_attn.k_norm": "head-norm"}
    if spec.block.attention.sinks:
        plan |= {"layers.*.self_attn": "sinks"}
    return plan


# The stream of a vision tower is replicated. Modules outside the language model that are not listed here run on every
# rank, with plain tensors as weights.
VISION = {
    "vision.layers.*.self_attn.q_proj": "colwise",
    "vision.layers.*.self_attn.k_proj": "colwise",
    "vision.layers.*.self_attn.v_proj": "colwise",
    "vision.layers.*.self_attn.o_proj": "rowwise",
    "vision.layers.*.mlp.gate_proj": "colwise",
    "vision.layers.*.mlp.up_proj": "colwise",
    "vision.layers.*.mlp.down_proj": "rowwise",
}
PROJECTOR = {"projector.linear_1": "colwise", "projector.linear_2": "rowwise"}
DEEPSTACK = {"projector.deep.*.linear_1": "colwise", "projector.deep.*.linear_2": "rowwise"}


def vlm_tensor_plan(spec: VlmSpec) -> dict[str, str]:
    """Return the style of every module of a vision-language model that is sharded or moves the stream."""
    language = {f"language.{name}": style for name, style in tensor_plan(spec.language).items()}
    projector = PROJECTOR | (DEEPSTACK if spec.projector.deepstack else {})
    return VISION | projector | language | {"language.place": "scatter-rows"}
