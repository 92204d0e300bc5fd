"""The training systems whose behaviour the cost model knows: constants of their memory and of their step time."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from trimaran.core import Seconds, UserError, did_you_mean
from trimaran.cost.rank_part import Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What one layer saves for backward, per token, in 16-bit precision.

    gated_tensors, plain_tensors: saved tensors of feed-forward width, in a layer with and without a gate.
    tp_splits: what tensor parallelism splits besides heads and features: the norms' tensors (sequence parallelism),
        also the projections' inputs, or nothing.
    selective: what selective recompute saves: every second matmul, every second one from the first on,
        or everything but attention scores, which flash attention never stores.
    """

    norm_bytes: float  # bytes per hidden feature that both norms save
    projection_bytes: float  # bytes per hidden feature that the projections save of their inputs
    unfused_norm_bytes: float = 8  # what norms save besides, where they are not fused: on a CPU
    input_bytes: float = 2  # bytes per hidden feature of the layer's own input, which is all that full recompute saves
    gated_tensors: float = 4
    plain_tensors: float = 2
    mask_bytes: float = 0  # bytes per hidden feature of dropout masks. Only layers without a gate have them.
    repeats_kv: bool = False  # keys and values are saved once per query head instead of once per KV head
    tp_splits: Literal["stream", "all", "nothing"] = "stream"
    selective: Literal["second", "first", "attention"] = "second"
    drops_unused: bool = False  # recompute by operator saves no output that backward does not need: blocks are compiled

    def in_fp32(self) -> "Saved":
        return replace(
            self,
            norm_bytes=2 * self.norm_bytes,
            projection_bytes=2 * self.projection_bytes,
            input_bytes=2 * self.input_bytes,
        )

    def in_fp8(self) -> "Saved":
        """Return the same with matmul inputs saved in one byte."""
        return replace(
            self,
            projection_bytes=self.projection_bytes / 2,
            gated_tensors=self.gated_tensors - 0.5,
            plain_tensors=self.plain_tensors - 0.5,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """The bytes that one training system holds in 16-bit precision. In fp32, weights and gradients take 4 bytes."""

    weight_bytes: int = 4  # per parameter. With 2 bytes there is also an fp32 master weight.
    gradient_bytes: int = 4  # per parameter, while gradients accumulate
    extra_gradient_bytes: int = 0  # per parameter, 16-bit gradients held beside the accumulated ones
    # A second copy of the gradients: bytes per parameter on replicas, total bytes on sharded ranks.
    bucket_bytes: tuple[int, int] = (0, 0)
    # Temporary bytes of the optimizer update: per parameter of a sharded model, per parameter that the rank owns.
    update_bytes: tuple[int, int] = (0, 0)
    fsdp: Literal["root", "ends", "no"] = "root"  # gathers embedding and head in one root unit, or each at its own end
    # Per logit: while the loss is computed, while it waits for backward, and while the loss is computed by ranks that
    # split the vocabulary (0: only logits and their gradient, in the precision of the matmul).
    logit_bytes: tuple[int, int, int] = (12, 8, 12)
    # Per token and feature under tensor parallelism: gathered inputs that a rank saves, buffers that ranks exchange.
    gathered_input_bytes: tuple[float, float] = (0, 0)
    # Allocator overhead as a fraction of temporary memory: unsharded, sharded, on the worst of many ranks.
    fragmentation: tuple[float, float, float] = (0.10, 0.25, 0.25)
    # The rank and the figure that this system's log shows.
    logged: tuple[Literal["fullest", "first", "last"], Literal["allocated", "reserved"]] = ("fullest", "allocated")
    split: Split = "cheapest"  # how layers are split into pipeline stages
    saved: Mapping[str, Saved] = field(hash=False)  # by a layer, by how it runs (eager, compiled, precision, sharded)

    @property
    def keeps_full_weights(self) -> bool:
        """Whether weights stay unsharded below ZeRO-3."""
        return self.fsdp == "no"


def _by_execution(eager: Saved, **others: Saved) -> dict[str, Saved]:
    """Return what a layer saves for each way to run it. Entries that are not given are derived from the eager one."""
    compiled = replace(
        eager,
        norm_bytes=min(4, eager.norm_bytes),
        projection_bytes=min(4, eager.projection_bytes),
        gated_tensors=3,
        repeats_kv=False,
    )
    variants = {"eager": eager, "compiled": compiled, "fp32": eager.in_fp32()} | others
    return {
        "fp8": eager.in_fp8(),
        "compiled fp8": variants["compiled"].in_fp8(),
        "compiled fp32": variants["fp32"],
    } | variants


# Our decoder's residual stream is 16-bit from the embedding on. Norms save their input (one kernel on a GPU, eager or
# compiled). Projections save the output of both norms. SwiGLU saves gate, silu(gate), up and their product. A
# compiled fp8 block recomputes the inputs of its matmuls, including the casts.
TRIMARAN_EAGER = Saved(norm_bytes=4, projection_bytes=4, unfused_norm_bytes=12)
TRIMARAN_FP32 = Saved(norm_bytes=8, projection_bytes=8, input_bytes=4, repeats_kv=True)
TRIMARAN_COMPILED = Saved(norm_bytes=4, projection_bytes=4, gated_tensors=3, drops_unused=True)
# With split weights, projections of the same input are one matmul (nets/decoder/joint_projections.py).
# Its backward recomputes SwiGLU.
JOINT_PROJECTIONS = Saved(norm_bytes=4, projection_bytes=4, gated_tensors=2)
TRIMARAN = _by_execution(
    TRIMARAN_EAGER,
    compiled=TRIMARAN_COMPILED,
    fp32=TRIMARAN_FP32,
    **{
        "compiled fp32": replace(TRIMARAN_FP32, drops_unused=True),
        "compiled fp8": replace(TRIMARAN_COMPILED, projection_bytes=0, gated_tensors=2),
    },
)
# torchtitan's norms cast to fp32 (6 bytes each) and keys are repeated. Its selective recompute saves the first matmul.
TORCHTITAN = Saved(norm_bytes=12, projection_bytes=4, repeats_kv=True, selective="first")
# Its fp8 linears (torchao) are meant for compiled blocks, which recompute the casts, as ours do on an H200.
TORCHTITAN_FP8 = Saved(norm_bytes=4, projection_bytes=0, gated_tensors=2, selective="first")
# Megatron's fused norms save their input, the matmuls save the norms' output, and dropout masks take a byte. With
# sequence parallelism a rank saves its slice of those, and gathers the inputs of matmuls again in backward.
MEGATRON = Saved(
    norm_bytes=4, projection_bytes=4, gated_tensors=3, mask_bytes=2, tp_splits="all", selective="attention"
)
# nanotron also saves a second, sequence-first copy of attention's output.
NANOTRON = Saved(norm_bytes=6, projection_bytes=4, tp_splits="all", selective="attention")
FOUNDRY = Saved(norm_bytes=4, projection_bytes=4)
# transformers' norms save an fp32 cast and the normalised tensor. Under autocast the residual stream is fp32 too.
TRANSFORMERS = Saved(norm_bytes=12, projection_bytes=4, repeats_kv=True)
AUTOCAST = Saved(norm_bytes=16, projection_bytes=10, input_bytes=4, repeats_kv=True)

MEMORY_PROFILES = {
    "trimaran": MemoryProfile(saved=TRIMARAN, logit_bytes=(12, 8, 0)),
    "torchtitan": MemoryProfile(
        saved=_by_execution(TORCHTITAN, **{"fp8": TORCHTITAN_FP8, "compiled fp8": TORCHTITAN_FP8}), fsdp="ends",
    ),
    # bf16 weights, fp32 gradients, a distributed optimizer. The loss overwrites fp32 logits with their gradient.
    "megatron": MemoryProfile(
        saved=_by_execution(MEGATRON), weight_bytes=2, fsdp="no", logit_bytes=(6, 4, 6),
        fragmentation=(0.15, 0.15, 0.15), logged=("last", "allocated"),
    ),
    # bf16 gradients are added to fp32 ones after each backward. Logits exist in bf16, in fp32 and as softmax.
    # Four figures are fitted to the published 1B and 8B runs: two fractions of `fragmentation`; 6 bytes for the update
    # (flattening twice for a reduce-scatter takes 8, but the rest reuses free blocks); and 2.4 of the 4 bytes of
    # gathered inputs. The runs fall into two kinds that differ by just these inputs, and no column tells them apart.
    # With a pipeline most runs are of the kind that gathers again.
    "nanotron": MemoryProfile(
        saved=_by_execution(NANOTRON), weight_bytes=2, extra_gradient_bytes=2, update_bytes=(6, 0), fsdp="no",
        logit_bytes=(10, 4, 10), gathered_input_bytes=(2.4, 6), fragmentation=(0.10, 0.10, 0.22),
        logged=("first", "reserved"), split="thresholds",
    ),
    # MPT: a fused loss, 16-bit throughout. Its micro-batches are the largest that fit, which bounds both figures.
    "llm-foundry": MemoryProfile(saved=_by_execution(FOUNDRY), logit_bytes=(4, 2, 4), fragmentation=(0.05, 0.05, 0.05)),
    # Two buckets of 5e8 gradients. Each rank casts its shard of them to fp32 for the update.
    "deepspeed": MemoryProfile(
        saved=_by_execution(TRANSFORMERS), weight_bytes=2, gradient_bytes=2, bucket_bytes=(0, 2 * 10**9),
        update_bytes=(0, 4), fsdp="no", logit_bytes=(14, 8, 14),
    ),
    # Replicas reduce copies of their gradients. AdamW (foreach) holds one temporary list of tensors.
    "hf": MemoryProfile(
        saved=_by_execution(AUTOCAST, **{"sharded eager": TRANSFORMERS}), bucket_bytes=(4, 0), update_bytes=(0, 4),
        logit_bytes=(14, 8, 14),
    ),
}  # fmt: skip
# Our trainer on other engines than its own. On DeepSpeed's, all is 16-bit except gradients, which accumulate in fp32
# (core/engine_rules.py).
ENGINE_PROFILES = {
    "deepspeed": replace(
        MEMORY_PROFILES["trimaran"],
        saved=_by_execution(Saved(norm_bytes=4, projection_bytes=4)),
        weight_bytes=2,
        fsdp="no",
    )
}
# Our trainer on a single device (`Plan.splits_weights`): matmuls read the upper 16 bits of each matrix, the lower 16
# bits lie beside it, and gradients stay in 16 bits as the matmuls produce them.
SPLIT_WEIGHTS = replace(
    MEMORY_PROFILES["trimaran"],
    weight_bytes=2,
    gradient_bytes=2,
    saved=TRIMARAN | {"eager": JOINT_PROJECTIONS, "compiled": JOINT_PROJECTIONS},
)


class ElementwiseBytes(NamedTuple):
    """Bytes per token that the elementwise operators of a layer's forward move, in 16-bit training.

    routed: per hidden feature of each copy of a token that is sent to an expert and back.
    fp8_cast: per element, not per token: to cast a matmul's inputs, its weights (at every micro-batch) and its
        gradients to fp8. By default each cast finds the maximum (read 2) and casts (read 2, write 1), twice.
    """

    residual: float  # per hidden feature: norms, residual additions, casts
    rotary: float  # per feature of queries and keys
    gate: float  # per feature of a gated feed-forward
    routed: float = 64  # separate operators: sort, copy, scale, add (a small MoE model on an H200)
    fp8_cast: tuple[float, float, float] = (6, 6, 12)
    backward: float = 1.6  # bytes of backward per byte of forward; 1.6 is from full steps on an H200


# Full steps of our trainer on one H200 (benchmarks/h200.jsonl) with an fp32 residual stream: norms and rotary
# embeddings as separate fp32 operators, and as compiled by inductor.
EAGER_FP32_RESIDUAL = ElementwiseBytes(96, 62, 14)
COMPILED_FP32_RESIDUAL = ElementwiseBytes(44, 6, 8)
# Our decoder with a 16-bit residual stream. Compiled: the kernels of a layer of 160M and of 1B on one H200, as traced.
# Eager: half of what the fp32 stream moves.
EAGER_16_BIT_RESIDUAL = ElementwiseBytes(48, 62, 14)
COMPILED_16_BIT_RESIDUAL = ElementwiseBytes(19, 4, 6.75)
# Eager blocks with joint projections have our kernels for norms, rotary embeddings and the gate's backward; its forward
# reads halves of a matmul's output, at a third of the bandwidth. Traced: layers of Qwen2.5-1.5B and 3B on one H200.
EAGER_JOINT = ElementwiseBytes(23, 5.5, 23, backward=0.7)
# Counted, with one kernel per operator: norm (read 2, write 2), residual (4, 2), rotary (2, 2), silu (2, 2),
# multiplication (4, 2). Copies of tokens are made (2, 2), scaled (2, 2) and added (4).
FUSED = ElementwiseBytes(20, 4, 10, 12)


class Launches(NamedTuple):
    """How many kernels a step launches, memory fills and copies included."""

    eager: float = 0  # of a layer's forward and backward, per micro-batch
    compiled: float = 0  # the same of a compiled one
    micro_batch: float = 0  # of embedding, head and loss, per micro-batch
    step: float = 0  # of the update, the counters and the metrics, per step


NO_LAUNCHES = Launches()  # of a stack whose other constants contain the time between kernels
# Counted in traces of 4 and 12 layers, with 1 and 3 micro-batches (one H200, torch 2.11).
TRIMARAN_LAUNCHES = Launches(eager=59, compiled=40, micro_batch=16, step=40)
HF_LAUNCHES = Launches(eager=150, compiled=48, micro_batch=50, step=40)


class HostOverhead(NamedTuple):
    """Host seconds to launch the kernels of a step, on the host of `device_catalogue.HOST_LAUNCH_SECONDS`.

    eager, compiled: of a layer's forward and backward, per micro-batch.
    runs_ahead: it launches the next step before it reads results of this one. If not, as where the loss is logged at
        every step, it cannot use the time of the update and the head to catch up.
    """

    eager: Seconds
    compiled: Seconds
    tp: Seconds  # what tensor parallelism adds to them
    tp_across_nodes: Seconds = Seconds(0.0)  # what each tensor-parallel rank adds in a pipeline across nodes
    unit: Seconds = Seconds(0.0)  # what an FSDP unit adds, a block or several small ones, per micro-batch
    micro_batch: Seconds = Seconds(0.0)  # of embedding, head, loss and hooks, per micro-batch
    replay: Seconds = Seconds(0.0)  # of a micro-batch that is replayed as CUDA graphs, instead of all of the above
    step: Seconds = Seconds(0.0)  # of the update, the counters and the metrics, per step
    launches: Launches = NO_LAUNCHES  # the kernels that it launches
    runs_ahead: bool = False


# The host of one H200, from steps of 1,024 tokens. The overhead of tensor parallelism is assumed.
TORCH_HOST = HostOverhead(Seconds(2.3e-3), Seconds(1.2e-3), Seconds(1e-3))
# Our trainer on the same host. Compiled: forward 11 and backward 15 ms with 12 layers of width 768. The others: their
# ratio to it with 4 and 12 layers of width 256 and 128 tokens, where the device is never the limit. The hooks of FSDP
# (`unit`): 2.4 to 3.3 ms with 22 and 28 units on a host that took 1.2 times as long as predicted without FSDP
# (benchmarks/fsdp_host_time.py). Tensor parallelism is assumed.
TRIMARAN_HOST = HostOverhead(
    eager=Seconds(2.2e-3), compiled=Seconds(2e-3), tp=Seconds(1e-3), unit=Seconds(2.2e-3), micro_batch=Seconds(2e-3),
    replay=Seconds(0.3e-3), step=Seconds(4e-3), launches=TRIMARAN_LAUNCHES, runs_ahead=True,
)  # fmt: skip
# Blocks of a Hugging Face model in our trainer, measured in the same way.
HF_HOST = TRIMARAN_HOST._replace(eager=Seconds(2.8e-3), compiled=Seconds(1.1e-3), launches=HF_LAUNCHES)


class ParameterBytes(NamedTuple):
    """Bytes per parameter: moved to `cast` it per micro-batch and to `accumulate` its gradient, sent as `gradient`."""

    cast: float = 0
    accumulate: float = 12
    gradient: int = 4


PARAMETER_BYTES = ParameterBytes()


class CommProfile(NamedTuple):
    """What a system sends between the ranks that share a micro-batch, and what it overlaps."""

    tp_overlap: float = 0.0  # fraction of tensor parallelism's communication that compute hides
    # Tensor parallelism also splits the residual stream (sequence parallelism): ranks gather the sequence and scatter
    # the sum. If not, they reduce it, and each computes all norms and additions.
    splits_sequence: bool = True
    hops: Literal["network", "own"] = "network"  # latency of those between data ranks (`collective.ring_of`)
    # With several stages per rank, gathers and reductions of one stage's weights run beside the micro-batches of the
    # others, and so do messages between stages.
    overlaps_chunks: bool = False
    sends_once_per_node: bool = False  # a token is sent once to each node that has experts for it, and forwarded inside
    expert_imbalance: float = 1.2  # tokens of the busiest expert-parallel rank, relative to the mean


USUAL_COMM = CommProfile()


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeProfile:
    """The kernels that a system runs, and what it overlaps."""

    attention: Literal["torch", "flash-1", "flash-2"] = "torch"
    eager: ElementwiseBytes = EAGER_FP32_RESIDUAL  # with joint projections it is EAGER_JOINT
    compiled: ElementwiseBytes = COMPILED_FP32_RESIDUAL
    moved_logit_bytes: float = 36  # cast to fp32, log-softmax and its gradient as separate operators
    # torch's stops before a layer's last matmul and, if selective, saves every second matmul; a complete one repeats
    # the full layer or, if selective, attention.
    recompute: Literal["torch", "complete"] = "torch"
    host: HostOverhead = TORCH_HOST
    parameter_bytes: ParameterBytes = PARAMETER_BYTES
    comm: CommProfile = USUAL_COMM
    dp_overlap: tuple[float, float] = (1.0, 1.0)  # of compute, that hides gradients of replicas, and traffic of shards
    crowded_fraction: float = 0.94  # of the memory, above which the allocator retries; assumed, between published ones
    sustained: tuple[tuple[str, float], ...] = ()  # `roofline.SUSTAINED_FRACTION` by device, where it differs
    update: Literal["torch", "kernel"] = "torch"  # torch's, or one kernel per parameter that also clips


_TORCHTITAN = TimeProfile()
TIME_PROFILES = {
    # Autocast reads fp32 weights and writes 16-bit ones. An 8B model that is predicted to fill 0.887 of an H200 was not
    # slow. A fuller device was not measured.
    "trimaran": replace(
        _TORCHTITAN, eager=EAGER_16_BIT_RESIDUAL, compiled=COMPILED_16_BIT_RESIDUAL,
        host=TRIMARAN_HOST, parameter_bytes=ParameterBytes(cast=6), crowded_fraction=0.89, update="kernel",
    ),
    "torchtitan": replace(_TORCHTITAN, attention="flash-2"),
    # Fused kernels. Transformer Engine prefers cuDNN's attention from Hopper on and FlashAttention 2 before, as torch
    # does (`get_attention_backend`). Weight-gradient matmuls accumulate in fp32 directly. Half of tensor parallelism's
    # gathers overlap with a matmul (async_tensor_model_parallel_allreduce of its linear layers). With interleaved
    # stages, it overlaps reductions, gathers and messages with other stages (overlap_grad_reduce,
    # overlap_param_gather, overlap_p2p_comm). An fp8 cast reads 16 bits and writes two layouts; weights are cast once
    # per step. Its MoE dispatchers (DeepEP, HybridEP) cross the network once per node.
    # Set by NVIDIA's run of Llama 3.1 405B in bf16 on H100: 0.85 of the best matmul, and nothing is slow where 0.95 of
    # the memory is full. Set by its runs of Grok-1: no imbalance, as its recipes force an even one.
    "megatron": TimeProfile(
        attention="torch", eager=FUSED._replace(gate=6, fp8_cast=(4, 0, 4)), recompute="complete",
        parameter_bytes=ParameterBytes(accumulate=6), crowded_fraction=1.0,
        comm=CommProfile(tp_overlap=0.25, overlaps_chunks=True, sends_once_per_node=True, expert_imbalance=1.0),
        sustained=(("H100", 0.85), ("H800", 0.85)),
    ),
    # flash-attn's norm and rotary kernels. Separate kernels accumulate gradients in fp32, and nothing overlaps
    # ZeRO-1's. The host: 70 ms for 16 layers and 141 for 32 with tp 2 to 8; in a pipeline across nodes 10, 15, 26 and
    # 52 ms per layer with tp 2, 4, 8 and 16, in 1B and 8B alike (the reason is unknown). Runs above 0.88 of the memory
    # are slow.
    "nanotron": TimeProfile(
        attention="flash-2", eager=FUSED, recompute="complete",
        host=HostOverhead(Seconds(2e-3), Seconds(2e-3), Seconds(2.4e-3), Seconds(2.9e-3)),
        parameter_bytes=ParameterBytes(cast=10, accumulate=0), dp_overlap=(0.33, 0.0), crowded_fraction=0.88,
    ),
    # Its micro-batches are the largest that fit, and still fast. Its clusters are not nanotron's, whose hops are slow;
    # its own runs on up to 128 A100 are predicted as well with either latency, so NCCL's is taken.
    "llm-foundry": TimeProfile(
        attention="flash-1", eager=FUSED, parameter_bytes=ParameterBytes(gradient=2), crowded_fraction=0.98,
        comm=CommProfile(hops="own"),
    ),
    "deepspeed": TimeProfile(attention="flash-2", parameter_bytes=ParameterBytes(gradient=2)),
    "hf": TimeProfile(attention="flash-2"),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One training system: the constants of its memory and of its step time."""

    name: str
    memory: MemoryProfile
    time: TimeProfile
    joins_projections: bool = False  # projections of the same input are one matmul, if `Plan.joins_projections`
    joins_blocks: bool = False  # small blocks share FSDP units (`core/engine_rules.py`)
    default_sharding: str = "none"  # what its data ranks shard unless a log says so
    gathers_fp8: bool = False  # an fp8 plan gathers sharded weights of the layers in one byte (torchao)


STACKS = {name: Stack(name=name, memory=MEMORY_PROFILES[name], time=TIME_PROFILES[name]) for name in MEMORY_PROFILES}
STACKS["trimaran"] = replace(STACKS["trimaran"], joins_projections=True, joins_blocks=True)
STACKS["torchtitan"] = replace(STACKS["torchtitan"], gathers_fp8=True)
STACKS["megatron"] = replace(STACKS["megatron"], default_sharding="optimizer")  # its distributed optimizer

# Our trainer with the blocks of a Hugging Face model, whose own code launches the kernels of a layer.
HF_MODELS = replace(
    STACKS["trimaran"], time=replace(STACKS["trimaran"].time, host=HF_HOST), joins_projections=False, joins_blocks=False
)


@lru_cache(maxsize=len(STACKS))
def without_sequence_parallelism(stack: Stack) -> Stack:
    """Return the stack with tensor parallelism alone: every rank holds and normalises the whole residual stream."""
    saved = {key: replace(each, tp_splits="nothing") for key, each in stack.memory.saved.items()}
    comm = stack.time.comm._replace(splits_sequence=False)
    return replace(stack, memory=replace(stack.memory, saved=saved), time=replace(stack.time, comm=comm))


@lru_cache(maxsize=2 * len(STACKS))
def with_16_bit_gradients(stack: Stack) -> Stack:
    """Return the stack with gradients that are held, added up and reduced in 16 bits."""
    sent = stack.time.parameter_bytes._replace(gradient=2)
    return replace(
        stack, memory=replace(stack.memory, gradient_bytes=2), time=replace(stack.time, parameter_bytes=sent)
    )


def find_stack(name: str) -> Stack:
    """Return the stack called `name`."""
    if name not in STACKS:
        raise UserError(
            "P050.no-stack", where="stack", name=name, guess=did_you_mean(name, STACKS), stacks=", ".join(STACKS)
        )
    return STACKS[name]
