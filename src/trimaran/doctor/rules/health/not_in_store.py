"""F074: checkpoints do not reach the object store, or not all of them."""

from collections.abc import Iterator

from trimaran.core import Finding, show_seconds
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.step_breakdown import get_number

MIN_SKIPPED = 3


def not_in_store(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if the last upload failed, or if uploads take longer than the time between two checkpoints."""
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
    skipped = int(sum(get_number(each, "data", "skipped") or 0 for each in ended))
    if skipped >= max(MIN_SKIPPED, len(ended)):
        seconds = max(get_number(each, "data", "seconds") or 0.0 for each in ended)
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
