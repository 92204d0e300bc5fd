"""How tensor parallelism splits our networks, as data: names of modules, and styles of `parallel.axes.tp`.

Between the split products the stream is split along the sequence (sequence parallelism), so norms and residuals cost
each rank its share only.
"""

from trimaran.models import ModelSpec
from trimaran.models.vlm_spec import VlmSpec

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


# The stream of a vision tower is whole on every rank: what is neither here nor named `language` is computed by all of
# them alike, and its weights stay plain tensors.
VISION = {
    "vision.layers.*.self_attn.q_proj": "colwise",
    "vision.layers.*.self_attn.k_proj": "colwise",
    "vision.layers.*.self_attn.v_proj": "colwise",
    "vision.layers.*.self_attn.o_proj": "rowwise",
    "vision.layers.*.mlp.gate_proj": "colwise",
    "vision.layers.*.mlp.up_proj": "colwise",
    "vision.layers.*.mlp.down_proj": "rowwise",
}
PROJECTOR = {"projector.linear_1": "colwise", "projector.linear_2": "rowwise-copied"}


def vlm_tensor_plan(spec: VlmSpec) -> dict[str, str]:
    """Return the style of every module of a model that sees which tensor parallelism splits or which moves a stream."""
    language = {f"language.{name}": style for name, style in tensor_plan(spec.language).items()}
    return VISION | PROJECTOR | language | {"language.place": "place"}
