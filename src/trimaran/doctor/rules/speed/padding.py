"""F012: a good part of what is computed is padding."""

from collections.abc import Iterator

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.step_breakdown import measure, number, settled

SHARE = 0.15  # of the positions; packing leaves a few in a hundred
PACKED = 0.05  # what packing leaves, at most, where samples are much shorter than a row


def padding(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding when rows are filled up with padding that packing would do without."""
    measured = measure(evidence)
    rows = [each["rows"] for each in settled(evidence) if isinstance(each.get("rows"), dict)]
    padded = sum(number(each, "padding") or 0.0 for each in rows)
    total = padded + sum(number(each, "tokens") or 0.0 for each in rows)
    if measured is None or not total or padded < SHARE * total:
        return
    batching = evidence.recipe.data.samples.batching
    share = padded / total
    gain = (share - PACKED) * measured.share("compute")
    yield Finding(
        code="F012",
        severity="warning",
        verdict=f"{share:.0%} of what is computed is padding",
        culprit=f"data.samples.batching={batching}",
        evidence={"padding_share": round(share, 4), "padding_a_step": padded / len(rows), "batching": batching},
        patch={"data.samples.batching": "pack"} if batching != "pack" else {},
        fix=""
        if batching != "pack"
        else f"rows of {evidence.recipe.data.seq_len} tokens fit these samples badly: make "
        "data.seq_len a multiple of their usual length",
        expected_effect=f"{gain:.0%} less to compute for the same samples" if batching != "pack" else "",
        gain=gain if batching != "pack" else None,
        confidence=0.9,
    )
