"""A decoder's shape as Megatron-LM arguments."""

from collections.abc import Iterator

from trimaran.core import Plan
from trimaran.models import ModelSpec, Rope
from trimaran.models.spec import rows_per_rank, variations
from trimaran.planner.emit.emission import unknown_model

BUILT_IN_ROPE = Rope()  # Megatron's built-in constants of Llama 3.1's RoPE scaling


def refuse_network(tool: str, spec: ModelSpec) -> None:
    """Raise for features of our decoder that Megatron's does not have."""
    rope, experts = spec.block.rope, spec.block.experts
    constants = (rope.low_freq_factor, rope.high_freq_factor, rope.original_max_seq_len)
    built_in = (BUILT_IN_ROPE.low_freq_factor, BUILT_IN_ROPE.high_freq_factor, BUILT_IN_ROPE.original_max_seq_len)
    if beyond := variations(spec):
        raise unknown_model(tool, spec.name, f"it is not emitted with {', '.join(beyond)}")
    if rope.factor != 1 and constants != built_in:
        raise unknown_model(tool, spec.name, "its RoPE scaling only has Llama 3.1's constants")
    if rope.theta != int(rope.theta):
        raise unknown_model(tool, spec.name, "its rotary base is an integer")
    if experts and experts.shared_gate:
        raise unknown_model(tool, spec.name, "its shared expert has no gate")
    if experts and experts.capacity:
        raise unknown_model(tool, spec.name, "its expert capacity is per micro-batch, not per sequence")


def network(spec: ModelSpec, plan: Plan, seq_len: int) -> Iterator[str]:
    """Yield the arguments of the shape. The vocabulary is padded to the next multiple of tp, which it needs."""
    block, tp = spec.block, plan.mesh.tp
    yield f"--num-layers {spec.layers} --hidden-size {spec.hidden} --ffn-hidden-size {spec.ffn}"
    yield f"--num-attention-heads {spec.heads} --kv-channels {spec.head_dim}"
    if spec.kv_heads != spec.heads:
        yield f"--group-query-attention --num-query-groups {spec.kv_heads}"
    yield f"--seq-length {seq_len} --max-position-embeddings {spec.max_seq_len}"
    yield from positions(block.rope)
    yield f"--normalization RMSNorm --norm-epsilon {block.norm_eps} --swiglu --disable-bias-linear"
    for flag, wanted in (
        ("--add-qkv-bias", block.qkv_bias),
        ("--qk-layernorm", block.qk_norm),
        ("--untie-embeddings-and-output-weights", not spec.tied),
    ):
        if wanted:
            yield flag
    yield f"--padded-vocab-size {tp * rows_per_rank(spec.vocab, tp)} --attention-dropout 0 --hidden-dropout 0"
    yield from mixture(spec, plan)


def positions(rope: Rope) -> Iterator[str]:
    yield f"--position-embedding-type rope --rotary-base {int(rope.theta)}"
    if rope.factor != 1:
        yield f"--use-rope-scaling --rope-scaling-factor {rope.factor}"


def mixture(spec: ModelSpec, plan: Plan) -> Iterator[str]:
    """Yield the experts. Without normalised weights the softmax comes before the top-k."""
    if (experts := spec.block.experts) is None:
        return
    yield f"--num-experts {experts.num_experts} --moe-router-topk {experts.top_k} --moe-ffn-hidden-size {experts.ffn}"
    if experts.shared_ffn:
        yield f"--moe-shared-expert-intermediate-size {experts.shared_ffn}"
    if not experts.normalize_top_k:
        yield "--moe-router-pre-softmax"
    yield f"--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff {experts.balance}"
    if experts.z_loss:
        yield f"--moe-z-loss-coeff {experts.z_loss}"
    grouped = plan.precision in ("bf16", "fp8")  # its grouped GEMM supports no others
    yield "--moe-token-dispatcher-type alltoall" + (" --moe-grouped-gemm" if grouped else "")
