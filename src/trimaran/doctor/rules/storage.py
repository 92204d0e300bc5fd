"""Rules about checkpoints and the disks and stores that hold them."""

from collections.abc import Iterator
from itertools import pairwise
from statistics import fmean, median

from trimaran.core import Finding, show_bytes, show_seconds
from trimaran.doctor.evidence import Evidence, Line
from trimaran.doctor.evidence_queries import ended_run, incidents_of, samples_by_node, valid_patch
from trimaran.doctor.predicted_gain import Patch
from trimaran.doctor.step_breakdown import (
    get_number,
    get_numbers,
    get_timed_numbers,
    phase_seconds,
    step_breakdown,
    warm_steps,
)

MIN_STALL_FRACTION = 0.04  # of the time; with checkpoint.every=auto it stays below 0.005
LONG_STALL_FRACTION = 0.25  # of a typical step
PATCHED_STALL_FRACTION = 0.01  # of the time, with asynchronous checkpoints at a fixed interval


def checkpoint_stall(evidence: Evidence) -> Iterator[Finding]:
    """Yield F007 if checkpoints take too much of the time."""
    measured, steps = step_breakdown(evidence), warm_steps(evidence)
    if measured is None or measured.fraction("checkpoint") < MIN_STALL_FRACTION:
        return
    # The run tunes how often it copies the state in its first steps, so the later half must stall as well.
    later = steps[len(steps) // 2 :]
    stalled = sum(phase_seconds(each, "checkpoint") for each in later)
    if stalled / sum(each["step_seconds"] for each in later) < MIN_STALL_FRACTION:
        return
    usual = measured.compute + measured.comm + measured.bubble + measured.straggler
    stalls = [
        (each["step"], seconds)
        for each in steps
        if (seconds := phase_seconds(each, "checkpoint")) > LONG_STALL_FRACTION * usual
    ]
    stall = fmean(seconds for _, seconds in stalls) if stalls else measured.checkpoint
    every = median(after - before for (before, _), (after, _) in pairwise(stalls)) if len(stalls) > 1 else 1
    # The patch that makes stalls short or rare, and the fraction of the time that remains.
    settings = evidence.recipe.checkpoint
    patch: Patch = {}
    left = measured.fraction("checkpoint")
    if not settings.asynchronous:
        patch, left = {"checkpoint.asynchronous": True}, PATCHED_STALL_FRACTION
    elif settings.every not in ("auto", "off"):
        patch, left = {"checkpoint.every": "auto"}, PATCHED_STALL_FRACTION / 2
    elif settings.memory not in ("auto", 0):
        patch, left = {"checkpoint.memory": "auto"}, PATCHED_STALL_FRACTION / 2
    gain = measured.fraction("checkpoint") - left
    yield Finding(
        code="F007",
        severity="warning",
        verdict=f"training stalls for checkpoints {measured.fraction('checkpoint'):.0%} of the time: "
        f"{show_seconds(stall)} every {every:.0f} steps, and a step takes {show_seconds(usual)}",
        culprit="checkpoint interval" if evidence.recipe.checkpoint.asynchronous else "synchronous checkpoints",
        evidence={
            "checkpoint_share": round(measured.fraction("checkpoint"), 4),
            "stall_seconds": stall,
            "every_steps": every,
            "asynchronous": evidence.recipe.checkpoint.asynchronous,
        },
        patch=patch,
        fix="" if patch else "the copy itself is slow: check the host's memory and the disk with `trimaran doctor`",
        expected_effect=f"steps {gain:.0%} shorter on average" if patch else "",
        gain=gain if patch else None,
        confidence=0.9,
    )


MIN_FREE_BYTES = 1 << 30
MIN_FREE_CHECKPOINTS = 2.0  # that must still fit
MAX_SECONDS_TO_FULL = 3600.0  # at the rate of the samples
MIN_OBSERVED_SECONDS = 120.0  # of samples, to compute a rate


def disk(evidence: Evidence) -> Iterator[Finding]:
    """Yield F068 if a write failed, the next checkpoints do not fit, or the disk is full within the hour."""
    incidents = incidents_of(evidence, "storage")
    size = max(get_numbers(evidence.events_of_kind("checkpoint"), "data", "bytes"), default=0.0)
    nodes = {
        name: (get_number(samples[-1], "disk_free"), _seconds_to_full(samples))
        for name, samples in samples_by_node(evidence)
    }
    min_free = max(MIN_FREE_BYTES, MIN_FREE_CHECKPOINTS * size)
    full = {name: free for name, (free, left) in nodes.items()
            if free is not None and (free < min_free or left < MAX_SECONDS_TO_FULL)}  # fmt: skip
    if not incidents and not full:
        return
    where = min(full, key=lambda name: full[name], default="the run's disk")
    left = nodes[where][1] if where in nodes else float("inf")
    what = f"{show_bytes(full[where])} are free on {where}" if where in full else str(incidents[-1].get("what"))
    keep = evidence.recipe.checkpoint.keep
    yield Finding(
        code="F068",
        severity="fault" if incidents and ended_run(incidents[-1]) else "warning",
        verdict=f"{what}, and a checkpoint takes {show_bytes(size)}"
        + (f"; at this rate the disk is full in {left / 60:.0f} minutes" if left < MAX_SECONDS_TO_FULL else ""),
        culprit=f"disk of {where}",
        evidence={"free": full, "checkpoint_bytes": size, "incidents": [each.get("id") for each in incidents]},
        patch=valid_patch(evidence.recipe, {"checkpoint.keep": 1}) if keep > 1 else {},
        fix="free disk space: `trimaran checkpoints prune RUN --keep 1`, or use another disk",
        expected_effect=f"{keep - 1} fewer checkpoints on disk, {show_bytes((keep - 1) * size)}" if keep > 1 else "",
        confidence=0.9,
    )


def _seconds_to_full(samples: list[Line]) -> float:
    """Return the seconds until the disk is full at the rate of the samples; infinity if it does not fill up."""
    known = get_timed_numbers(samples, "disk_free")
    if len(known) < 2 or (seconds := known[-1][0] - known[0][0]) < MIN_OBSERVED_SECONDS:
        return float("inf")
    rate = (known[0][1] - known[-1][1]) / seconds
    return known[-1][1] / rate if rate > 0 else float("inf")


MIN_SKIPPED = 3


def not_in_store(evidence: Evidence) -> Iterator[Finding]:
    """Yield F074 if the last upload failed, or if uploads take longer than the time between two checkpoints."""
    ended = [each for each in evidence.events_of_kind("upload") if "sent" not in each["data"]]
    if not ended:
        return
    url, failed = ended[-1]["data"].get("url"), str(ended[-1]["data"].get("failed") or "")
    steps = [each["step"] for each in ended if not each["data"].get("failed")]
    newest = f"the newest checkpoint there is that of step {max(steps)}" if steps else "no checkpoint of this run is"
    fix = "make the store reachable and check the credentials; the next checkpoint is tried again by itself"
    if failed:
        yield Finding(
            code="F074",
            severity="warning",
            verdict=f"the last checkpoint is not in {url}: {failed}; {newest}{'' if steps else ' there'}",
            culprit="checkpoint.store",
            evidence={
                "failed": [each["step"] for each in ended if each["data"].get("failed")][-8:],
                "uploaded": steps[-8:],
            },
            fix=fix,
            confidence=0.95,
        )
        return
    skipped = int(sum(get_numbers(ended, "data", "skipped")))
    if skipped >= max(MIN_SKIPPED, len(ended)):
        seconds = max(get_numbers(ended, "data", "seconds"), default=0.0)
        yield Finding(
            code="F074",
            severity="note",
            verdict=f"{skipped} checkpoints were not uploaded to {url}: an upload takes up to {show_seconds(seconds)}, "
            f"longer than from one checkpoint to the next; {newest}",
            culprit="checkpoint.store",
            evidence={"skipped": skipped, "uploaded": steps[-8:], "upload_seconds": seconds},
            fix="save less often (checkpoint.every), or use a faster store",
            confidence=0.9,
        )
