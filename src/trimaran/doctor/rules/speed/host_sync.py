"""F009: host-device synchronisation inside a step."""

from collections.abc import Iterator

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence

ALLOWED_SYNCS_PER_STEP = 1  # in forward and backward


def host_sync(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if a profile shows that the host waits for the device inside forward or backward.

    It needs a profile; `trimaran profile RUN` makes one of a live run.
    """
    for trace in evidence.traces:
        steps = max(1, trace["steps"])
        waits, seconds = sum(trace["waits"].values()) / steps, trace["wait_seconds"] / steps
        if waits <= ALLOWED_SYNCS_PER_STEP:
            continue
        place = max(trace["places"], key=lambda each: trace["places"][each])
        yield Finding(
            code="F009",
            severity="warning",
            verdict=f"the host waits for the device {waits:.0f} times in the forward and backward of a step, "
            f"{seconds * 1e3:.1f} ms in total, and launches no kernels meanwhile",
            culprit=place,
            evidence={
                "waits_a_step": round(waits, 2),
                "by_call": trace["waits"],
                "places": trace["places"],
                "trace": trace["file"],
            },
            fix="keep values on the device: no .item(), .tolist(), .cpu(), print or `if tensor:` in forward, a loss "
            "or a hook",
            confidence=0.85,
        )
        return
