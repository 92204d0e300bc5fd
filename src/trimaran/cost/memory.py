"""How many bytes one rank holds: one term a function, and the moment at which they are most."""

from trimaran.core import Bytes, Plan
from trimaran.cost.pipeline import Part, distinct_parts
from trimaran.models import ModelSpec

WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}  # fp8 products take and give bf16

STATE_BYTES = {"fp32": 8.0, "bf16": 4.0, "8bit": 2.03}  # a parameter: AdamW's two moments; 8bit has a scale a block
# Of an eager F.cross_entropy(logits.float()): fp32 logits, their log-softmax, and the gradient of both. The first two
# wait for backward.
LOGIT_BYTES = 12
WAITING_LOGIT_BYTES = 8
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


def owned_parameters(plan: Plan, part: Part) -> int:
    """Return how many parameters this rank updates: its part, or its slice of it."""
    if plan.sharding == "none":
        return part.parameters
    mesh = plan.mesh
    return part.dense // mesh.shards + part.experts // max(1, mesh.expert_ranks // mesh.ep)


def weights(plan: Plan, part: Part) -> Bytes:
    """Return the bytes of the weights that stay on the rank; they are fp32 in every plan."""
    return Bytes(4 * owned_parameters(plan, part))


def gradients(plan: Plan, part: Part) -> Bytes:
    """Return the bytes of one step's gradients, in fp32.

    Sharded gradients are reduced with every micro-batch, so they are never whole. Those that travel with the last
    micro-batch alone stay whole while they accumulate: the replicas', ZeRO-1's, and all of a pipeline's.
    """
    accumulates = plan.grad_accum > 1 and (plan.sharding == "optimizer" or plan.mesh.pp > 1)
    whole = plan.sharding == "none" or accumulates
    return Bytes(4 * (part.parameters if whole else owned_parameters(plan, part)))


def optimizer_states(plan: Plan, part: Part, *, state_bytes: float = STATE_BYTES["fp32"]) -> Bytes:
    """Return the bytes of AdamW's two moments."""
    return Bytes(int(state_bytes * owned_parameters(plan, part)))


def frees_weights(plan: Plan) -> bool:
    """Return whether a block's gathered weights are freed after its forward, to be gathered again for its backward.

    A pipeline keeps them: it runs its micro-batches without telling FSDP which backward is the last.
    """
    if plan.mesh.pp > 1 or plan.sharding == "none":
        return False
    return plan.sharding == "parameters" if plan.comm.reshard == "auto" else plan.comm.reshard != "never"


def gathered(plan: Plan, part: Part) -> Bytes:
    """Return the bytes of the weights that a sharded rank has whole at the loss, in the plan's precision.

    Freed weights leave the root (embedding, head), the layer at work and those fetched ahead, and, where they stay
    split over a few ranks, a slice of each layer. The root's gradient is there as well.
    """
    if plan.sharding == "none":
        return Bytes(0)
    if frees_weights(plan):
        whole = part.root + min(part.layers, 1 + plan.comm.prefetch) * part.layer
        if isinstance(plan.comm.reshard, int):
            whole += part.layers * part.layer // plan.comm.reshard
    else:
        whole = part.parameters
    return Bytes(WIDTH[plan.precision] * (whole + part.root))


def casts(spec: ModelSpec, plan: Plan, part: Part) -> Bytes:
    """Return the bytes of the bf16 copies of the weights that autocast keeps from forward to backward."""
    if plan.precision == "fp32" or plan.sharding != "none":  # sharded weights are gathered in bf16 already
        return Bytes(0)
    layers = part.flying * _kept_layers(plan, part) * (part.layer - 2 * spec.hidden)
    head = spec.vocab * spec.hidden // plan.mesh.tp * part.has_head
    return Bytes(int(WIDTH[plan.precision] * (layers + head)))


