"""How long an operation takes on a device: a product by its tiles, attention by its kernel, the rest by its bytes."""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Literal, NamedTuple, TypeVar

from trimaran.core import Seconds
from trimaran.cost.job import WIDTH
from trimaran.hardware import Device

Value = TypeVar("Value")

BESIDE_FP8 = {"fp8": "bf16"}  # what is not a layer's product stays in bf16

# Multiprocessors of a device (data sheets): a product is cut into tiles, and these take them in rounds. A name stands
# for all variants that begin with it, here and below.
PROCESSORS = {
    "V100": 80, "T4": 40, "A100": 108, "A800": 108, "A10": 72, "A10G": 80, "A30": 56, "A40": 84, "RTX-A6000": 84,
    "RTX3090": 82, "RTX4090": 128, "RTX5090": 170, "RTX-6000-Ada": 142, "RTX-PRO-6000": 188, "L4": 58, "L40": 142,
    "H20": 78, "H100-PCIe": 114, "H100": 132, "H800": 132, "H200": 132, "GH200": 132, "B200": 148, "GB200": 148,
    "MI300X": 304, "MI325X": 304, "MI355X": 256,
}  # fmt: skip
USUAL_PROCESSORS = 128  # of one that nobody knows
# Tiles of cuBLAS's kernels and what each reaches of the best one's rate; a deep product with few tiles is cut along
# its depth as well. Filling and draining a tile costs as much as `TILE_DEPTH` more of its depth. Set on 357 products
# of an H200 (benchmarks/h200_kernels.json), which they meet within 4.7 % on average.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (64, 128, 0.8), (64, 64, 0.6))
SPLITS = (1, 2, 4)
TILE_DEPTH = {"cuda": 128, "cpu": 32}
# The catalogue's rate is the best of many shapes, in a burst. What a step keeps of it: our own steps on an H200, where
# power is the limit (1B's 162 ms of products are 1.0, and 8B 0.94; single products, one after another, 0.93),
# llm-foundry's on A100, nanotron's on H100.
SUSTAINED = {"A100-40GB": 0.80, "A100": 0.83, "A800": 0.83, "H100": 0.67, "H800": 0.67, "H200": 0.95, "cpu": 1.0}
SUSTAINED_ELSEWHERE = 0.85
NARROW_HEAD = 64


class Kernel(NamedTuple):
    """What an attention kernel reaches of the best product's rate on long sequences, with heads of 128.

    `narrow` is what heads of 64 keep of it: they spend more time on exponentials. At a length of `ramp` it is halved.
    """

    forward: float
    backward: float
    narrow: float
    ramp: int
    backward_ramp: int


Generation = Literal["cpu", "ampere", "hopper", "blackwell"]
# By kernel and generation. cuDNN on Hopper: an H200, torch 2.11 (h200_kernels.json); its shares are assumed for
# Blackwell. FlashAttention 1: llm-foundry's steps on A100. FlashAttention 2: nanotron's on H100; for A100 about twice
# the first, as its paper says, not measured by us. It speaks to tensor cores as Ampere did, so Blackwell's are taken to
# be no faster for it than Hopper's.
KERNELS: dict[tuple[str, Generation], Kernel] = {
    ("cudnn", "hopper"): Kernel(0.84, 0.80, 0.74, 400, 1050),
    ("cudnn", "blackwell"): Kernel(0.84, 0.80, 0.74, 400, 1050),
    ("flash-2", "ampere"): Kernel(0.74, 0.67, 0.88, 250, 500),
    ("flash-2", "hopper"): Kernel(0.45, 0.39, 0.85, 250, 500),
    ("flash-2", "blackwell"): Kernel(0.20, 0.17, 0.85, 250, 500),
    ("flash-1", "ampere"): Kernel(0.41, 0.35, 1.0, 130, 130),
    ("torch", "cpu"): Kernel(0.3, 0.3, 1.0, 0, 0),
}
GENERATIONS: dict[str, Generation] = {
    "H20": "hopper", "H100": "hopper", "H800": "hopper", "GH200": "hopper", "B200": "blackwell", "B300": "blackwell",
    "GB200": "blackwell",
}  # fmt: skip


