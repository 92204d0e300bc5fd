"""Rules about the memory of devices and hosts: fragmented, full, growing or unused."""

from collections.abc import Iterator
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from trimaran.core import Finding, show_bytes, show_seconds
from trimaran.doctor.evidence import Evidence, Line
from trimaran.doctor.evidence_queries import incident_finding, incidents_of, samples_by_node, valid_patch
from trimaran.doctor.memory_fix import adapter_fix, cheapest_memory_fix, held_by_others, usable_bytes
from trimaran.doctor.predicted_gain import Patch, best_patch, remedy_fields
from trimaran.doctor.step_breakdown import get_number, get_numbers, get_timed_numbers, step_breakdown
from trimaran.planner import FIXED_TERMS, larger_micro_batches
from trimaran.runs import uses_expandable_segments

FIRST_RUNG: Patch = {"faults.expandable_segments": True}
FIRST_EFFECT = "no fragmentation: segments of the allocator grow in place, which costs nothing"
MIN_STEPS = 10
MIN_FRAGMENTED_FRACTION = 0.25  # of reserved memory that is free but split
MIN_RESERVED_FRACTION = 0.8  # of the device: below that fragmentation does no harm
MAX_RETRIES_PER_STEP = 0.02  # each retry synchronises the device and frees all cached blocks
RETRY_SECONDS, MAX_RETRY_GAIN = 0.1, 0.2  # what a retry and its new reservations cost, and the most of a step; assumed


def fragmentation(evidence: Evidence) -> Iterator[Finding]:
    """Yield F060 if much of the reserved memory is free but split, or allocations are retried often."""
    steps = [each for each in evidence.steps if isinstance(each.get("memory"), dict)]
    if len(steps) < MIN_STEPS:
        return
    retries = (get_number(steps[-1], "memory", "retries") or 0.0) - (get_number(steps[0], "memory", "retries") or 0.0)
    fragmented = median(get_number(each, "memory", "fragmentation") or 0.0 for each in steps)
    reserved, total = (
        get_number(steps[-1], "memory", "reserved") or 0.0,
        get_number(steps[-1], "memory", "total") or 0.0,
    )
    thrashes = retries > MAX_RETRIES_PER_STEP * len(steps)
    is_split = fragmented > MIN_FRAGMENTED_FRACTION and reserved > MIN_RESERVED_FRACTION * total
    if not total or not (thrashes or is_split):
        return
    # A user's PYTORCH_ALLOC_CONF is not in the run's files.
    expands = evidence.recipe.faults.expandable_segments
    if not (uses_expandable_segments(evidence.plan) if expands == "auto" else expands):
        seconds = median(each["step_seconds"] for each in steps)
        gain = min(MAX_RETRY_GAIN, RETRY_SECONDS * retries / len(steps) / seconds) if thrashes else 0.0
        patch, effect = FIRST_RUNG, FIRST_EFFECT
    else:
        memory_fix = cheapest_memory_fix(evidence, ran_out=thrashes)
        patch, effect = (memory_fix.patch, memory_fix.effect) if memory_fix else ({}, "no fragmentation")
        gain = memory_fix.gain if memory_fix else None
    yield Finding(
        code="F060",
        severity="warning",
        verdict=f"{fragmented:.0%} of the {show_bytes(reserved)} that the allocator reserves is free but fragmented, "
        f"with {retries:.0f} allocation retries in {len(steps)} steps",
        culprit="allocator of rank 0",
        evidence={"fragmentation": fragmented, "retries": retries, "reserved": reserved, "total": total},
        patch=patch,
        fix="" if patch else "use smaller micro-batches, or a GPU with more memory",
        expected_effect=effect,
        gain=gain,
        confidence=0.8,
    )


OTHER_FIX = "use more or larger devices, shorter sequences or a smaller model"
MAX_DEVICE_FRACTION = 0.95  # of a device's memory, at the peak of allocated tensors
MAX_HOST_FRACTION = 0.97  # of a node's memory


class MemoryUse(NamedTuple):
    """Memory in use of a device or host; `others` is the part that other processes hold."""

    where: str
    used: float
    total: float
    others: float = 0.0


