"""How long one rank computes: products by their flops, the rest by the bytes it moves."""

from dataclasses import dataclass

from trimaran.core import Bytes, Flops, Plan, Seconds
from trimaran.cost.memory import LOGIT_BYTES
from trimaran.hardware import Device
from trimaran.models import ModelSpec

# Few and physical: bytes are counted operator by operator, shares were set so that whole steps agree with one H200
# (torch 2.11, decoders from 0.9M to 2B, eager and compiled) and with Xeon cores (torch 2.13, from 0.1M to 15M).
HALF_WIDTH = {"cuda": 256, "cpu": 32}  # the width at which a product reaches half of the achievable rate
ATTENTION_SHARE = {"cuda": 0.5, "cpu": 0.3}  # of the achievable rate, counting only what the causal mask leaves
STREAM_SHARE = {"cuda": 0.85, "cpu": 0.7}  # of the memory bandwidth: elementwise operators, fresh outputs
UPDATE_SHARE = {"cuda": 0.65, "cpu": 1.0}  # and the optimizer, in place
OPERATOR_SECONDS = {"cuda": Seconds(2e-5), "cpu": Seconds(1e-5)}  # for the host to start one
UPDATE_BYTES = 40  # a parameter: AdamW reads 16 and writes 12, clipping reads 8 and writes 4
BACKWARD_ATTENTION = 2.5  # flash attention computes its scores again

# Bytes that the elementwise operators of a layer's forward move for each token, times the widths of stream (norms,
# residuals, casts), query and key (rotary positions) and feed-forward (SwiGLU). Compiling fuses most of them.
TRAFFIC = {
    ("fp32", False): (64, 44, 20),
    ("bf16", False): (66, 42, 10),
    ("fp32", True): (32, 8, 12),
    ("bf16", True): (32, 4, 6),
}
OPERATORS_PER_LAYER = {False: 60, True: 50}  # of a forward, by whether it is compiled
WEIGHTS_PER_LAYER = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one micro-batch asks of one rank in a forward pass."""

    product_flops: Flops
    attention_flops: Flops
    moved_bytes: Bytes
    num_operators: int


def forward_work(spec: ModelSpec, plan: Plan, *, seq_len: int) -> Work:
    """Return the work of one micro-batch's forward. A forward is a third of `spec.flops_per_token`."""
    tokens = plan.micro_batch * seq_len
    product = spec.flops_per_token(0)
    stream, rotary, gate = TRAFFIC[plan.precision, plan.compile]
    ffn = spec.ffn
    if (experts := spec.block.experts) is not None:
        ffn = experts.top_k * experts.ffn + experts.shared_ffn
    per_layer = stream * spec.hidden + rotary * (spec.heads + spec.kv_heads) * spec.head_dim + gate * ffn
    moved = tokens * (spec.layers * per_layer + LOGIT_BYTES * spec.vocab)
    if plan.precision == "bf16":  # weights are read in fp32 and written in bf16 before a product can have them
        moved += 6 * spec.num_parameters
    return Work(
        product_flops=Flops(tokens * product / 3),
        attention_flops=Flops(tokens * (spec.flops_per_token(seq_len) - product) / 3),
        moved_bytes=Bytes(int(moved)),
        num_operators=spec.layers * OPERATORS_PER_LAYER[plan.compile],
    )


def forward_seconds(work: Work, device: Device, *, precision: str, width: int) -> Seconds:
    """Return how long a forward takes; `width` is that of the narrowest common product, the model's hidden size.

    A device that is fed slower than it computes waits for the host: then starting the operators is what takes time.
    """
    rate = device.achievable_flops(precision)
    product = work.product_flops / (rate * width / (width + HALF_WIDTH[device.kind]))
    attention = work.attention_flops / (rate * ATTENTION_SHARE[device.kind])
    moved = work.moved_bytes / (device.memory_bandwidth * STREAM_SHARE[device.kind])
    return Seconds(max(product + attention + moved, work.num_operators * OPERATOR_SECONDS[device.kind]))


def backward_work(work: Work) -> Work:
    """Return the work of the backward that follows: each product twice, attention with its scores once more."""
    return Work(
        product_flops=Flops(2 * work.product_flops),
        attention_flops=Flops(BACKWARD_ATTENTION * work.attention_flops),
        moved_bytes=Bytes(2 * work.moved_bytes),
        num_operators=work.num_operators * 3 // 2,
    )


def update_seconds(num_parameters: int, device: Device, *, num_weights: int) -> Seconds:
    """Return how long clipping and AdamW take over the parameters of one rank, `num_weights` tensors of them."""
    moved = UPDATE_BYTES * num_parameters / (device.memory_bandwidth * UPDATE_SHARE[device.kind])
    return Seconds(max(moved, 2 * num_weights * OPERATOR_SECONDS[device.kind]))