class DeviceRates(NamedTuple):
    """What a device does in a second, in one precision: hashable, so that what follows from it can be remembered."""

    generation: Generation
    products: float
    head_products: float
    best: float
    stream: float
    processors: int
    tile_depth: int
    width: int


@lru_cache(maxsize=256)
def rates_of(device: Device, precision: str) -> DeviceRates:
    """Return the rates of a device."""
    kind, name, rate = device.kind, device.name, rate_name(device, precision)
    # A rate that was measured on the machine needs no correction; without tensor cores nothing runs hot.
    plain = "bf16" in device.reached or rate == "fp32"
    sustained = 1.0 if plain else _of_variant(name, SUSTAINED, SUSTAINED_ELSEWHERE)
    best = device.achievable_flops(BESIDE_FP8.get(rate, rate))
    return DeviceRates(
        "cpu" if kind == "cpu" else _of_variant(name, GENERATIONS, "ampere"),  # older ones, and others' too
        sustained * device.achievable_flops(rate),
        sustained * best,
        best,
        device.stream_bandwidth,
        _of_variant(name, PROCESSORS, USUAL_PROCESSORS),
        TILE_DEPTH[kind],
        WIDTH[precision],
    )


def rate_name(device: Device, precision: str) -> str:
    """Return the precision whose rate a device runs at: tensor cores compute fp16 and bf16 alike where both are."""
    return "bf16" if precision == "fp16" and "fp16" not in device.peak_flops else precision


def _of_variant(name: str, table: Mapping[str, Value], otherwise: Value) -> Value:
    """Return what the table has for the device, or for the one that it is a variant of: the longest match."""
    names = [each for each in table if name.startswith(each)]
    return table[max(names, key=len)] if names else otherwise


@lru_cache(maxsize=1 << 16)
def product_seconds(rows: int, columns: int, depth: int, rates: DeviceRates, *, groups: int = 1) -> Seconds:
    """Return how long `groups` equal products of (rows, depth) and (depth, columns) take together."""
    if not rows * columns * depth:
        return Seconds(0.0)
    moved = groups * rates.width * (rows * depth + depth * columns + rows * columns) / rates.stream
    if rates.generation == "cpu":
        return Seconds(max(2.0 * groups * rows * columns * (depth + rates.tile_depth) / rates.products, moved))
    least = math.inf
    for tall, wide, share in TILES:
        tiles = groups * -(-rows // tall) * -(-columns // wide)
        for split in SPLITS:
            rounds = -(-tiles * split // rates.processors)
            deep = depth / split + rates.tile_depth * (1 if split == 1 else 2)
            least = min(least, rounds * tall * wide * deep / share)
    return Seconds(max(2.0 * least * rates.processors / rates.products, moved))


def attention_seconds(
    flops: float, length: int, head_dim: int, *, kernel: str, rates: DeviceRates
) -> tuple[float, float]:
    """Return how long attention's forward and backward take; backward computes the scores once more."""
    found = KERNELS[kernel_of(kernel, rates.generation), rates.generation]
    rate = rates.best * (found.narrow if head_dim <= NARROW_HEAD else 1.0)
    forward = flops / (rate * found.forward) * (1 + found.ramp / length)
    return forward, 2.5 * flops / (rate * found.backward) * (1 + found.backward_ramp / length)


def kernel_of(kernel: str, generation: Generation) -> str:
    """Return the kernel that runs: torch takes cuDNN's where it is the fastest, and the first flash is Ampere's."""
    if generation == "cpu":
        return "torch"
    if kernel == "torch":
        return "flash-2" if generation == "ampere" else "cudnn"
    return kernel if generation == "ampere" else "flash-2"