def layer_activations(spec: ModelSpec, plan: Plan, *, kind: str) -> int:
    """Return the bytes that one layer keeps for backward, for each token: what each operator saves.

    Both norms keep the fp32 stream (and on a CPU, where they are not fused, its normed form). The projections keep
    their input: once in fp32, once for each of the five as bf16 casts, about once for all when compiled. Flash
    attention keeps query, key, value, output and a logarithm a head; fp32 kernels want the key heads repeated, and so
    do queries that meet the keys of a whole sequence. SwiGLU keeps gate, its silu, up and their product; compiled, silu
    is computed again. Tensor parallelism splits all but the projections' input, which is gathered for them.
    """
    width, hidden, tp = WIDTH[plan.precision], spec.hidden, plan.mesh.tp
    heads, kv_heads = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    stream = 8 * hidden + (8 * hidden if kind == "cpu" else 0)
    if plan.precision == "fp32":
        inputs, key_value = 8 * hidden, 2 * heads
    else:
        inputs, key_value = (2 if plan.compile else 10) * hidden, 2 * kv_heads
    if plan.mesh.cp > 1 and plan.comm.context == "gather":
        key_value = 2 * heads * plan.mesh.cp
    attention = width * (2 * heads + key_value) + 4 * spec.heads
    attention += width * (heads + kv_heads) * spec.block.qk_norm
    feed_forward = width * (3 if plan.compile else 4) * spec.ffn
    if (experts := spec.block.experts) is not None:  # each token's row is copied to its experts and back
        routed = experts.top_k * (4 * experts.ffn + 2 * hidden)
        feed_forward = width * (routed + 4 * experts.shared_ffn)
    return inputs + (stream + attention + feed_forward) // tp


