"""How long one rank computes: products by their flops, the rest by the bytes it moves."""

from dataclasses import dataclass

from trimaran.core import Bytes, Flops, Plan, Seconds
from trimaran.cost.memory import LOGIT_BYTES, local_tokens, recomputed_layers
from trimaran.cost.pipeline import Part
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
# 16-bit stands for fp8 as well, which only products compute in; what casting to it moves was not measured.
TRAFFIC = {
    ("fp32", False): (64, 44, 20),
    ("16-bit", False): (66, 42, 10),
    ("fp32", True): (32, 8, 12),
    ("16-bit", True): (32, 4, 6),
}
RATE = {"fp16": "bf16"}  # tensor cores compute both alike, and the catalogue lists one
ATTENTION_RATE = RATE | {"fp8": "bf16"}
OPERATORS_PER_LAYER = {False: 60, True: 50}  # of a forward, by whether it is compiled
WEIGHTS_PER_LAYER = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one micro-batch asks of one rank in a forward pass."""

    product_flops: Flops
    attention_flops: Flops
    moved_bytes: Bytes
    num_operators: int


def forward_work(spec: ModelSpec, plan: Plan, part: Part, *, seq_len: int) -> Work:
    """Return the work of one micro-batch's forward on a rank with `part`. It is a third of `spec.flops_per_token`.

    Tensor parallelism splits every product, and sequence parallelism what lies between them.
    """
    tokens, tp = local_tokens(plan, seq_len), plan.mesh.tp
    stream, rotary, gate = TRAFFIC["fp32" if plan.precision == "fp32" else "16-bit", plan.compile]
    ffn = spec.ffn
    if (experts := spec.block.experts) is not None:
        ffn = experts.top_k * experts.ffn + experts.shared_ffn
    per_layer = stream * spec.hidden + rotary * (spec.heads + spec.kv_heads) * spec.head_dim + gate * ffn
    moved = tokens * (part.layers * per_layer + LOGIT_BYTES * spec.vocab * part.has_head) / tp
    if plan.precision != "fp32":  # weights are read in fp32 and written in bf16 before a product can have them
        moved += 6 * part.parameters
    layer = spec.attention_parameters + spec.active_feed_forward_parameters
    weights = part.layers * layer + spec.vocab * spec.hidden * part.has_head
    return Work(
        product_flops=Flops(2 * tokens * weights / tp),
        attention_flops=Flops(2 * tokens * part.layers * spec.heads * spec.head_dim * seq_len / tp),
        moved_bytes=Bytes(int(moved)),
        num_operators=part.layers * OPERATORS_PER_LAYER[plan.compile],
    )


def recompute_work(spec: ModelSpec, plan: Plan, part: Part, work: Work) -> Work:
    """Return the part of a forward that backward does again.

    Selective recompute keeps what attention returned and every second product, and stops before the last: the query,
    the value and one half of the gated feed-forward are computed again.
    """
    share = recomputed_layers(plan, part.layers) / max(1, part.layers)
    products = attention = share
    if plan.recompute == "selective":
        experts = spec.block.experts
        ffn = experts.top_k * experts.ffn + experts.shared_ffn if experts else spec.ffn
        again = spec.hidden * ((spec.heads + spec.kv_heads) * spec.head_dim + ffn)
        products *= again / (spec.attention_parameters + spec.active_feed_forward_parameters)
        attention = 0.0
    if part.has_head:  # the head is outside every layer
        layers = part.layers * (spec.attention_parameters + spec.active_feed_forward_parameters)
        products *= layers / (layers + spec.vocab * spec.hidden)
    return Work(
        product_flops=Flops(products * work.product_flops),
        attention_flops=Flops(attention * work.attention_flops),
        moved_bytes=Bytes(int(share * work.moved_bytes)),
        num_operators=int(share * work.num_operators),
    )


def forward_seconds(work: Work, device: Device, *, precision: str, width: int) -> Seconds:
    """Return how long a forward takes; `width` is that of the narrowest common product, the model's hidden size.

    A device that is fed slower than it computes waits for the host: then starting the operators is what takes time.
    """
    rate = device.achievable_flops(RATE.get(precision, precision))
    product = work.product_flops / (rate * width / (width + HALF_WIDTH[device.kind]))
    rate = device.achievable_flops(ATTENTION_RATE.get(precision, precision))
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
