"""Time of one operator on a device, by tiles, by kernel or by bytes; and of the host that launches it."""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Literal, NamedTuple, TypeVar

from trimaran.core import DEVICE_TRAITS, DeviceTraits, Plan, Seconds
from trimaran.cost.job import ELEMENT_BYTES, Job
from trimaran.machine import HOST_LAUNCH_SECONDS, Cluster, CpuRates, Device

Value = TypeVar("Value")

NON_LAYER_PRECISION = {"fp8": "bf16"}  # head and attention of an fp8 plan run in bf16

# Streaming multiprocessors by device (data sheets). A matmul is split into tiles, which they process in waves. A name
# stands for all variants that start with it, here and below.
MULTIPROCESSORS = {
    "V100": 80, "T4": 40, "A100": 108, "A800": 108, "A10": 72, "A10G": 80, "A30": 56, "A40": 84, "RTX-A6000": 84,
    "RTX3090": 82, "RTX4090": 128, "RTX5090": 170, "RTX-6000-Ada": 142, "RTX-PRO-6000": 188, "L4": 58, "L40": 142,
    "H20": 78, "H100-PCIe": 114, "H100": 132, "H800": 132, "H200": 132, "GH200": 132, "B200": 148, "GB200": 148,
    "B300": 148, "GB300": 148, "MI300X": 304, "MI325X": 304, "MI355X": 256,
}  # fmt: skip
DEFAULT_MULTIPROCESSORS = 128  # of an unknown device
# Tiles of cuBLAS kernels, and the fraction of the best tile's rate that each reaches. A deep matmul with few tiles is
# also split along its depth (split-k). Prologue and epilogue of a tile cost as much as `TILE_DEPTH` more depth.
# Fitted to 357 matmuls on an H200 (benchmarks/h200_kernels.json) with a mean error of 4.7 %.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (64, 128, 0.8), (64, 64, 0.6))
SPLIT_K = (1, 2, 4)
TILE_DEPTH = {"cuda": 128, "cpu": 32}
# From Hopper on cuBLAS needs rows of a multiple of 16 bytes for its fast kernels, else it takes Ampere's. Traced:
# the feed-forward of Qwen2.5-VL's vision tower, 3,420 wide, on one H200; assumed for Blackwell.
ALIGNED_COLUMNS, AMPERE_KERNEL_FRACTION = 8, {"hopper": 0.38, "blackwell": 0.38}
# The catalogue's rate is the best of many shapes in a short burst. A training step sustains this fraction of it: our
# own steps on an H200, where power is the limit (1B 1.0, 8B 0.94; single matmuls in a row 0.93), llm-foundry's on A100,
# nanotron's on H100. GB200: NVIDIA's runs of Llama 3.1 405B in bf16, from 128 to 512 GPUs; the other Blackwell devices
# have the same dies and are assumed to sustain as much.
SUSTAINED_FRACTION = {
    "A100-40GB": 0.80,
    "A100": 0.83,
    "A800": 0.83,
    "H100": 0.67,
    "H800": 0.67,
    "H200": 0.95,
    "B200": 0.70,
    "B300": 0.70,
    "GB200": 0.70,
    "GB300": 0.70,
    "cpu": 1.0,
}
DEFAULT_SUSTAINED_FRACTION = 0.85
# Where power is the limit, the clock depends on how much of the time matmuls run, which need the most of it: the
# sustained fraction of an H200 is SUSTAINED_AT_SHARE for a block that spends MATMUL_SHARE of its time on them, and
# falls by POWER_SLOPE with the share. From kernels in layers of 160M and 1B, and from full steps of 1B to 8B.
POWER_SLOPE = {"H200": 0.6}
MATMUL_SHARE, SUSTAINED_AT_SHARE, MIN_SUSTAINED_FRACTION = 0.57, 1.04, 0.87
# A CPU's operators are measured again and again on the same data, which the caches hold. Full steps reach this fraction
# of those rates: 13 dense decoders on two Neoverse cores.
CPU_SUSTAINED_FRACTION = 0.83
MAX_NARROW_HEAD_DIM = 64
HEAD_MULTIPLE = 32  # to which attention kernels round a head up; none is made for fewer than MAX_NARROW_HEAD_DIM
# A CPU's attention is measured with this length and head size. Elsewhere its rate follows these ramps: lengths from 32
# to 2,048 and head sizes 32 and 64 on two Neoverse cores.
CPU_LENGTH, CPU_RAMP, CPU_HEAD_DIM, CPU_HEAD_RAMP = 128, 180, 32, 32


