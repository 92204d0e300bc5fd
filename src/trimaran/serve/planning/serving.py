"""What serving a model needs on each device: weights, buffers of a step, and pages for keys and values."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from trimaran.core import Bytes, Mesh, Plan
from trimaran.cost import CONTEXT_BYTES, GRAPH_BYTES, PROCESS_BYTES, parts_of
from trimaran.cost.peak_memory import COMMUNICATOR_BYTES, SEGMENT_BYTES, WORKSPACE_BYTES
from trimaran.cost.rank_part import RankPart
from trimaran.machine import Device
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
    """What the requests are like, and the limits of the engine that serves them.

    max_step_tokens: the most tokens of one step, decoded ones and those of prompts together.
    max_sequences: the most sequences that run at once; others wait.
    memory_fraction: of a device that the engine uses.
    """

    prompt_tokens: int = 512
    output_tokens: int = 256
    max_step_tokens: int = 1024
    max_sequences: int = 64
    page_size: int = 16
    memory_fraction: float = 0.9

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
    """Bytes of the fullest device, and what the rest of it can hold.

    terms: weights, buffers and the process or driver; the rest is for pages.
    page_bytes: keys and values of one page, of the layers and heads on that device.
    num_pages: below 1 if the weights alone do not fit.
    """

    terms: dict[str, Bytes]
    limit: Bytes
    page_bytes: Bytes
    num_pages: int
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
    """Return the bytes of one token's keys and values in a layer, on one of `tp` ranks.

    Every rank has all features of a narrow cache of latent attention, because all heads use all of them.
    """
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
