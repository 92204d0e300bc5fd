"""Rules about training data: a slow loader, padding and unusable samples."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from statistics import fmean, median

from trimaran.core import Finding, show_seconds
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.evidence_queries import ended_run, incidents_of
from trimaran.doctor.predicted_gain import MIN_GAIN_FRACTION, Patch
from trimaran.doctor.step_breakdown import (
    StepBreakdown,
    data_wait_seconds,
    get_number,
    get_numbers,
    step_breakdown,
    warm_steps,
)

MIN_WAIT_FRACTION = 0.1  # of the time
MIN_WAITING_STEPS_FRACTION = 0.05  # a single slow read of a disk is no diagnosis
MIN_STEP_WAIT_FRACTION = 0.02  # of a step, to count it as waiting
LOADER_HEADROOM = 1.25  # loader throughput over the average need, as in the loader's tuner
MAX_WORKERS_IF_CORES_UNKNOWN = 8  # per rank
NO_CORES_FIX = (
    "there are no free cores for more loader processes: prepare the data in advance (tokenised shards, "
    "smaller images), put it on a faster disk, or give the node more cores"
)
BUSY_LOADER_FRACTION = 0.85  # of a core: a loader process that computes all the time
# A loader that waits for its storage needs little of a core, so that there may be more processes than free cores.
MIN_LOADER_CORES, MIN_SPARE_CORES = 0.05, 0.5  # of each process, and for all processes of a rank


def data_bound(evidence: Evidence) -> Iterator[Finding]:
    """Yield F001 if the trainer waits for its loader."""
    measured = step_breakdown(evidence)
    if measured is None or measured.fraction("data") < MIN_WAIT_FRACTION:
        return
    steps = warm_steps(evidence)
    waiting = [each for each in steps if data_wait_seconds(each) > MIN_STEP_WAIT_FRACTION * each["step_seconds"]]
    if len(waiting) < MIN_WAITING_STEPS_FRACTION * len(steps):
        return
    pinned = evidence.recipe.data.workers if isinstance(evidence.recipe.data.workers, int) else 0
    workers = int([pinned, *get_numbers(waiting, "loader", "workers")][-1])  # the run may have tuned the number
    busy = _cores_of_loader(evidence, measured, workers)
    patch, gain = _more_workers(evidence, measured, workers, busy)
    who = f"{workers} loader processes" if workers > 1 else "1 loader process" if workers else "the loader thread"
    facts = {"data_share": round(measured.fraction("data"), 4), "data_seconds": measured.data, "workers": workers}
    yield Finding(
        code="F001",
        severity="warning",
        verdict=f"the trainer waits {measured.fraction('data'):.0%} of its time for data: "
        f"{show_seconds(measured.data)} of a step of {show_seconds(measured.step)}",
        culprit=who,
        evidence=facts | ({"loader_busy": round(busy, 3)} if busy is not None else {}) | {"steps": measured.steps},
        patch=patch,
        fix="" if patch else NO_CORES_FIX,
        expected_effect=f"steps {gain:.0%} shorter" if patch else "",
        gain=gain if patch else None,
        confidence=0.95 if busy is None or busy > BUSY_LOADER_FRACTION else 0.8,
    )


def _cores_of_loader(evidence: Evidence, measured: StepBreakdown, workers: int) -> float | None:
    """Return the cores that a loader process used, or the loader thread while its rank waited; None without samples."""
    ranks = [rank for each in evidence.samples for rank in (each.get("ranks") or {}).values()]
    if not workers:
        used, waited = get_numbers(ranks, "cpu"), measured.fraction("data")
        return min(1.0, max(0.0, median(used) - (1 - waited)) / waited) if used and waited else None
    pinned = evidence.recipe.data.workers
    counts = [pinned if isinstance(pinned, int) else 0, *filter(None, get_numbers(evidence.steps, "loader", "workers"))]
    used = get_numbers(ranks, "loader_cpu")
    return min(1.0, fmean(used) / counts[-1]) if used and counts[-1] else None


def _more_workers(
    evidence: Evidence, measured: StepBreakdown, workers: int, loader_cores: float | None
) -> tuple[Patch, float]:
    """Return the number of workers that keeps up with the trainer, or the most that the cores allow, and its gain."""
    # A waiting trainer runs at the loader's rate, so loading a batch takes one worker `workers` steps. One core of each
    # rank is the rank's own. A process needs `loader_cores`, if that was measured, and else a whole one.
    busy = measured.step - measured.data
    load_seconds = max(1, workers) * measured.step
    wanted = math.ceil(LOADER_HEADROOM * load_seconds / busy)
    limits = [
        int(cores) // len(ranks) - 1
        for each in evidence.samples
        if (cores := get_number(each, "cores")) and isinstance(ranks := each.get("ranks"), dict) and ranks
    ]
    limit = min(limits, default=None)
    if limit is not None and loader_cores is not None:
        waiting = int(max(limit, MIN_SPARE_CORES) / max(loader_cores, MIN_LOADER_CORES))
        limit = max(limit, min(waiting, MAX_WORKERS_IF_CORES_UNKNOWN))
    given = max(1, min(wanted, MAX_WORKERS_IF_CORES_UNKNOWN if limit is None else limit))
    gain = 1 - max(busy, load_seconds / given) / measured.step
    return ({"data.workers": given}, gain) if gain >= MIN_GAIN_FRACTION else ({}, 0.0)


MIN_PADDING_FRACTION = 0.15  # of positions; packing leaves a few percent
PACKED_PADDING_FRACTION = 0.05  # that packing leaves at most, if samples are much shorter than a row


def padding(evidence: Evidence) -> Iterator[Finding]:
    """Yield F012 if rows contain much padding that packing would avoid."""
    measured = step_breakdown(evidence)
    rows = [each["rows"] for each in warm_steps(evidence) if isinstance(each.get("rows"), dict)]
    padded = sum(get_number(each, "padding") or 0.0 for each in rows)
    total = padded + sum(get_number(each, "tokens") or 0.0 for each in rows)
    if measured is None or not total or padded < MIN_PADDING_FRACTION * total:
        return
    batching, fraction = evidence.recipe.data.samples.batching, padded / total
    gain = (fraction - PACKED_PADDING_FRACTION) * measured.fraction("compute")
    is_packed = batching == "pack"
    fix = (
        f"rows of {evidence.recipe.data.seq_len} tokens do not suit these samples: make data.seq_len a multiple of "
        "their typical length"
    )
    yield Finding(
        code="F012",
        severity="warning",
        verdict=f"{fraction:.0%} of the computed positions are padding",
        culprit=f"data.samples.batching={batching}",
        evidence={"padding_share": round(fraction, 4), "padding_a_step": padded / len(rows), "batching": batching},
        patch={} if is_packed else {"data.samples.batching": "pack"},
        fix=fix if is_packed else "",
        expected_effect="" if is_packed else f"{gain:.0%} less compute for the same samples",
        gain=None if is_packed else gain,
        confidence=0.9,
    )


MIN_BAD_SAMPLES = 10
MIN_BAD_FRACTION = 0.001  # of all samples
LOCATION = re.compile(r"^\S+:\d+: ")  # the file and line of a sample, before the reason
TOO_MANY_CODE = "T055"  # of the error that ends a run with too many bad samples


def bad_samples(evidence: Evidence) -> Iterator[Finding]:
    """Yield F072 if many samples were skipped, or if bad samples ended the run."""
    bad = evidence.events_of_kind("bad_sample")
    reasons = {each["data"].get("sample"): LOCATION.sub("", str(each["data"].get("reason") or "")) for each in bad}
    incidents = incidents_of(evidence, "data")
    failed = {sample for each in incidents for sample in (each.get("evidence") or {}).get("sample_ids", ())}
    with_rows = [each for each in evidence.steps if "rows" in each]  # most lines of a long run leave them out
    scale = len(evidence.steps) / max(1, len(with_rows))
    quarantined = sum(get_number(each, "quarantined") or 0 for each in evidence.steps)
    left_out = (get_number(each, "rows", "bad") or 0 for each in with_rows if not get_number(each, "quarantined"))
    skipped = quarantined + scale * sum(left_out)
    rows = scale * sum(get_number(each, "rows", "samples") or 0 for each in with_rows)
    seen = round(rows) or evidence.last_step * evidence.recipe.train.global_batch
    count = max(len(reasons) + len(failed), round(skipped))
    ended = bool(incidents) and ended_run(incidents[-1])
    ended = ended or any(each["data"].get("code") == TOO_MANY_CODE for each in evidence.events_of_kind("error"))
    if not ended and (count < MIN_BAD_SAMPLES or count < MIN_BAD_FRACTION * seen):
        return
    common = Counter(reasons.values()).most_common(1)
    why = common[0][0] if common else str(incidents[-1].get("what")) if incidents else "they produced NaN or Inf"
    yield Finding(
        code="F072",
        severity="fault" if ended else "warning",
        verdict=f"{count} of {seen} samples were unusable ({count / seen if seen else 1:.2%}); most often: {why}",
        culprit=f"data.source {evidence.recipe.data.source}",
        evidence={"samples": sorted({*reasons, *failed} - {None})[:8], "reasons": dict(Counter(reasons.values()))},
        fix="fix or remove these samples; up to data.samples.max_bad and faults.max_quarantined the run continues "
        "without them",
        confidence=0.9,
    )
