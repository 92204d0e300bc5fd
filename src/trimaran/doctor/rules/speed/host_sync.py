"""F009: the host waits for the device in the middle of a step."""

from collections.abc import Iterator

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence

OURS = 1  # wait a step that forward and backward may have


def host_sync(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding when a profile shows that the host waits for the device inside forward or backward.

    Without a profile nobody knows: `trimaran profile RUN` makes one of a live run.
    """
    for trace in evidence.traces:
        steps = max(1, trace["steps"])
        waits, seconds = sum(trace["waits"].values()) / steps, trace["wait_seconds"] / steps
        if waits <= OURS:
            continue
        place = max(trace["places"], key=lambda each: trace["places"][each])
        yield Finding(
            code="F009",
            severity="warning",
            verdict=f"the host waits for the device {waits:.0f} times in the forward and backward of a step, "
            f"{seconds * 1e3:.1f} ms in all, and prepares nothing for it meanwhile",
            culprit=place,
            evidence={
                "waits_a_step": round(waits, 2),
                "by_call": trace["waits"],
                "places": trace["places"],
                "trace": trace["file"],
            },
            fix="keep numbers on the device: no .item(), .tolist(), .cpu(), print or `if tensor:` in a forward, a loss "
            "or a hook",
            confidence=0.85,
        )
        return
