"""F072: many samples cannot be used."""

import re
from collections import Counter
from collections.abc import Iterator

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.evidence_queries import incidents_of, is_over
from trimaran.doctor.step_breakdown import number

FEWEST = 10
PLACE = re.compile(r"^\S+:\d+: ")  # the file and line of a sample, before what is wrong with it
SHARE = 0.001  # of all samples
TOO_MANY = "T055"  # how a run ends in which too many were bad


def bad_samples(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding when more samples than a few were left out, or when they have ended the run."""
    bad = evidence.of_kind("bad_sample")
    reasons = {each["data"].get("sample"): PLACE.sub("", str(each["data"].get("reason") or "")) for each in bad}
    trouble = incidents_of(evidence, "data")
    failed = {sample for each in trouble for sample in (each.get("evidence") or {}).get("sample_ids", ())}
    left_out = sum(number(each, "quarantined") or number(each, "rows", "bad") or 0 for each in evidence.steps)
    rows = sum(number(each, "rows", "samples") or 0 for each in evidence.steps)
    seen = round(rows) or evidence.last_step * evidence.recipe.train.global_batch
    count = max(len(reasons) + len(failed), round(left_out))
    over = bool(trouble) and is_over(trouble[-1])
    over = over or any(each["data"].get("code") == TOO_MANY for each in evidence.of_kind("error"))
    if not over and (count < FEWEST or count < SHARE * seen):
        return
    common = Counter(reasons.values()).most_common(1)
    why = common[0][0] if common else str(trouble[-1].get("what")) if trouble else "they gave numbers that are none"
    yield Finding(
        code="F072",
        severity="fault" if over else "warning",
        verdict=f"{count} of {seen} samples could not be used, {count / seen if seen else 1:.2%}; most often: {why}",
        culprit=f"data.source {evidence.recipe.data.source}",
        evidence={"samples": sorted({*reasons, *failed} - {None})[:8], "reasons": dict(Counter(reasons.values()))},
        fix="mend or remove these samples; up to data.samples.max_bad and faults.max_quarantined the run goes on "
        "without them",
        confidence=0.9,
    )