def memory_tight(evidence: Evidence) -> Iterator[Finding]:
    """Yield F061 if a device or a host is almost full. If memory ran out, it is F062."""
    if incidents_of(evidence, "oom"):
        return
    use = max(_uses(evidence), key=lambda each: each.used / each.total, default=None)
    if use is None:
        return
    memory_fix = cheapest_memory_fix(evidence, ran_out=True)
    others = f", and other processes hold {show_bytes(use.others)} of that" if use.others else ""
    fix = "" if memory_fix else OTHER_FIX
    yield Finding(
        code="F061",
        severity="warning",
        verdict=f"{use.where} has {show_bytes(use.used)} of {show_bytes(use.total)} in use, "
        f"{use.used / use.total:.0%}{others}",
        culprit=use.where,
        evidence={"used": use.used, "total": use.total, "others": use.others},
        fix="find the other processes on the device with `nvidia-smi`, and stop them" if use.others else fix,
        **remedy_fields(memory_fix),
        confidence=0.9,
    )


def _uses(evidence: Evidence) -> Iterator[MemoryUse]:
    for step in evidence.steps[-1:]:
        on_device = get_number(step, "memory", "reserved") is not None  # only the CUDA allocator reports it
        total, peak = get_number(step, "memory", "total"), get_number(step, "peak_bytes")
        ranks = next((each for each in reversed(evidence.steps) if "ranks" in each), step)
        at = get_number(ranks, "ranks", "peak_bytes", "at") or 0.0
        most = max(peak or 0.0, get_number(ranks, "ranks", "peak_bytes", "max") or 0.0)
        if on_device and total and most > MAX_DEVICE_FRACTION * total:
            yield MemoryUse(f"the device of rank {at:.0f}", most, total)
        others = held_by_others(evidence)
        if on_device and total and peak and others and peak + others > MAX_DEVICE_FRACTION * total:
            yield MemoryUse("the device of rank 0", min(peak + others, total), total, others)
    for name, samples in samples_by_node(evidence):
        used, total = get_number(samples[-1], "ram_used"), get_number(samples[-1], "ram")
        if used and total and used > MAX_HOST_FRACTION * total:
            yield MemoryUse(f"the host {name}", used, total)


def out_of_memory(evidence: Evidence) -> Iterator[Finding]:
    """Yield F062 if a rank ran out of memory."""
    incidents = incidents_of(evidence, "oom")
    if not incidents:
        return
    last = incidents[-1]
    replanned = last.get("action") == "replanned"
    memory_fix = None if replanned else cheapest_memory_fix(evidence, ran_out=True) or adapter_fix(evidence)
    patch = _present_plan(evidence) if replanned else memory_fix.patch if memory_fix else {}
    effect = memory_fix.effect if memory_fix else ""
    if replanned:
        effect = "a new run starts with the plan that fits, and does not run out of memory first"
    holder = _largest_holder(evidence, last)
    yield incident_finding(
        "F062",
        incidents,
        f"{last.get('what')}"
        + (f"; {holder}" if holder else "")
        + (f". The run continued with another plan: {last.get('evidence', {}).get('why', '')}" if replanned else ""),
        evidence={"step": last.get("step"), "holder": holder},
        patch=patch,
        fix="" if patch and not (memory_fix and memory_fix.caution) else OTHER_FIX,
        expected_effect=effect,
        gain=memory_fix.gain if memory_fix and not memory_fix.caution else None,
        confidence=0.9,
    )


def _present_plan(evidence: Evidence) -> Patch:
    plan = evidence.plan
    rows: Patch = {"plan.micro_batches": [*plan.rows_by_rank]} if plan.rows_by_rank else {}
    fields: Patch = (rows or {"plan.micro_batch": plan.micro_batch}) | {"plan.grad_accum": plan.grad_accum}
    changed = {"recompute": "none", "sharding": "none", "offload": "none", "loss": "logits"}
    fields |= {f"plan.{name}": getattr(plan, name) for name, usual in changed.items() if getattr(plan, name) != usual}
    if plan.sharding != "none" or plan.mesh.cp > 1:
        axes = ("dp_replicate", "dp_shard", "cp")
        fields |= {f"plan.mesh.{axis}": getattr(plan.mesh, axis) for axis in axes}
    return valid_patch(evidence.recipe, fields)