class AttentionKernel(NamedTuple):
    """The fraction of the best matmul's rate that an attention kernel reaches on long sequences with head_dim 128."""

    forward: float
    backward: float
    narrow: float  # factor for head_dim 64, which spends more time on exponentials
    ramp: int  # the sequence length at which the rate is half of that
    backward_ramp: int  # the same in backward


Generation = Literal["cpu", "ampere", "hopper", "blackwell", "cdna"]
# By kernel and generation. cuDNN on Hopper: an H200, torch 2.11 (h200_kernels.json, and 4 % less with narrow heads, as
# inside steps); assumed for Blackwell too.
# FlashAttention 1: llm-foundry's steps on A100. On Hopper it issues Ampere's instructions: A100's rate, times 1.52 for
# the multiprocessors and the clock (132 at 1.755 GHz for 108 at 1.41), which is counted, not measured; the same rate is
# assumed on Blackwell. FlashAttention 2: nanotron's on H100; for A100 about twice the first,
# as its paper says, not measured by us. It uses Ampere's tensor core instructions, so Blackwell is assumed to be no
# faster with it than Hopper. On AMD's: 329 TFLOP/s forward on an MI300X (Azure/AI-benchmarking-guide); backward, and
# the other devices of the maker, are assumed.
KERNELS: dict[tuple[str, Generation], AttentionKernel] = {
    ("cudnn", "hopper"): AttentionKernel(0.84, 0.80, 0.71, 400, 1050),
    ("cudnn", "blackwell"): AttentionKernel(0.84, 0.80, 0.71, 400, 1050),
    ("flash-2", "ampere"): AttentionKernel(0.74, 0.67, 0.88, 250, 500),
    ("flash-2", "hopper"): AttentionKernel(0.45, 0.39, 0.85, 250, 500),
    ("flash-2", "blackwell"): AttentionKernel(0.20, 0.17, 0.85, 250, 500),
    ("flash-2", "cdna"): AttentionKernel(0.49, 0.35, 1.0, 250, 500),
    ("flash-1", "ampere"): AttentionKernel(0.41, 0.35, 1.0, 130, 130),
    ("flash-1", "hopper"): AttentionKernel(0.21, 0.18, 1.0, 130, 130),
    ("flash-1", "blackwell"): AttentionKernel(0.10, 0.085, 1.0, 130, 130),
    ("torch", "cpu"): AttentionKernel(0.3, 0.3, 1.0, 0, 0),
}
GENERATIONS: dict[str, Generation] = {
    "H20": "hopper", "H100": "hopper", "H800": "hopper", "GH200": "hopper", "B200": "blackwell", "B300": "blackwell",
    "GB200": "blackwell", "GB300": "blackwell", "MI3": "cdna", "cpu": "cpu",
}  # fmt: skip


class DeviceRates(NamedTuple):
    """Rates of a device in one precision, per second. Hashable, so that results can be cached.

    matmul_flops: of a layer's matmuls, sustained over a step. head_matmul_flops: of the head's, which has no fp8.
    sustained, power_slope: the fraction in `matmul_flops`, and how it falls with the share of matmuls; 0: not at all.
    """

    generation: Generation
    matmul_flops: float
    head_matmul_flops: float
    burst_flops: float  # of the best matmul in a short burst, outside fp8
    bandwidth: float  # memory bytes per second
    multiprocessors: int
    tile_depth: int  # see TILE_DEPTH
    element_bytes: int
    cpu: CpuRates | None = None  # measured rates of a CPU; None if it is not calibrated
    host_factor: float = 1.0  # how much longer the host of a GPU takes to launch kernels than the one that was measured
    sustained: float = 1.0
    power_slope: float = 0.0

    @property
    def traits(self) -> DeviceTraits:
        return DEVICE_TRAITS["cpu" if self.generation == "cpu" else "cuda"]


