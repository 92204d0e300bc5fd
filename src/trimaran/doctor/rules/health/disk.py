"""F068: the disk of the run is full, or will be soon."""

from collections.abc import Iterator

from trimaran.core import Finding, show_bytes
from trimaran.doctor.evidence import Evidence, Line
from trimaran.doctor.evidence_queries import incidents_of, is_over, nodes_of, sound
from trimaran.doctor.step_breakdown import number

LEAST_BYTES = 1 << 30
CHECKPOINTS = 2.0  # that there must be room for
SOON = 3600.0  # seconds until it is full, at the pace of the samples
WATCHED = 120.0  # seconds of samples that a pace needs


def disk(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding when storage failed, when there is no room for the next checkpoints, or soon none at all."""
    trouble = incidents_of(evidence, "storage")
    size = max((number(each, "data", "bytes") or 0.0 for each in evidence.of_kind("checkpoint")), default=0.0)
    frees = {name: (number(samples[-1], "disk_free"), _seconds_left(samples)) for name, samples in nodes_of(evidence)}
    full = {name: free for name, (free, left) in frees.items() if free is not None
            and (free < max(LEAST_BYTES, CHECKPOINTS * size) or left < SOON)}  # fmt: skip
    if not trouble and not full:
        return
    where = min(full, key=lambda name: full[name], default="the run's disk")
    left = frees[where][1] if where in frees else float("inf")
    room = f"{show_bytes(full[where])} are free on {where}" if where in full else str(trouble[-1].get("what"))
    keep = evidence.recipe.checkpoint.keep
    yield Finding(
        code="F068",
        severity="fault" if trouble and is_over(trouble[-1]) else "warning",
        verdict=f"{room}, and a checkpoint takes {show_bytes(size)}"
        + (f"; at this pace it is full in {left / 60:.0f} minutes" if left < SOON else ""),
        culprit=f"disk of {where}",
        evidence={"free": full, "checkpoint_bytes": size, "incidents": [each.get("id") for each in trouble]},
        patch=sound(evidence.recipe, {"checkpoint.keep": 1}) if keep > 1 else {},
        fix="make room: `trimaran checkpoints prune RUN --keep 1`, or use another disk",
        expected_effect=f"{keep - 1} checkpoints fewer at a time, {show_bytes((keep - 1) * size)}" if keep > 1 else "",
        confidence=0.9,
    )


def _seconds_left(samples: list[Line]) -> float:
    """Return when the disk is full, if it goes on filling up as it did."""
    pairs = [(number(each, "time"), number(each, "disk_free")) for each in samples]
    told = [(at, free) for at, free in pairs if at is not None and free is not None]
    if len(told) < 2 or (seconds := told[-1][0] - told[0][0]) < WATCHED:
        return float("inf")
    pace = (told[0][1] - told[-1][1]) / seconds
    return told[-1][1] / pace if pace > 0 else float("inf")
