"""A shell script for Megatron-LM's `pretrain_gpt.py`.

Argument names are those of `megatron/training/arguments.py` at commit 000c4ac24f61159c138b0975def722c65245983c.
"""

from collections.abc import Iterator

from trimaran.core import Plan, TrainSection
from trimaran.models import ModelSpec, Rope, decoder_of, rows_per_rank, stage_ranges, variations
from trimaran.planner.emit.emission import (
    Emission,
    Takes,
    headline,
    refusal,
    refuse_adapter,
    refuse_cpu,
    refuse_settings,
    refuse_unless,
    torchrun,
    unknown_model,
)
from trimaran.planner.question import Question

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
    yield f"--position-embedding-type rope --rotary-base {int(block.rope.theta)}"
    if block.rope.factor != 1:
        yield f"--use-rope-scaling --rope-scaling-factor {block.rope.factor}"
    yield f"--normalization RMSNorm --norm-epsilon {block.norm_eps} --swiglu --disable-bias-linear"
    for flag, wanted in (
        ("--add-qkv-bias", block.qkv_bias),
        ("--qk-layernorm", block.qk_norm),
        ("--untie-embeddings-and-output-weights", not spec.tied),
    ):
        if wanted:
            yield flag
    yield f"--padded-vocab-size {tp * rows_per_rank(spec.vocab, tp)} --attention-dropout 0 --hidden-dropout 0"
    if (experts := block.experts) is None:
        return
    yield f"--num-experts {experts.num_experts} --moe-router-topk {experts.top_k} --moe-ffn-hidden-size {experts.ffn}"
    if experts.shared_ffn:
        yield f"--moe-shared-expert-intermediate-size {experts.shared_ffn}"
    if not experts.normalize_top_k:  # the softmax comes before the top-k
        yield "--moe-router-pre-softmax"
    yield f"--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff {experts.balance}"
    if experts.z_loss:
        yield f"--moe-z-loss-coeff {experts.z_loss}"
    grouped = plan.precision in ("bf16", "fp8")  # its grouped GEMM supports no others
    yield "--moe-token-dispatcher-type alltoall" + (" --moe-grouped-gemm" if grouped else "")


TOOL = "megatron"
FILE = "pretrain.sh"
TAKES = {
    "engine": Takes(("torch",), "it has an engine of its own"),
    "sharding": Takes(("none", "optimizer"), "its distributed optimizer shards only optimizer states"),
    "offload": Takes(("none", "optimizer"), "it offloads only the optimizer"),
}
SCHEDULES = ("1f1b", "interleaved")
DECAYS = {"cosine": "cosine", "linear": "linear", "wsd": "WSD", "constant": "constant"}


def emit_megatron(plan: Plan, question: Question) -> Emission:
    """Return the script that starts `pretrain_gpt.py` on every rank of a node."""
    spec, cluster, train = decoder_of(question.spec), question.cluster, question.recipe.train
    sharded = plan.sharding == "optimizer"
    refuse_cpu(TOOL, cluster)
    refuse_adapter(TOOL, question)
    refuse_settings(TOOL, train, states=("fp32", "bf16") if sharded else ("fp32",))
    if spec is None:
        raise unknown_model(TOOL, question.outline.name if question.outline else "this model",
                            "only decoders like Llama and Qwen are emitted for pretrain_gpt.py")  # fmt: skip
    refuse_network(TOOL, spec)
    refuse_plan(plan, question)
    seq_len = question.recipe.data.seq_len
    lines = [*network(spec, plan, seq_len), *ranks(plan, spec, seq_len), *training(plan, spec, train, seq_len)]
    lines += ['--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER"', '--data-path "$DATA"',
              '--save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval 500']  # fmt: skip
    start = torchrun(cluster, '"$MEGATRON/pretrain_gpt.py"')
    text = f"#!/bin/bash\n{headline(TOOL, plan, question)}set -eu\n"
    if plan.mesh.tp * plan.mesh.cp > 1:
        text += "export CUDA_DEVICE_MAX_CONNECTIONS=1\n"  # Megatron requires it before Blackwell
    text += " \\\n  ".join([start, *lines]) + "\n"
    return Emission(
        files={FILE: text},
        command=f"MEGATRON=... TOKENIZER=... DATA=... CHECKPOINTS=... bash {FILE}",
        notes=tuple(notes(plan)),
    )


def refuse_plan(plan: Plan, question: Question) -> None:
    """Raise for plans that Megatron cannot run, whatever the model."""
    refuse_unless(TOOL, plan, TAKES)
    mesh, seq_len = plan.mesh, question.recipe.data.seq_len
    if mesh.pp > 1 and plan.pipeline.schedule not in SCHEDULES:
        raise refusal(TOOL, f"schedule {plan.pipeline.schedule}", "it has 1F1B, plain and interleaved",
                      where="plan.pipeline.schedule", fix="set it to 1f1b or interleaved")  # fmt: skip
    if seq_len % (2 * mesh.cp if mesh.cp > 1 else 1):
        raise refusal(TOOL, f"cp {mesh.cp} of {seq_len} positions", "each rank has a chunk from either end",
                      where="data.seq_len", fix=f"set it to a multiple of {2 * mesh.cp}")  # fmt: skip
    if plan.offload == "optimizer" and plan.sharding != "optimizer":
        raise refusal(TOOL, "offload optimizer without shards", "only its distributed optimizer can be offloaded",
                      where="plan.sharding", fix="set it to optimizer")  # fmt: skip
    if mesh.ep > 1 and plan.precision == "fp16":
        raise refusal(TOOL, "ep in fp16", "its expert parallelism needs bf16 or fp32", where="plan.precision",
                      fix="set it to bf16")  # fmt: skip
    if plan.sharding == "optimizer" and mesh.shards % mesh.ep:
        raise refusal(TOOL, f"ep {mesh.ep} over replicas of shards", "each replica holds all experts",
                      where="plan.mesh.ep", fix="use dp_shard in place of dp_replicate")  # fmt: skip


