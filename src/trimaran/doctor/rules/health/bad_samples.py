"""F072: many samples are unusable."""

import re
from collections import Counter
from collections.abc import Iterator

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.evidence_queries import ended_run, incidents_of
from trimaran.doctor.step_breakdown import get_number

MIN_BAD_SAMPLES = 10
MIN_BAD_FRACTION = 0.001  # of all samples
LOCATION = re.compile(r"^\S+:\d+: ")  # the file and line of a sample, before the reason
TOO_MANY_CODE = "T055"  # of the error that ends a run with too many bad samples


def bad_samples(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if many samples were skipped, or if bad samples ended the run."""
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
