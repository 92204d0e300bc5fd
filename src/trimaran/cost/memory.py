"""How many bytes one rank holds: one term a function, and the moment at which they are most."""

from trimaran.core import Bytes, Plan
from trimaran.models import ModelSpec

WIDTH = {"fp32": 4, "bf16": 2}

# Of an eager F.cross_entropy(logits.float()): fp32 logits, their log-softmax, and the gradient of both.
LOGIT_BYTES = 12
# What the allocator takes from the device on top of what tensors hold: 0.01 to 0.16 on one H200; for FSDP about
# 0.2 was published.
ALLOCATOR_SHARE = {"none": 0.10, "optimizer": 0.10, "gradients": 0.10, "parameters": 0.20}
# glibc's heap has holes: resident memory grows by 1.6 bytes for each byte of activations (1.0 with mmap alone).
HEAP_SHARE = 0.6
# An interpreter with torch, its kernels loaded, and the trainer.
PROCESS_BYTES = 330 * 2**20
# cuBLAS takes its scratch space from torch's allocator: for forward's thread and for backward's.
WORKSPACE_BYTES = 2 * 2**25
# A CUDA context with cuBLAS (0.75 GiB on an H200), and nccl's buffers where ranks meet (a guess). No
# tensors, so in no peak.
CONTEXT_BYTES = 3 * 2**28
NCCL_BYTES = 2**29


def weights(spec: ModelSpec, plan: Plan) -> Bytes:
    """Return the bytes of the weights that stay on the rank; they are fp32 in every plan."""
    return Bytes(4 * spec.num_parameters // _shards(plan, "parameters"))


def gradients(spec: ModelSpec, plan: Plan) -> Bytes:
    """Return the bytes of one step's gradients, in fp32.

    They travel with the last micro-batch only, so gradients that will be sharded stay whole while they accumulate.
    """
    shards = _shards(plan, "gradients", "parameters") if plan.grad_accum == 1 else 1
    return Bytes(4 * spec.num_parameters // shards)


def optimizer_states(spec: ModelSpec, plan: Plan) -> Bytes:
    """Return the bytes of AdamW's two moments, in fp32."""
    return Bytes(8 * spec.num_parameters // _shards(plan, "optimizer", "gradients", "parameters"))


def gathered(spec: ModelSpec, plan: Plan) -> Bytes:
    """Return the bytes of the weights that a sharded rank has whole at the loss, in the plan's precision.

    These are the root (embedding, head) and its gradient, and two layers: the one at work and the one fetched ahead.
    """
    if plan.sharding != "parameters":
        return Bytes(0)
    root = spec.num_parameters - spec.layers * spec.layer_parameters
    return Bytes(WIDTH[plan.precision] * (2 * root + 2 * spec.layer_parameters))


def casts(spec: ModelSpec, plan: Plan) -> Bytes:
    """Return the bytes of the bf16 copies of the weights that autocast keeps from forward to backward."""
    if plan.precision == "fp32" or plan.sharding == "parameters":  # sharded weights are gathered in bf16 already
        return Bytes(0)
    layers = spec.layers * (spec.attention_parameters + spec.feed_forward_parameters)
    return Bytes(WIDTH[plan.precision] * (layers + spec.vocab * spec.hidden))


def layer_activations(spec: ModelSpec, plan: Plan, *, kind: str) -> int:
    """Return the bytes that one layer keeps for backward, for each token: what each operator saves.

    Both norms keep the fp32 stream (and on a CPU, where they are not fused, its normed form). The projections keep
    their input: once in fp32, once for each of the five as bf16 casts, about once for all when compiled. Flash
    attention keeps query, key, value, output and a logarithm a head; fp32 kernels want the key heads repeated. SwiGLU
    keeps gate, its silu, up and their product; compiled, silu is computed again.
    """
    width, hidden = WIDTH[plan.precision], spec.hidden
    heads, kv_heads = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    stream = 8 * hidden + (8 * hidden if kind == "cpu" else 0)
    if plan.precision == "fp32":
        inputs, key_value = 8 * hidden, 2 * heads
    else:
        inputs, key_value = (2 if plan.compile else 10) * hidden, 2 * kv_heads
    attention = width * (2 * heads + key_value) + 4 * spec.heads
    attention += width * (heads + kv_heads) * spec.block.qk_norm
    feed_forward = width * (3 if plan.compile else 4) * spec.ffn
    if (experts := spec.block.experts) is not None:  # each token's row is copied to its experts and back
        routed = experts.top_k * (4 * experts.ffn + 2 * hidden)
        feed_forward = width * (routed + 4 * experts.shared_ffn)
    return stream + inputs + attention + feed_forward


def activations(spec: ModelSpec, plan: Plan, *, kind: str, seq_len: int) -> Bytes:
    """Return the bytes kept for backward at the end of a micro-batch's forward, the final norm's included."""
    tokens = plan.micro_batch * seq_len
    return Bytes(tokens * (spec.layers * layer_activations(spec, plan, kind=kind) + 8 * spec.hidden))


def logits(spec: ModelSpec, plan: Plan, *, seq_len: int) -> Bytes:
    """Return the bytes of a micro-batch's logits while the loss turns into a gradient."""
    return Bytes(LOGIT_BYTES * plan.micro_batch * seq_len * spec.vocab)


def peak_terms(spec: ModelSpec, plan: Plan, *, kind: str, seq_len: int) -> dict[str, Bytes]:
    """Return the terms of the fullest moment of a step; their sum is the peak.

    That is the loss of the last micro-batch, when all activations are alive, or, for large models and small batches,
    the update, when all gradients are. On a CPU the peak is resident memory, so the process and the holes in its heap
    count as well.
    """
    kept = {"weights": weights(spec, plan), "optimizer": optimizer_states(spec, plan)}
    # Replicas reduce in buckets that stay between steps; elsewhere the first backward makes the gradients.
    early = plan.grad_accum > 1 or (plan.mesh.dp_replicate > 1 and plan.sharding != "parameters")
    passing = {
        "activations": activations(spec, plan, kind=kind, seq_len=seq_len),
        "logits": logits(spec, plan, seq_len=seq_len),
    }
    at_loss = kept | passing | {"casts": casts(spec, plan), "gathered": gathered(spec, plan)}
    at_loss["gradients"] = gradients(spec, plan) if early else Bytes(0)
    at_update = kept | {"gradients": gradients(spec, plan)}
    peak = max(at_loss, at_update, key=lambda moment: sum(moment.values()))
    if kind == "cpu":
        peak |= {"heap": Bytes(int(HEAP_SHARE * sum(passing.values()))), "process": Bytes(PROCESS_BYTES)}
    else:
        peak |= {"workspace": Bytes(WORKSPACE_BYTES)}
    return {term: num for term, num in peak.items() if num}


def reserved_bytes(peak: Bytes, plan: Plan, *, kind: str) -> Bytes:
    """Return what the allocator takes from the device to serve a peak; resident memory already is what was taken."""
    return peak if kind == "cpu" else Bytes(int(peak * (1 + ALLOCATOR_SHARE[plan.sharding])))


def needed_bytes(reserved: Bytes, plan: Plan, *, kind: str) -> Bytes:
    """Return what a device must have: the allocator's share, the driver's context and the collectives' buffers."""
    if kind == "cpu":
        return reserved
    return Bytes(reserved + CONTEXT_BYTES + (NCCL_BYTES if plan.mesh.world_size > 1 else 0))


def _shards(plan: Plan, *stages: str) -> int:
    return plan.mesh.dp_shard if plan.sharding in stages else 1