def kept_activations(spec: ModelSpec, plan: Plan, *, kind: str) -> int:
    """Return the bytes that a layer which is computed again keeps, for each token: its input.

    Selective recompute keeps also what attention returns, and every second product: the keys, the output of
    attention's projection, and one half of the gated feed-forward.
    """
    kept = 4 * spec.hidden
    if plan.recompute == "selective":
        experts = spec.block.experts
        ffn = experts.top_k * experts.ffn + experts.shared_ffn if experts else spec.ffn
        products = spec.kv_heads * spec.head_dim + spec.hidden + ffn
        kept += WIDTH[plan.precision] * (spec.heads * spec.head_dim + products) + 4 * spec.heads
    return min(kept // plan.mesh.tp, layer_activations(spec, plan, kind=kind))


def activations(spec: ModelSpec, plan: Plan, part: Part, *, kind: str, seq_len: int) -> Bytes:
    """Return the bytes kept for backward when most micro-batches are in flight, the final norm's included.

    Offloaded activations leave two layers' on the device: those at work and those on their way.
    """
    layers = part.flying * saved_by_layers(spec, plan, part, kind=kind)
    if plan.offload == "activations" and kind == "cuda":
        layers = min(layers, 2 * layer_activations(spec, plan, kind=kind))
    final = 8 * spec.hidden // plan.mesh.tp * part.has_head
    return Bytes(int(local_tokens(plan, seq_len) * (layers + final)))


def saved_by_layers(spec: ModelSpec, plan: Plan, part: Part, *, kind: str) -> int:
    """Return the bytes that all layers of a rank keep for one token of one micro-batch."""
    again = recomputed_layers(plan, part.layers)
    kept = (part.layers - again) * layer_activations(spec, plan, kind=kind)
    return kept + again * kept_activations(spec, plan, kind=kind)


def logits(spec: ModelSpec, plan: Plan, part: Part, *, seq_len: int) -> Bytes:
    """Return the bytes of the logits while a loss turns into a gradient; GPipe has those of all micro-batches waiting.

    Tensor parallelism splits the vocabulary.
    """
    if not part.has_head:
        return Bytes(0)
    waiting = plan.grad_accum - 1 if plan.mesh.pp > 1 and plan.pipeline.schedule == "gpipe" else 0
    per_logit = LOGIT_BYTES + waiting * WAITING_LOGIT_BYTES
    return Bytes(per_logit * local_tokens(plan, seq_len) * spec.vocab // plan.mesh.tp)


def peak_terms(
    spec: ModelSpec, plan: Plan, *, kind: str, seq_len: int, state_bytes: float = STATE_BYTES["fp32"]
) -> dict[str, Bytes]:
    """Return the terms of the fullest moment of a step on the fullest rank of the pipeline; their sum is the peak."""
    moments = []
    for part in distinct_parts(spec, plan, seq_len=seq_len):
        kept = _kept_terms(plan, part, kind=kind, state_bytes=state_bytes)
        moments += [kept | moment for moment in _moments(spec, plan, part, kind=kind, seq_len=seq_len)]
    moments = [moment | _around(moment, kind) for moment in moments]
    peak = max(moments, key=lambda moment: sum(moment.values()))
    return {term: num for term, num in peak.items() if num}


def _kept_terms(plan: Plan, part: Part, *, kind: str, state_bytes: float) -> dict[str, Bytes]:
    """Return what a rank holds all the time. On a CPU nothing is offloaded to anywhere."""
    off = plan.offload if kind == "cuda" else "none"
    states = optimizer_states(plan, part, state_bytes=state_bytes)
    return {
        "weights": weights(plan, part) if off != "parameters" else Bytes(0),
        "optimizer": states if off not in ("optimizer", "parameters") else Bytes(0),
    }


def _moments(spec: ModelSpec, plan: Plan, part: Part, *, kind: str, seq_len: int) -> list[dict[str, Bytes]]:
    """Return what comes and goes at the moments that may be a rank's fullest.

    That is the loss of the last micro-batch, when all activations are alive, the first layer that backward computes
    again, or, for large models and small batches, the update, when all gradients are.
    """
    summed = gradients(plan, part)
    if plan.offload == "parameters" and kind == "cuda" and plan.mesh.pp == 1:
        summed = Bytes(0)  # each slice goes to the host as soon as it is reduced
    # Replicas reduce in buckets that stay between steps; elsewhere the first backward makes the gradients.
    early = plan.grad_accum > 1 or (plan.mesh.data > 1 and plan.sharding == "none")
    alive = activations(spec, plan, part, kind=kind, seq_len=seq_len)
    working = {"activations": alive, "casts": casts(spec, plan, part), "gathered": gathered(plan, part)}
    at_loss = {"logits": logits(spec, plan, part, seq_len=seq_len), "gradients": summed if early else Bytes(0)}
    moments = [working | at_loss, {"gradients": summed}]
    if recomputed_layers(plan, part.layers):
        again = local_tokens(plan, seq_len) * layer_activations(spec, plan, kind=kind)
        moments.append(working | {"activations": Bytes(alive + again), "gradients": summed})
    return moments


def _around(moment: dict[str, Bytes], kind: str) -> dict[str, Bytes]:
    """Return what a device holds besides the tensors that a step is about.

    On a CPU the peak is resident memory, so the process and the holes in its heap count as well.
    """
    if kind == "cuda":
        return {"workspace": Bytes(WORKSPACE_BYTES)}
    passing = moment.get("activations", 0) + moment.get("logits", 0)
    return {"heap": Bytes(int(HEAP_SHARE * passing)), "process": Bytes(PROCESS_BYTES)}


def reserved_bytes(peak: Bytes, plan: Plan, *, kind: str) -> Bytes:
    """Return what the allocator takes from the device to serve a peak; resident memory already is what was taken."""
    return peak if kind == "cpu" else Bytes(int(peak * (1 + ALLOCATOR_SHARE[plan.sharding])))


def needed_bytes(reserved: Bytes, plan: Plan, *, kind: str) -> Bytes:
    """Return what a device must have: the allocator's share, the driver's context and the collectives' buffers."""
    if kind == "cpu":
        return reserved
    return Bytes(reserved + CONTEXT_BYTES + (NCCL_BYTES if plan.mesh.world_size > 1 else 0))


def local_tokens(plan: Plan, seq_len: int) -> int:
    """Return the tokens of a micro-batch that a rank works on: its part of every sequence."""
    return plan.micro_batch * seq_len // plan.mesh.cp


def recomputed_layers(plan: Plan, layers: int) -> int:
    """Return how many of a rank's layers are computed again in backward; every k-th begins with the first."""
    if plan.recompute == "none":
        return 0
    return -(-layers // plan.recompute) if isinstance(plan.recompute, int) else layers


def _kept_layers(plan: Plan, part: Part) -> int:
    return part.layers - recomputed_layers(plan, part.layers)
