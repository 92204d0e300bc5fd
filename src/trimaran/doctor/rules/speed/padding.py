"""F012: much of the compute is padding."""

from collections.abc import Iterator

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.step_breakdown import get_number, steady_steps, step_breakdown

MIN_PADDING_FRACTION = 0.15  # of positions; packing leaves a few percent
PACKED_PADDING_FRACTION = 0.05  # that packing leaves at most, if samples are much shorter than a row


def padding(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if rows contain much padding that packing would avoid."""
    measured = step_breakdown(evidence)
    rows = [each["rows"] for each in steady_steps(evidence) if isinstance(each.get("rows"), dict)]
    padded = sum(get_number(each, "padding") or 0.0 for each in rows)
    total = padded + sum(get_number(each, "tokens") or 0.0 for each in rows)
    if measured is None or not total or padded < MIN_PADDING_FRACTION * total:
        return
    batching = evidence.recipe.data.samples.batching
    fraction = padded / total
    gain = (fraction - PACKED_PADDING_FRACTION) * measured.fraction("compute")
    yield Finding(
        code="F012",
        severity="warning",
        verdict=f"{fraction:.0%} of the computed positions are padding",
        culprit=f"data.samples.batching={batching}",
        evidence={"padding_share": round(fraction, 4), "padding_a_step": padded / len(rows), "batching": batching},
        patch={"data.samples.batching": "pack"} if batching != "pack" else {},
        fix=""
        if batching != "pack"
        else f"rows of {evidence.recipe.data.seq_len} tokens do not suit these samples: make "
        "data.seq_len a multiple of their typical length",
        expected_effect=f"{gain:.0%} less compute for the same samples" if batching != "pack" else "",
        gain=gain if batching != "pack" else None,
        confidence=0.9,
    )
