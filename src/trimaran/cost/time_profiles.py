"""How each training system spends its time: the kernels it runs, what its host does, what it hides."""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from trimaran.core import Seconds


class Traffic(NamedTuple):
    """Bytes that the elementwise operators of a layer's forward move for each token, in 16-bit training.

    They are times the width of the stream (norms, residuals, casts), of queries and keys (rotary positions), of the
    gated feed-forward, and of each copy of a token on its way to an expert and back. Backward moves
    `work.BACKWARD_MOVES` times as much.
    """

    stream: float
    rotary: float
    gate: float
    routed: float = 64  # operator by operator: sorted, copied, weighed, added up (a small mixture on an H200)


# Whole steps of our trainer on one H200 (benchmarks/h200.jsonl): norms and rotary positions operator by operator in
# fp32, and what inductor makes of them.
EAGER = Traffic(96, 62, 14)
COMPILED = Traffic(44, 6, 8)
# Our decoder with its stream in 16 bits: kernels of whole steps on one H200, compiled; eager, half of what the fp32
# stream moved.
NARROW = Traffic(48, 62, 14)
NARROW_COMPILED = Traffic(30, 6, 6)
# By count: one kernel a norm (reads 2 and writes 2), a residual (4 and 2), the rotation (2 and 2), silu (2 and 2), a
# product (4 and 2); copies of tokens are made (2 and 2), weighed (2 and 2) and added up (4) by one kernel each.
FUSED = Traffic(20, 4, 10, 12)


class HostOverhead(NamedTuple):
    """Seconds that the host needs to start one layer's forward and backward.

    `sliced` is what tensor parallelism adds, and `crossing` what each slice adds in a pipeline over several nodes.
    """

    eager: Seconds
    compiled: Seconds
    sliced: Seconds
    crossing: Seconds = Seconds(0.0)


# One H200's host, by steps of 1,024 tokens; what slices add is assumed.
TORCH_HOST = HostOverhead(Seconds(2.3e-3), Seconds(1.2e-3), Seconds(1e-3))


class Passing(NamedTuple):
    """Bytes of each parameter.

    Those that move when it is `cast` for a micro-batch and when its gradient is `added` to another, and those that
    travel to other ranks as its `gradient`.
    """

    cast: float = 0
    added: float = 12
    gradient: int = 4


PASSING = Passing()


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeProfile:
    """Which kernels a system runs, and what it hides.

    `logit_bytes` move for each score, forward and backward. `recompute` is torch's, which stops before a layer's last
    product and, when selective, keeps every second; or it does a whole layer again, and when selective its attention.
    `hidden_slices` is the share of tensor parallelism's talk that computing hides, `hides` the share of computing
    behind which the gradients of replicas travel, and all that is sharded. Above `crowded` of a device's memory the
    allocator looks for room again and again. What `sends_once` sends a token to each node with experts for it, which
    hands it on. A GPU's `update` is torch's own, or one kernel a parameter that clips on its way.
    """

    attention: Literal["torch", "flash-1", "flash-2"] = "torch"
    eager: Traffic = EAGER
    compiled: Traffic = COMPILED
    logit_bytes: float = 36  # a cast to fp32, log-softmax and its gradient, operator by operator
    recompute: Literal["torch", "whole"] = "torch"
    host: HostOverhead = TORCH_HOST
    passing: Passing = PASSING
    hidden_slices: float = 0.0
    hides: tuple[float, float] = (1.0, 1.0)
    crowded: float = 0.94  # assumed: between those that were published
    sends_once: bool = False
    update: Literal["torch", "kernel"] = "torch"


_TITAN = TimeProfile()
TIME_PROFILES = {
    # Autocast reads fp32 weights and writes 16-bit ones. An 8B model that is said to fill 0.887 of an H200 was not
    # slow; nobody has run us on a fuller one.
    "trimaran": replace(
        _TITAN, eager=NARROW, compiled=NARROW_COMPILED, passing=Passing(cast=6), crowded=0.89, update="kernel"
    ),
    "torchtitan": replace(_TITAN, attention="flash-2"),
    # Fused kernels; gradients are added up in fp32 as their product is written. Half of tensor parallelism's gathers
    # run beside a product (async_tensor_model_parallel_allreduce of its linear layers). Its dispatchers for mixtures
    # (DeepEP, HybridEP) cross the network once for each node.
    "megatron": TimeProfile(
        attention="flash-2", eager=FUSED._replace(gate=6), recompute="whole", passing=Passing(added=6),
        hidden_slices=0.25, sends_once=True,
    ),
    # flash-attn's norm and rotation; gradients are added up in fp32 by kernels of their own, and ZeRO-1's travel alone.
    # The host: 70 ms for 16 layers and 141 for 32, on 2 to 8 slices; in a pipeline over nodes 10, 15, 26 and 52 ms a
    # layer on 2, 4, 8 and 16 slices, in 1B and 8B alike (why is not known). Runs above 0.88 of the memory are slow.
    "nanotron": TimeProfile(
        attention="flash-2", eager=FUSED, recompute="whole",
        host=HostOverhead(Seconds(2e-3), Seconds(2e-3), Seconds(2.4e-3), Seconds(2.9e-3)),
        passing=Passing(cast=10, added=0), hides=(0.33, 0.0), crowded=0.88,
    ),
    # The micro-batch is the largest that fits, and still fast.
    "llm-foundry": TimeProfile(attention="flash-1", eager=FUSED, passing=Passing(gradient=2), crowded=0.98),
    "deepspeed": TimeProfile(attention="flash-2", passing=Passing(gradient=2)),
    "hf": TimeProfile(attention="flash-2"),
}  # fmt: skip