@lru_cache(maxsize=256)
def rates_of(device: Device, precision: str, own_fractions: tuple[tuple[str, float], ...] = ()) -> DeviceRates:
    """Return the rates of a device in a precision, with the software's own SUSTAINED_FRACTION of some devices."""
    kind, name, rate = device.kind, device.name, rate_name(device, precision)
    if (cpu := device.cpu_rates) is not None:
        flops = CPU_SUSTAINED_FRACTION * cpu.matmul_gflops * 1e9
        bandwidth = CPU_SUSTAINED_FRACTION * cpu.elementwise_gb_per_second * 1e9
        return DeviceRates("cpu", flops, flops, flops, bandwidth, 1, TILE_DEPTH["cpu"], ELEMENT_BYTES[precision], cpu)
    # A rate measured on this machine needs no correction. Without tensor cores power is not the limit.
    is_sustained = "bf16" in device.reached or rate == "fp32"
    fractions = SUSTAINED_FRACTION | dict(own_fractions)
    sustained = 1.0 if is_sustained else _of_variant(name, fractions, DEFAULT_SUSTAINED_FRACTION)
    other = NON_LAYER_PRECISION.get(rate, rate)
    burst = device.factor(other) * device.achievable_flops(other)
    return DeviceRates(
        _of_variant(name, GENERATIONS, "ampere"),  # also for older and unknown devices
        sustained * device.factor(rate) * device.achievable_flops(rate),
        sustained * burst,
        burst,
        device.stream_bandwidth,
        _of_variant(name, MULTIPROCESSORS, DEFAULT_MULTIPROCESSORS),
        TILE_DEPTH[kind],
        ELEMENT_BYTES[precision],
        host_factor=device.launch_seconds / HOST_LAUNCH_SECONDS,
        sustained=sustained,
        power_slope=0.0 if is_sustained else _of_variant(name, POWER_SLOPE, 0.0),
    )


def rates_for(job: Job, cluster: Cluster, plan: Plan) -> DeviceRates:
    """Return the rates of the cluster's devices for a plan, with the software of the job."""
    return rates_of(cluster.device, plan.precision, job.stack.time.sustained)


def rate_name(device: Device, precision: str) -> str:
    """Return the precision whose rate applies: fp16 runs at bf16's rate where the catalogue has no fp16."""
    return "bf16" if precision == "fp16" and "fp16" not in device.peak_flops else precision


def _of_variant(name: str, table: Mapping[str, Value], otherwise: Value) -> Value:
    """Return the table's entry with the longest name that the device's name starts with."""
    names = [each for each in table if name.startswith(each)]
    return table[max(names, key=len)] if names else otherwise


def power_factor(matmuls: float, others: float, rates: DeviceRates) -> float:
    """Return how much longer than `matmul_seconds` matmuls take in a block with this many seconds of either."""
    if not rates.power_slope or not matmuls:
        return 1.0
    share = matmuls * rates.sustained / (matmuls * rates.sustained + others)
    fraction = SUSTAINED_AT_SHARE - rates.power_slope * (share - MATMUL_SHARE)
    return rates.sustained / min(SUSTAINED_AT_SHARE, max(MIN_SUSTAINED_FRACTION, fraction))


@lru_cache(maxsize=1 << 10)
def rates_for_weight(columns: int, depth: int, rates: DeviceRates) -> DeviceRates:
    """Return the rates of matmuls with a weight of this shape, in forward and in backward."""
    is_aligned = columns % ALIGNED_COLUMNS == depth % ALIGNED_COLUMNS == 0
    if is_aligned or rates.element_bytes != 2 or rates.generation not in AMPERE_KERNEL_FRACTION:
        return rates
    return rates._replace(matmul_flops=AMPERE_KERNEL_FRACTION[rates.generation] * rates.matmul_flops)