def _largest_of_snapshot(snapshot: Line) -> tuple[str, float] | None:
    """Return the largest holder, such as `activations of layers.0`, and its bytes; None if there is none."""
    within = snapshot.get("within")
    lists = (snapshot.get("holders"), within.get("holders") if isinstance(within, dict) else None)
    holders = [each for found in lists if isinstance(found, list) for each in found if isinstance(each, dict)]
    known = [each for each in holders if isinstance(each.get("bytes"), int | float) and each.get("kind") != "free"]
    if not known:
        return None
    most = max(known, key=lambda each: each["bytes"])
    return f"{most.get('kind')} of {most.get('module') or 'no module'}", float(most["bytes"])


def _largest_holder(evidence: Evidence, incident: Line) -> str:
    """Return what held most when memory ran out, or else the largest predicted term that a plan can change."""
    suspects = incident.get("suspects") or ()
    taken = [each for each in evidence.snapshots if "oom" in each and each["rank"] in suspects]
    if taken and (held := _largest_of_snapshot(taken[-1])):
        return f"{held[0]} held most, {show_bytes(held[1])}, see profiles/{taken[-1]['file']}"
    memory = evidence.plan.prediction.memory if evidence.plan.prediction else {}
    terms = {name: size for name, size in memory.items() if name not in FIXED_TERMS}
    if not terms:
        return ""
    most = max(terms, key=lambda name: terms[name])
    size = f"{show_bytes(terms[most])} of {show_bytes(sum(terms.values()))}"
    return f"most of the plan's memory is {most.replace('_', ' ')}, {size}"


WARM_UP_FRACTION = 0.25  # of the points: caches fill, and the first evaluation and checkpoint take place
NUM_WINDOWS = 6
MIN_POINTS = 24
MIN_SECONDS = 100.0
MIN_GROWTH_BYTES = 128 << 20
MIN_GROWTH_FRACTION = 0.01  # of the memory of the node or device
MIN_STEADINESS = 0.4  # the slowest window's growth, as a fraction of the mean; memory that fills a cache slows down
HOST_FIX = (
    "keep no tensor, list or cache that gets longer with every step, and no loss without `.item()` or `.detach()`; "
    "`trimaran profile RUN --memory`, some minutes apart, shows which tensors have become more"
)
LOADER_FIX = "return samples without keeping them: a cache in a data source or its transforms needs a limit"


class MemorySeries(NamedTuple):
    """Bytes over time: of whom, (seconds, bytes) in use, how many there are, and what to do if they run out."""

    holder: str
    points: list[tuple[float, float]]
    total: float
    fix: str


class Growth(NamedTuple):
    """Bytes that were added within so many seconds, after the warm-up."""

    bytes: float
    seconds: float


def memory_growth(evidence: Evidence) -> Iterator[Finding]:
    """Yield F077 for the rank whose memory grows fastest, as a fraction of what there is."""
    found = [(series, growth) for series in _all_series(evidence) if (growth := _growth(series)) is not None]
    if not found:
        return
    series, growth = max(found, key=lambda each: each[1].bytes / each[1].seconds / each[0].total)
    rate, used = growth.bytes / growth.seconds, series.points[-1][1]
    until_full = max(0.0, series.total - used) / rate
    holders = [
        holder for each in evidence.snapshots if (holder := _largest_of_snapshot(each)) is not None and holder[1]
    ]
    most = ""
    if holders:
        most = f"; the largest in the newest memory snapshot: {holders[-1][0]}, {show_bytes(holders[-1][1])}"
    yield Finding(
        code="F077",
        severity="warning",
        verdict=f"{series.holder} grows by {show_bytes(3600 * rate)} an hour, from {show_bytes(used - growth.bytes)} "
        f"to {show_bytes(used)} of {show_bytes(series.total)}; full in {show_seconds(until_full)}{most}",
        culprit=series.holder,
        evidence={"growth": growth.bytes, "seconds": growth.seconds, "used": used, "total": series.total},
        fix=series.fix,
        expected_effect="the run does not end when memory is full",
        confidence=0.8,
    )


