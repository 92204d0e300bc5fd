"""Memory and time of serving a model on each device.

Memory: weights, buffers of a step, and pages for keys and values. Time: one step of a serving engine, with decoded
tokens and tokens of prompts side by side.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, get_args

from trimaran.core import Bytes, Mesh, Plan, Seconds
from trimaran.cost import (
    CONTEXT_BYTES,
    EAGER,
    GRAPH_BYTES,
    PROCESS_BYTES,
    TIME_PROFILES,
    TRIMARAN_LAUNCHES,
    BlockSplit,
    Ring,
    all_gather_seconds,
    all_reduce_seconds,
    attention_seconds,
    elementwise_bytes,
    host_wait,
    matmul_seconds,
    parts_of,
    rates_of,
    ring_of,
    send_seconds,
)
from trimaran.cost.block_time import matmuls
from trimaran.cost.peak_memory import COMMUNICATOR_BYTES, SEGMENT_BYTES, WORKSPACE_BYTES
from trimaran.cost.rank_part import RankPart
from trimaran.cost.roofline import FORWARD_HOST_FRACTION, DeviceRates, kernel_gaps
from trimaran.cost.stack_profiles import CommProfile
from trimaran.machine import Cluster, Device
from trimaran.machine.device_catalogue import HOST_LAUNCH_SECONDS
from trimaran.models import Outline, OutlineLayer

WeightFormat = Literal["fp32", "bf16", "fp16", "fp8", "int8", "int4"]
WEIGHT_FORMATS: tuple[WeightFormat, ...] = get_args(WeightFormat)
# Bytes of one weight of a linear layer. A quantised one has scales: fp32 for each output (0.1 % of a row of 4,096), or
# in int4 a bf16 scale and zero point for each group of INT4_GROUP inputs. Embedding, head, norms, biases, routers and
# experts are not quantised.
INT4_GROUP = 128
WEIGHT_BYTES: dict[WeightFormat, float] = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.001,
    "int8": 1.001,
    "int4": 0.5 + 4 / INT4_GROUP,
}
QUANTISED: frozenset[WeightFormat] = frozenset({"fp8", "int8", "int4"})
NUM_GRAPHS = 23  # CUDA graphs of one device: of decode steps of up to 64 sequences, and of steps of up to 1,024 tokens
FP32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What the requests are like, and the limits of the engine that serves them."""

    prompt_tokens: int = 512
    output_tokens: int = 256
    max_step_tokens: int = 1024  # decoded ones and those of prompts together
    max_sequences: int = 64  # that run at once; others wait
    page_size: int = 16
    memory_fraction: float = 0.9  # of a device that the engine uses

    @property
    def length(self) -> int:
        return self.prompt_tokens + self.output_tokens

    @property
    def pages(self) -> int:
        return -(-self.length // self.page_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How one engine is split over devices, and how its linear layers are stored."""

    tp: int = 1
    pp: int = 1
    weights: WeightFormat = "bf16"

    @property
    def devices(self) -> int:
        return self.tp * self.pp

    def __str__(self) -> str:
        return f"tp {self.tp} x pp {self.pp}, {self.weights}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingMemory:
    """Bytes of the fullest device, and what the rest of it can hold."""

    terms: dict[str, Bytes]  # weights, buffers and the process or driver; the rest is for pages
    limit: Bytes
    page_bytes: Bytes  # keys and values of one page, of the layers and heads on that device
    num_pages: int  # below 1 if the weights alone do not fit
    page_size: int

    @property
    def cache_tokens(self) -> int:
        return max(0, self.num_pages) * self.page_size

    @property
    def missing(self) -> Bytes:
        """Bytes that are missing for one page; 0 if there is room."""
        return Bytes(max(0, sum(self.terms.values()) + self.page_bytes - self.limit))


def computed_in(weights: WeightFormat, device: Device) -> Literal["fp32", "bf16", "fp16"]:
    if weights == "fp32" or weights == "bf16" or weights == "fp16":
        return weights
    return "bf16" if "bf16" in device.peak_flops else "fp16"


def captures_steps(outline: Outline, layout: Layout, device: Device) -> bool:
    """Return whether our engine replays steps as CUDA graphs: on one GPU it does, over several ranks not yet.

    Nor does it with latent attention of transformers' own code: keys and values of different sizes have no kernel.
    """
    latents = [block.latent for block, _ in outline.main.runs if isinstance(block, OutlineLayer) and block.latent]
    has_kernel = all(each.narrow_cache for each in latents)
    return device.traits.has_graphs and layout.devices == 1 and has_kernel


def cache_bytes_per_token(layer: OutlineLayer, tp: int, element_bytes: int) -> int:
    """Return the bytes of a token's keys and values on one of `tp` ranks; each has all of a narrow cache of latents."""
    if layer.latent and layer.latent.narrow_cache:
        return layer.latent.cache_width * element_bytes
    heads = layer.heads if layer.latent else layer.kv_heads
    return max(1, heads // tp) * (layer.head_dim + layer.value_dim) * element_bytes if layer.heads else 0


@lru_cache(maxsize=1024)
def serving_parts(outline: Outline, tp: int, pp: int) -> tuple[RankPart, ...]:
    return parts_of(outline, Plan(mesh=Mesh(tp=tp, pp=pp), grad_accum=pp), seq_len=1)


def serving_memory(outline: Outline, layout: Layout, device: Device, traffic: Traffic) -> ServingMemory:
    """Return the memory of the device with the least room for pages; all have as many pages as that one."""
    parts = serving_parts(outline, layout.tp, layout.pp)
    memories = [_rank_memory(outline, part, layout, device, traffic) for part in parts]
    return min(memories, key=lambda each: each.num_pages)


def _rank_memory(outline: Outline, part: RankPart, layout: Layout, device: Device, traffic: Traffic) -> ServingMemory:
    element_bytes = FP32_BYTES if computed_in(layout.weights, device) == "fp32" else 2
    layers = [(group.block, group) for group in part.layer_groups if isinstance(group.block, OutlineLayer)]
    linear = sum(group.count * layer.dense_weights // layout.tp for layer, group in layers)  # these can be quantised
    outside = PROCESS_BYTES  # of the process; on a GPU, what the driver, the allocator and NCCL hold
    if device.traits.has_own_memory:
        groups = (layout.tp > 1) + (layout.pp > 1)
        graphs = NUM_GRAPHS * GRAPH_BYTES if captures_steps(outline, layout, device) else 0
        outside = CONTEXT_BYTES + SEGMENT_BYTES + graphs + COMMUNICATOR_BYTES * (1 + groups if groups else 0)
    terms = {
        "weights": Bytes(int(WEIGHT_BYTES[layout.weights] * linear + element_bytes * (part.parameters - linear))),
        "buffers": Bytes(_buffer_bytes(outline, part, layout, element_bytes, traffic)),
        "driver" if device.traits.has_own_memory else "process": Bytes(outside),
    }
    per_token = sum(
        group.count * cache_bytes_per_token(layer, layout.tp, element_bytes)
        for layer, group in layers
        if group.tower == outline.main
    )
    limit, page_bytes = Bytes(int(traffic.memory_fraction * device.memory_bytes)), traffic.page_size * per_token
    num_pages = (limit - sum(terms.values())) // max(1, page_bytes)
    return ServingMemory(
        terms=terms, limit=limit, page_bytes=Bytes(page_bytes), num_pages=num_pages, page_size=traffic.page_size
    )


def _buffer_bytes(outline: Outline, part: RankPart, layout: Layout, element_bytes: int, traffic: Traffic) -> int:
    """Return the bytes of a step's temporary tensors: the widest layer, and the logits where the head is."""
    tp, rows = layout.tp, traffic.max_step_tokens
    widest = expanded = 0
    for group in part.layer_groups:
        if isinstance(layer := group.block, OutlineLayer):
            attention = (2 * layer.heads + 2 * layer.kv_heads) * layer.head_dim // tp
            routed = layer.experts.top_k * layer.hidden if layer.experts else 0
            widest = max(widest, 3 * layer.hidden + routed + max(attention, 3 * layer.active_ffn // tp))
            if layer.latent and layer.latent.narrow_cache:  # a sequence's keys and values, and a copy of the keys
                width = 2 * layer.head_dim + layer.value_dim - layer.latent.rope_dim
                expanded = traffic.length * layer.heads * width // tp
    # Logits in the compute dtype, then all columns in fp32 for the sampler.
    logits = traffic.max_sequences * outline.main.outputs * (element_bytes + FP32_BYTES) if part.head_tower else 0
    return (rows * widest + expanded) * element_bytes + logits + WORKSPACE_BYTES // 2


# Without a gradient nothing is saved, and tensor-parallel ranks sum the stream instead of splitting the sequence.
SERVING_PROFILE = replace(TIME_PROFILES["trimaran"], comm=CommProfile(splits_sequence=False))
# Attention over pages reads its keys and values in blocks from all over the memory. Assumed: it reaches this fraction
# of the bandwidth of a large copy.
PAGED_READ_FRACTION = 0.8
# Kernels of a layer's forward: as torch launches them, and with projections of the same input joined, as in the CUDA
# graphs of one device. Host time of a launch without a gradient, in units of the host's launch of one small operator:
# Python and the dispatcher around it. All assumed.
EAGER_LAUNCHES, CAPTURED_LAUNCHES = FORWARD_HOST_FRACTION * TRIMARAN_LAUNCHES.eager, 14.0
HOST_PER_LAUNCH = 2.0
# The scheduler, the copy of a batch to the device, and the choice of tokens: for a step, and for each sequence in it,
# which is assumed. Decode steps of 64 sequences on an H200 took 0.45 (1B) and 0.56 ms (8B) longer than predicted with
# an assumed 0.5 ms for a step (`equal` in benchmarks/h200_serving.jsonl), so it is 1 ms.
SCHEDULE_SECONDS, SEQUENCE_SECONDS = 1e-3, 5e-6
# Where steps are CUDA graphs, the next one is scheduled while this one is computed. Decode steps of 64 sequences then
# took 0.36 (1B) and 0.63 ms (8B) longer than their kernels and gaps are predicted to take.
CAPTURED_STEP_SECONDS = 4e-4
# Bytes of a bf16 weight that are read as fast as a quantised one, and how much longer large matmuls take: integers are
# converted in registers. From steps of 8B on an H200 (docs/guides/serve-speed.md); assumed for other GPUs.
QUANTISED_READ_BYTES = {"fp8": 1.25, "int8": 2.2, "int4": 2.2}
INTEGER_MATMUL_FACTOR = 1.25
# The tiles of the cost model have at least 64 rows; kernels for fewer rows have tiles of 16, as tensor cores do.
MIN_TILE_ROWS, MIN_FITTED_ROWS = 16, 64
SAMPLER_PASSES = 4  # over the fp32 logits: copy, softmax or argmax, cumulative sum, draw


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """What one step computes."""

    decoded: int  # sequences that get one token each
    context: int  # cached tokens of each of them, on average
    prefill: int = 0  # tokens of prompts
    prompt: int = 1  # tokens of each prompt

    @property
    def rows(self) -> int:
        return self.decoded + self.prefill

    @property
    def sequences(self) -> int:
        """Sequences whose logits are wanted: all decoded ones, and a prompt's last token."""
        return self.decoded + -(-self.prefill // self.prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """A layer on one rank: the degree that splits it, and bytes of a weight and of an activation."""

    tp: int
    weight_bytes: float
    element_bytes: int
    matmul_factor: float = 1.0  # how much longer a matmul with a quantised weight computes
    is_captured: bool = False  # steps are CUDA graphs


def serving_step(outline: Outline, layout: Layout, cluster: Cluster, work: StepWork) -> dict[str, Seconds]:
    """Return the seconds of one step by term. Stages work one after the other. For graphs see `captures_steps`."""
    device = cluster.device
    dtype = computed_in(layout.weights, device)
    rates = rates_of(device, "fp8" if layout.weights == "fp8" and "fp8" in device.peak_flops else dtype)
    is_captured = captures_steps(outline, layout, device)
    weights, read_bytes, factor = layout.weights, WEIGHT_BYTES[layout.weights], 1.0
    if device.traits.has_kernels:
        read_bytes = QUANTISED_READ_BYTES.get(weights, read_bytes)
        factor = INTEGER_MATMUL_FACTOR if weights in ("int8", "int4") else 1.0
    shape = LayerShape(
        tp=layout.tp,
        weight_bytes=read_bytes,
        element_bytes=FP32_BYTES if dtype == "fp32" else 2,
        matmul_factor=factor,
        is_captured=is_captured,
    )
    ring = ring_of(cluster.levels, layout.tp, 1)
    terms = dict.fromkeys(("matmul", "attention", "elementwise", "comm", "host"), 0.0)
    for part in serving_parts(outline, layout.tp, layout.pp):
        for group in part.layer_groups:
            if isinstance(group.block, OutlineLayer) and group.tower == outline.main:
                for name, seconds in _layer_seconds(group.block, shape, rates, ring, work).items():
                    terms[name] += group.count * seconds
    # The head and the sampler, and the logits that one rank gathers.
    tower, sequences = outline.main, work.sequences
    plain = replace(shape, weight_bytes=float(shape.element_bytes), matmul_factor=1.0)
    of_head = rates._replace(matmul_flops=rates.head_matmul_flops)
    head = _weight_matmul(sequences, tower.head_rows(shape.tp), tower.hidden, plain, of_head)
    sampler = SAMPLER_PASSES * FP32_BYTES * sequences * tower.outputs / of_head.bandwidth
    gathered = all_gather_seconds(sequences * tower.outputs * shape.element_bytes, ring)
    stream = work.rows * outline.main.hidden * shape.element_bytes
    between = send_seconds(stream, ring_of(cluster.levels, layout.pp, layout.tp))
    terms["matmul"] += head + sampler
    terms["comm"] += gathered + (layout.pp - 1) * between
    terms["host"] = _host_seconds(
        outline.main.layers, rates, work, is_captured=is_captured, device_seconds=sum(terms.values())
    )
    return {name: Seconds(seconds) for name, seconds in terms.items()}


@lru_cache(maxsize=1 << 14)
def _layer_seconds(
    layer: OutlineLayer, shape: LayerShape, rates: DeviceRates, ring: Ring, work: StepWork
) -> dict[str, float]:
    split = BlockSplit(positions=work.rows, length=max(work.context, work.prompt), tp=shape.tp, ep=1)
    stream = work.rows * layer.hidden * shape.element_bytes
    matmul = 0.0
    for each in matmuls(layer, split):
        groups = each.groups
        if layer.experts is not None and groups > 1:  # experts that some token is routed to
            groups = max(1, round(groups * (1 - (1 - layer.experts.top_k / groups) ** work.rows)))
        matmul += _weight_matmul(each.rows, each.columns, each.depth, shape, rates, groups=groups)
    return {
        "matmul": matmul,
        "attention": _decode_attention(layer, shape, rates, work) + _prefill_attention(layer, shape, rates, work),
        "elementwise": elementwise_bytes(layer, split, rates, SERVING_PROFILE, kind=EAGER) / rates.bandwidth,
        "comm": 2 * small_all_reduce_seconds(stream, ring),
    }


def _weight_matmul(
    rows: int, columns: int, depth: int, shape: LayerShape, rates: DeviceRates, *, groups: int = 1
) -> float:
    """Return the time of a matmul with a weight: its arithmetic or its bytes, whichever takes longer."""
    computed = matmul_seconds(rows, columns, depth, rates._replace(element_bytes=0), groups=groups)
    if rates.generation != "cpu":
        computed = Seconds(computed * min(1.0, max(rows, MIN_TILE_ROWS) / MIN_FITTED_ROWS))
    is_quantised = groups == 1  # experts are not
    weight_bytes, computed = (
        (shape.weight_bytes, computed * shape.matmul_factor) if is_quantised else (shape.element_bytes, computed)
    )
    moved = groups * (weight_bytes * columns * depth + shape.element_bytes * rows * (columns + depth))
    return max(computed, moved / rates.bandwidth)


def _decode_attention(layer: OutlineLayer, shape: LayerShape, rates: DeviceRates, work: StepWork) -> float:
    """Return the time to attend from one query of each sequence to its cached keys: on a GPU, that of reading them.

    The queries of all heads read the same narrow cache of latent attention, which is so wide that computing may take
    longer, on a GPU too.
    """
    if not work.decoded or not layer.heads:
        return 0.0
    keys = min(work.context, layer.window) if layer.window else work.context
    per_token = cache_bytes_per_token(layer, shape.tp, shape.element_bytes)
    read = work.decoded * keys * per_token / (PAGED_READ_FRACTION * rates.bandwidth)
    key_dim, value_dim = layer.head_dim, layer.value_dim
    if layer.latent and layer.latent.narrow_cache:
        key_dim, value_dim = layer.latent.cache_width, layer.latent.kv_rank
    elif rates.cpu is None:
        return read
    flops = 2.0 * work.decoded * keys * layer.heads / shape.tp * (key_dim + value_dim)
    return max(read, attention_seconds(flops, keys, key_dim, kernel="torch", rates=rates)[0])


def _prefill_attention(layer: OutlineLayer, shape: LayerShape, rates: DeviceRates, work: StepWork) -> float:
    """Return the time of the attention of prompts; in a CUDA graph, of latent attention to its narrow cache."""
    if not work.prefill or not layer.heads:
        return 0.0
    key_dim, value_dim = layer.head_dim, layer.value_dim
    if shape.is_captured and layer.latent:
        key_dim, value_dim = layer.latent.cache_width, layer.latent.kv_rank
    flops = 2.0 * work.prefill * layer.heads / shape.tp * (key_dim + value_dim) * layer.mean_attended_keys(work.prompt)
    return attention_seconds(flops, work.prompt, key_dim, kernel="torch", rates=rates)[0]


def small_all_reduce_seconds(num_bytes: float, ring: Ring) -> float:
    """Return the time of an all-reduce by ring, or by a tree: fewer hops, and assumed half of the ring's bandwidth."""
    seconds = float(all_reduce_seconds(num_bytes, ring))
    if ring.num_ranks == 1:
        return seconds
    hops = 2 * math.ceil(math.log2(ring.num_ranks)) * ring.reduce_hop * ring.latency
    return min(seconds, hops + 2 * num_bytes / (0.5 * ring.reduce_bandwidth))


def _host_seconds(
    layers: int, rates: DeviceRates, work: StepWork, *, is_captured: bool, device_seconds: float
) -> float:
    """Return how much longer a step takes because of the host: schedule, launches, and gaps between kernels."""
    launches = layers * (CAPTURED_LAUNCHES if is_captured else EAGER_LAUNCHES)
    launching = launches * HOST_PER_LAUNCH * rates.host_factor * HOST_LAUNCH_SECONDS
    schedule = SCHEDULE_SECONDS + SEQUENCE_SECONDS * work.sequences
    if rates.generation == "cpu":  # it computes nothing while it launches
        return schedule + launching
    gaps = kernel_gaps(launches, rates)
    if not is_captured:
        return schedule + gaps + host_wait(device_seconds + gaps, launching)
    busy = gaps + CAPTURED_STEP_SECONDS
    return max(busy, schedule - device_seconds)
