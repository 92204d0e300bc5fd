"""F068: the run's disk is full, or will be soon."""

from collections.abc import Iterator

from trimaran.core import Finding, show_bytes
from trimaran.doctor.evidence import Evidence, Line
from trimaran.doctor.evidence_queries import ended_run, incidents_of, samples_by_node, valid_patch
from trimaran.doctor.step_breakdown import get_number

MIN_FREE_BYTES = 1 << 30
MIN_FREE_CHECKPOINTS = 2.0  # that must still fit
MAX_SECONDS_TO_FULL = 3600.0  # at the rate of the samples
MIN_OBSERVED_SECONDS = 120.0  # of samples, to compute a rate


def disk(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if a write failed, the next checkpoints do not fit, or the disk is full within the hour."""
    incidents = incidents_of(evidence, "storage")
    size = max(
        (get_number(each, "data", "bytes") or 0.0 for each in evidence.events_of_kind("checkpoint")), default=0.0
    )
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
    pairs = [(get_number(each, "time"), get_number(each, "disk_free")) for each in samples]
    known = [(at, free) for at, free in pairs if at is not None and free is not None]
    if len(known) < 2 or (seconds := known[-1][0] - known[0][0]) < MIN_OBSERVED_SECONDS:
        return float("inf")
    rate = (known[0][1] - known[-1][1]) / seconds
    return known[-1][1] / rate if rate > 0 else float("inf")