def _all_series(evidence: Evidence) -> Iterator[MemorySeries]:
    """Yield memory of ranks, loaders and rank 0's tensors, without pages of mapped files, which the kernel drops."""
    for node, samples in samples_by_node(evidence):
        total = get_number(samples[-1], "ram") or 0.0
        ranks = samples[-1].get("ranks")
        for rank in ranks if isinstance(ranks, dict) else ():
            kinds = (("private", "host memory", HOST_FIX), ("loader_private", "host memory of the loader", LOADER_FIX))
            for key, what, fix in kinds:
                points = get_timed_numbers(samples, "ranks", rank, key)
                yield MemorySeries(f"{what} of rank {rank} on {node}", points, total, fix)
    # Only the CUDA allocator reports reserved memory.
    on_gpu = [each for each in evidence.steps if get_number(each, "memory", "reserved") is not None]
    points = get_timed_numbers(on_gpu, "memory", "allocated")
    totals = get_numbers(evidence.steps, "memory", "total")
    if points and totals:
        yield MemorySeries("memory of the tensors on the device of rank 0", points, totals[-1], HOST_FIX)


def _growth(series: MemorySeries) -> Growth | None:
    """Return the growth of the least value of each window after the warm-up; None unless it is large and steady."""
    points = series.points[int(WARM_UP_FRACTION * len(series.points)) :]
    seconds, values = [at for at, _ in points], [value for _, value in points]
    if len(series.points) < MIN_POINTS or seconds[-1] - seconds[0] < MIN_SECONDS or not series.total:
        return None
    size = len(values) // NUM_WINDOWS
    values = values[-NUM_WINDOWS * size :]
    lows = [min(values[start : start + size]) for start in range(0, len(values), size)]
    increases = [after - before for before, after in pairwise(lows)]
    grown = lows[-1] - lows[0]
    if min(increases) < MIN_STEADINESS * grown / len(increases):
        return None
    if grown < max(MIN_GROWTH_BYTES, MIN_GROWTH_FRACTION * series.total):
        return None
    return Growth(grown, seconds[-size] - seconds[-len(values)])


MAX_USED_FRACTION = 0.7  # of a device's memory


def unused_memory(evidence: Evidence) -> Iterator[Finding]:
    """Yield F006 if a larger micro-batch, less recompute or less offload fits and shortens the step."""
    measured, question = step_breakdown(evidence), evidence.planner_inputs()
    if measured is None or question is None:
        return
    peak = max(get_numbers(evidence.steps, "peak_bytes"), default=0.0)
    total = usable_bytes(evidence) or float(question.cluster.device.memory_bytes)
    if not peak or peak > MAX_USED_FRACTION * total:
        return
    plan = evidence.plan
    patches = [*larger_micro_batches(plan)]
    if plan.recompute != "none":
        patches += [{"plan.recompute": "none"}, *({"plan.recompute": "none", **each} for each in patches)]
    if plan.offload != "none":
        patches.append({"plan.offload": "none"})
    best = best_patch(evidence, measured, patches)
    if best is None:
        return
    yield Finding(
        code="F006",
        severity="warning" if best.gain > 0.15 else "note",
        verdict=f"only {peak / total:.0%} of the memory is in use ({show_bytes(peak)} of {show_bytes(total)}), and "
        "using more would shorten steps",
        culprit=f"micro-batch {evidence.plan.micro_batch} x accumulation {evidence.plan.grad_accum}",
        evidence={
            "peak_bytes": peak,
            "total_bytes": total,
            "micro_batch": evidence.plan.micro_batch,
            "recompute": evidence.plan.recompute,
            "sharding": evidence.plan.sharding,
        },
        **remedy_fields(best),
        confidence=0.8,
    )
