"""How tensor parallelism splits our decoder, as data: names of modules, and styles of `parallel.axes.tp`.

Between the split products the stream is split along the sequence (sequence parallelism), so norms and residuals cost
each rank its share only.
"""

from trimaran.models import ModelSpec

ENDS = {
    "embed_tokens": "embedding-to-sequence",
    "norm": "sequence",
    "lm_head": "sequence-to-logits",
}
ATTENTION = {
    "layers.*.input_layernorm": "sequence",
    "layers.*.self_attn": "gather-sequence",
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.q_norm": "heads",
    "layers.*.self_attn.k_norm": "heads",
    "layers.*.self_attn.o_proj": "rowwise-to-sequence",
    "layers.*.post_attention_layernorm": "sequence",
}
FEED_FORWARD = {
    "layers.*.mlp": "gather-sequence",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise-to-sequence",
}
# A mixture takes the whole sequence as a plain tensor and gives back this rank's addend. `parallel.axes.ep` splits the
# experts themselves.
MIXTURE = {
    "layers.*.mlp": "mixture",
    "layers.*.mlp.gate": "parameters",
    "layers.*.mlp.shared_expert.gate_proj": "addend-colwise",
    "layers.*.mlp.shared_expert.up_proj": "addend-colwise",
    "layers.*.mlp.shared_expert.down_proj": "addend-rowwise",
    "layers.*.mlp.shared_expert_gate": "addend-replicated",
}


def tensor_plan(spec: ModelSpec) -> dict[str, str]:
    """Return the style of every module of a decoder that has parameters or moves the stream."""
    return ENDS | ATTENTION | (MIXTURE if spec.block.experts else FEED_FORWARD)