@lru_cache(maxsize=1 << 16)
def matmul_seconds(rows: int, columns: int, depth: int, rates: DeviceRates, *, groups: int = 1) -> Seconds:
    """Return the time of `groups` equal matmuls of (rows, depth) and (depth, columns)."""
    if not rows * columns * depth:
        return Seconds(0.0)
    if rates.cpu is not None:
        work = (rows + rates.cpu.extra_rows) * columns * (depth + rates.tile_depth)
        return Seconds(2.0 * groups * work / rates.matmul_flops)
    moved = groups * rates.element_bytes * (rows * depth + depth * columns + rows * columns) / rates.bandwidth
    if rates.generation == "cpu":
        return Seconds(max(2.0 * groups * rows * columns * (depth + rates.tile_depth) / rates.matmul_flops, moved))
    least = math.inf
    for tile_rows, tile_columns, efficiency in TILES:
        tiles = groups * -(-rows // tile_rows) * -(-columns // tile_columns)
        for split in SPLIT_K:
            waves = -(-tiles * split // rates.multiprocessors)
            tile_depth = depth / split + rates.tile_depth * (1 if split == 1 else 2)
            least = min(least, waves * tile_rows * tile_columns * tile_depth / efficiency)
    return Seconds(max(2.0 * least * rates.multiprocessors / rates.matmul_flops, moved))


def attention_seconds(
    flops: float, length: int, head_dim: int, *, kernel: str, rates: DeviceRates
) -> tuple[float, float]:
    """Return the times of attention's forward and backward. Backward recomputes the scores: 2.5 times the FLOPs."""
    if (cpu := rates.cpu) is not None:
        ramp = (1 + CPU_RAMP / length) / (1 + CPU_RAMP / CPU_LENGTH)
        flops *= ramp * (1 + CPU_HEAD_RAMP / head_dim) / (1 + CPU_HEAD_RAMP / CPU_HEAD_DIM) / CPU_SUSTAINED_FRACTION
        return flops / (cpu.attention_gflops * 1e9), 2.5 * flops / (cpu.attention_backward_gflops * 1e9)
    if kernel == "torch":  # it selects cuDNN's kernel from Hopper on
        kernel = "flash-2" if rates.generation == "ampere" else "cudnn"
    kernel = {"cpu": "torch", "cdna": "flash-2"}.get(rates.generation, kernel)
    efficiency = KERNELS[kernel, rates.generation]
    padded = -(-head_dim // HEAD_MULTIPLE) * HEAD_MULTIPLE if head_dim > MAX_NARROW_HEAD_DIM else MAX_NARROW_HEAD_DIM
    filled = 1.0 if rates.generation == "cpu" else head_dim / padded
    rate = rates.burst_flops * filled * (efficiency.narrow if head_dim <= MAX_NARROW_HEAD_DIM else 1.0)
    forward = flops / (rate * efficiency.forward) * (1 + efficiency.ramp / length)
    return forward, 2.5 * flops / (rate * efficiency.backward) * (1 + efficiency.backward_ramp / length)


# The host launches kernels ahead of the device and waits for no result, so both work in parallel: a step takes as long
# as the slower of the two, over the whole step. Nothing is gained or lost by where in the step the host is slow,
# because it may be ahead by up to a step.
FORWARD_HOST_FRACTION = 0.4  # of a layer's launches and their host time; the rest is for backward
# Host and device run in parallel, but neither is always ahead: the total is the p-norm of both, with this p.
HOST_OVERLAP_POWER = 6
# Between the end of a kernel and the start of the next one, and the time until a kernel has filled the device: no
# other constant knows how many kernels there are. Kernels of a CUDA graph start 1.0 us apart on an H200
# (`launches` in benchmarks/h200_kernels.json).
KERNEL_GAP_SECONDS = 1e-6
MAX_GAP_FRACTION = 0.05  # of a step's compute; a larger micro-batch can gain no more than that


def host_wait(device_seconds: float, host_seconds: float) -> float:
    """Return how long the device waits for the host while it has `device_seconds` of work."""
    if not device_seconds:
        return host_seconds
    ratio = host_seconds / device_seconds
    return device_seconds * ((1 + ratio**HOST_OVERLAP_POWER) ** (1 / HOST_OVERLAP_POWER) - 1)


def kernel_gaps(num_launches: float, rates: DeviceRates) -> float:
    """Return the time between so many kernels on the device; 0 on a CPU."""
    return num_launches * KERNEL_GAP_SECONDS if rates.traits.runs_async else 0.0


def positions_to_hide_launches(job: Job, rates: DeviceRates, *, is_captured: bool) -> float:
    """Return how many positions a micro-batch needs until launching its kernels hardly matters.

    The device then computes as long as the host launches, and the gaps between kernels are a small fraction of it. It
    is assumed to reach its best rate, so these are rather too many.
    """
    profile, layers = job.stack.time, job.outline.layers
    host = profile.host.replay if is_captured else layers * profile.host.compiled + profile.host.micro_batch
    gaps = kernel_gaps(layers * profile.host.launches.compiled + profile.host.launches.micro_batch, rates)
    flops = job.outline.training_flops(job.seq_len) / job.outline.main.sample_positions(job.seq_len)[0]
    return max(rates.host_factor * host, gaps / MAX_GAP_FRACTION) * rates.matmul_flops / flops
