"""How much of the communication between data ranks compute hides, for a bucket size and a prefetch depth."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from trimaran.cost.collective import Ring, all_reduce_seconds


def exposed_reduction(num_bytes: float, bucket_bytes: float, ring: Ring, backward: float) -> float:
    """Return how long DDP's all-reduces of `num_bytes` continue after a backward of `backward` seconds has ended.

    Buckets are reduced one after another. The first starts when its part of backward is done, and the last one when all
    of it is. Each costs the latency of the ring.
    """
    size = min(bucket_bytes, num_bytes)
    count = math.ceil(num_bytes / size)
    one = all_reduce_seconds(size, ring)
    return max(backward * size / num_bytes + count * one, backward + one) - backward


class GatheredUnit(NamedTuple):
    """An FSDP unit: the time to gather its weights, and that of the compute which they are for."""

    gather: float
    compute: float


def exposed_gathers(units: Sequence[GatheredUnit], prefetch: int) -> float:
    """Return how long compute waits for weights, of which those of `prefetch` units ahead are being gathered.

    A unit's gather may start when the compute of the unit that far before it starts, and after the gather before it.
    So a gather that takes longer than compute is hidden only if units before it had time to spare: between equal units
    no depth helps.
    """
    starts: list[float] = []
    gathered = computed = 0.0
    for number, unit in enumerate(units):
        gathered = max(gathered, starts[number - prefetch] if number >= prefetch else 0.0) + unit.gather
        starts.append(max(computed, gathered))
        computed = starts[-1] + unit.compute
    return computed - sum(unit.compute for unit in units)