def ranks(plan: Plan, spec: ModelSpec, seq_len: int) -> Iterator[str]:
    """Yield the degrees, the overlap of communication with backward, and how layers are split into stages."""
    mesh = plan.mesh
    yield f"--tensor-model-parallel-size {mesh.tp}" + (" --sequence-parallel" if mesh.tp > 1 else "")
    yield f"--pipeline-model-parallel-size {mesh.pp}"
    if mesh.cp > 1:
        how = {"gather": "allgather", "exchange": "a2a", "ring": "p2p"}[plan.comm.context]
        yield f"--context-parallel-size {mesh.cp} --cp-comm-type {how}"
    if mesh.ep > 1:
        yield f"--expert-model-parallel-size {mesh.ep} --expert-tensor-parallel-size {mesh.tp}"
    if mesh.data > 1 and plan.comm.overlap:
        yield "--overlap-grad-reduce"
    if plan.sharding == "optimizer":
        yield "--use-distributed-optimizer --overlap-param-gather"
        if mesh.dp_replicate > 1:
            yield f"--num-distributed-optimizer-instances {mesh.dp_replicate}"
    if mesh.pp == 1:
        return
    counts = [len(each) for each in stage_ranges(spec, plan, seq_len=seq_len)]
    interleaved = plan.pipeline.schedule == "interleaved"
    if len(set(counts)) > 1:  # E is the embedding, t a layer, L the loss
        parts = [f"t*{count}" for count in counts]
        yield f"--pipeline-model-parallel-layout '{'|'.join(['E,' + parts[0], *parts[1:-1], parts[-1] + ',L'])}'"
    elif interleaved:
        yield f"--num-layers-per-virtual-pipeline-stage {counts[0]}"
    rounds = max(1, plan.grad_accum // plan.mesh.pp)
    if interleaved and plan.grad_accum // rounds != plan.mesh.pp:
        yield f"--microbatch-group-size-per-virtual-pipeline-stage {plan.grad_accum // rounds}"


def training(plan: Plan, spec: ModelSpec, train: TrainSection, seq_len: int) -> Iterator[str]:
    """Yield batch, precision, recompute and optimizer. The loss is divided by the tokens of the global batch."""
    yield f"--micro-batch-size {plan.micro_batch} --global-batch-size {plan.global_batch} --calculate-per-token-loss"
    yield f"--train-iters {train.steps} --seed {train.seed % 2**31}"
    match plan.precision:
        case "bf16":
            yield "--bf16"
        case "fp16":  # the loss scale starts and changes as ours
            yield "--fp16 --initial-loss-scale 65536 --loss-scale-window 2000 --hysteresis 1"
            yield "--accumulate-allreduce-grads-in-fp32"
        case "fp8":  # one scale per tensor
            yield "--bf16 --fp8-format hybrid --fp8-recipe tensorwise"
    match plan.recompute:
        case "full":
            yield "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        case "selective":
            yield "--recompute-granularity selective --recompute-modules core_attn"
        case "elementwise":
            raise refusal(TOOL, "recompute elementwise", "it recomputes whole modules", where="plan.recompute",
                          fix="set it to selective or none")  # fmt: skip
        case int() as stride:  # every k-th layer becomes as many layers at the start of each stage
            counts = {-(-len(each) // stride) for each in stage_ranges(spec, plan, seq_len=seq_len)}
            if len(counts) > 1:
                raise refusal(TOOL, f"recompute {stride} with these stages", "it recomputes equally many layers "
                              "of each", where="plan.recompute", fix="set it to full or none")  # fmt: skip
            yield f"--recompute-granularity full --recompute-method block --recompute-num-layers {counts.pop()}"
    constants = train.optimizer
    yield f"--optimizer adam --adam-beta1 {constants.beta1} --adam-beta2 {constants.beta2} --adam-eps {constants.eps}"
    yield f"--weight-decay {constants.weight_decay} --clip-grad {train.clip_norm}"
    if plan.offload == "optimizer" or constants.states == "bf16":
        yield "--use-precision-aware-optimizer"
    if plan.offload == "optimizer":
        yield "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d"
    if constants.states == "bf16":
        yield "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
    wanted = train.schedule
    yield f"--lr {train.lr} --min-lr {train.lr * wanted.floor} --lr-warmup-iters {wanted.warmup_steps}"
    yield f"--lr-decay-style {DECAYS[wanted.kind]} --lr-decay-iters {train.steps}"
    if wanted.kind == "wsd":
        decay_steps = wanted.decay_steps or max(1, train.steps // 5)
        yield f"--lr-wsd-decay-style linear --lr-wsd-decay-iters {decay_steps}"


def notes(plan: Plan) -> Iterator[str]:
    """Yield what Megatron decides itself."""
    yield "MEGATRON is a clone of Megatron-LM, DATA the prefix of the output of its tools/preprocess_data.py"
    if plan.recompute == "selective":
        yield "selective recomputes only core attention"
    if isinstance(plan.recompute, int):
        yield f"the first layers of each stage are recomputed, as many as every {plan.recompute}-th layer would be"
    if plan.compile:
        yield "blocks are not compiled: Megatron has its own fused kernels"
    if plan.mesh.data > 1:
        yield "gradient bucket size depends on the number of data ranks"
