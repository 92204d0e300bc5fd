"""The tensor-parallel plan of a network that only computes forwards: the stream is replicated on every rank.

Training splits the stream along the sequence, but `tp` need not divide the tokens of a step of a serving engine. What
is not sharded (norms, routers, a vision tower) needs no style without gradients: each rank has all of it, as a plain
tensor.
"""

from trimaran.core import UserError
from trimaran.models.spec import ModelSpec
from trimaran.nets.decoder.decoder import Decoder
from trimaran.nets.decoder.tp_plan import feed_forward_plan
from trimaran.nets.network import Network
from trimaran.nets.vlm.vlm_model import Vlm

ENDS = {"embed_tokens": "embedding", "lm_head": "colwise-logits"}
ATTENTION = {
    "layers.*.self_attn.q_proj": "partial-colwise",
    "layers.*.self_attn.k_proj": "partial-colwise",
    "layers.*.self_attn.v_proj": "partial-colwise",
    "layers.*.self_attn.q_b_proj": "partial-colwise",
    "layers.*.self_attn.kv_b_proj": "partial-colwise",
    "layers.*.self_attn.o_proj": "rowwise",
}
FEED_FORWARD = {
    "layers.*.mlp.gate_proj": "partial-colwise",
    "layers.*.mlp.up_proj": "partial-colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
# The output of an MoE layer is a partial sum of its experts, which `parallel.axes.ep` slices, and of the shared one.
MOE = {
    "layers.*.mlp": "partial-to-sum",
    "layers.*.mlp.shared_expert.gate_proj": "partial-colwise",
    "layers.*.mlp.shared_expert.up_proj": "partial-colwise",
    "layers.*.mlp.shared_expert.down_proj": "partial-rowwise",
}
SHARDED = frozenset({"colwise", "rowwise", "embedding", "colwise-logits"})  # of transformers' own plans


def serving_tensor_plan(network: Network, degree: int) -> dict[str, str]:
    """Return a style of `parallel.axes.tp` by module name pattern. Raises UserError if the model has no such plan."""
    match network.module:
        case Decoder() as decoder:
            return _decoder_plan(decoder.spec)
        case Vlm() as vlm:
            return {f"language.{name}": style for name, style in _decoder_plan(vlm.spec.language).items()}
        case _:
            styles = network.tensor_plan(degree)
            if any(style.startswith("foreign-") for style in styles.values()):
                raise UserError("M026", f"{type(network.module).__name__} has packed projections or stacked experts, "
                                "which only training splits", where="plan.mesh.tp", fix="set tp to 1")  # fmt: skip
            return {name: style for name, style in styles.items() if style in SHARDED}


def _decoder_plan(spec: ModelSpec) -> dict[str, str]:
    attention, varied = dict(ATTENTION), spec.block.attention
    if varied.wide_qk_norm:
        attention |= {"layers.*.self_attn.q_norm": "head-norm", "layers.*.self_attn.k_norm": "head-norm"}
    if varied.sinks:
        attention |= {"layers.*.self_attn": "sinks"}
    return ENDS | attention | feed_forward_plan(spec, MOE, FEED_FORWARD)
