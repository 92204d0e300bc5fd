"""Step time constants of each training system: its kernels, its host overhead, and what it overlaps."""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from trimaran.core import Seconds


class ElementwiseBytes(NamedTuple):
    """Bytes per token that the elementwise operators of a layer's forward move, in 16-bit training.

    residual: per hidden feature: norms, residual additions, casts.
    rotary: per feature of queries and keys.
    gate: per feature of a gated feed-forward.
    routed: per hidden feature of each copy of a token that is sent to an expert and back.
    fp8_cast: per element, not per token: to cast a matmul's inputs, its weights (at every micro-batch) and its
        gradients to fp8. By default each cast finds the maximum (read 2) and casts (read 2, write 1), twice.
    backward: bytes of backward per byte of forward; 1.6 is from full steps on an H200.
    """

    residual: float
    rotary: float
    gate: float
    routed: float = 64  # separate operators: sort, copy, scale, add (a small MoE model on an H200)
    fp8_cast: tuple[float, float, float] = (6, 6, 12)
    backward: float = 1.6


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
    """How many kernels a step launches, memory fills and copies included.

    eager, compiled: of a layer's forward and backward, per micro-batch.
    micro_batch: of embedding, head and loss, per micro-batch.
    step: of the update, the counters and the metrics, per step.
    """

    eager: float = 0
    compiled: float = 0
    micro_batch: float = 0
    step: float = 0


NO_LAUNCHES = Launches()  # of a stack whose other constants contain the time between kernels
# Counted in traces of 4 and 12 layers, with 1 and 3 micro-batches (one H200, torch 2.11).
TRIMARAN_LAUNCHES = Launches(eager=59, compiled=40, micro_batch=16, step=40)
HF_LAUNCHES = Launches(eager=150, compiled=48, micro_batch=50, step=40)


class HostOverhead(NamedTuple):
    """Host seconds to launch the kernels of a step, on the host of `device_catalogue.HOST_LAUNCH_SECONDS`.

    eager, compiled: of a layer's forward and backward, per micro-batch.
    tp: what tensor parallelism adds to them.
    tp_across_nodes: what each tensor-parallel rank adds in a pipeline across nodes.
    unit: what an FSDP unit adds, a block or several small ones, per micro-batch.
    micro_batch: of embedding, head, loss and hooks, per micro-batch.
    replay: of a micro-batch that is replayed as CUDA graphs, instead of all of the above.
    step: of the update, the counters and the metrics, per step.
    launches: the kernels that it launches.
    runs_ahead: it launches the next step before it reads results of this one. If not, as where the loss is logged at
        every step, it cannot use the time of the update and the head to catch up.
    """

    eager: Seconds
    compiled: Seconds
    tp: Seconds
    tp_across_nodes: Seconds = Seconds(0.0)
    unit: Seconds = Seconds(0.0)
    micro_batch: Seconds = Seconds(0.0)
    replay: Seconds = Seconds(0.0)
    step: Seconds = Seconds(0.0)
    launches: Launches = NO_LAUNCHES
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
    """What a system sends between the ranks that share a micro-batch, and what it overlaps.

    tp_overlap: fraction of tensor parallelism's communication that compute hides.
    splits_sequence: tensor parallelism also splits the residual stream (sequence parallelism): ranks gather the
        sequence and scatter the sum. If not, they reduce it, and each computes all norms and additions.
    hops: latency of the hops of gathers and reductions between data ranks (`collective.ring_of`).
    overlaps_chunks: with several stages per rank, gathers and reductions of one stage's weights run beside the
        micro-batches of the others, and so do messages between stages.
    sends_once_per_node: a token is sent once to each node that has experts for it, and forwarded inside.
    expert_imbalance: tokens of the busiest expert-parallel rank, relative to the mean.
    """

    tp_overlap: float = 0.0
    splits_sequence: bool = True
    hops: Literal["network", "own"] = "network"
    overlaps_chunks: bool = False
    sends_once_per_node: bool = False
    expert_imbalance: float = 1.2


USUAL_COMM = CommProfile()


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeProfile:
    """The kernels that a system runs, and what it overlaps.

    eager, compiled: memory traffic of elementwise operators; with joint projections eager is EAGER_JOINT.
    moved_logit_bytes: bytes moved per logit, forward and backward.
    recompute: torch's stops before a layer's last matmul and, if selective, saves every second matmul; a complete
        one repeats the full layer or, if selective, attention.
    dp_overlap: fraction of compute that can hide gradients of replicas, and communication of shards.
    crowded_fraction: above this fraction of device memory the allocator retries and steps get slower.
    sustained: `roofline.SUSTAINED_FRACTION` with this software, by device, where it differs.
    update: on a GPU, torch's optimizer, or one kernel per parameter that also clips.
    """

    attention: Literal["torch", "flash-1", "flash-2"] = "torch"
    eager: ElementwiseBytes = EAGER_FP32_RESIDUAL
    compiled: ElementwiseBytes = COMPILED_FP32_RESIDUAL
    moved_logit_bytes: float = 36  # cast to fp32, log-softmax and its gradient as separate operators
    recompute: Literal["torch", "complete"] = "torch"
    host: HostOverhead = TORCH_HOST
    parameter_bytes: ParameterBytes = PARAMETER_BYTES
    comm: CommProfile = USUAL_COMM
    dp_overlap: tuple[float, float] = (1.0, 1.0)
    crowded_fraction: float = 0.94  # assumed: between the published ones
    sustained: tuple[tuple[str, float], ...] = ()
    update: Literal["torch", "kernel"] = "torch"


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
