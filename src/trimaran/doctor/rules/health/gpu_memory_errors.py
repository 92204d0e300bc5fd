"""F070: a GPU has uncorrected ECC memory errors."""

from collections.abc import Iterator

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.evidence_queries import nvidia_smi_id, samples_by_gpu
from trimaran.doctor.step_breakdown import get_number


def gpu_memory_errors(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding for each GPU that counted uncorrected ECC errors."""
    for name, samples in samples_by_gpu(evidence):
        counts = [count for each in samples if (count := get_number(each, "ecc_uncorrected")) is not None]
        if not counts or not counts[-1]:
            continue
        new = counts[-1] - counts[0]
        yield Finding(
            code="F070",
            severity="fault" if new else "warning",
            verdict=f"{name} had {counts[-1]:.0f} uncorrected memory errors, {new:.0f} of them during this run",
            culprit=name,
            evidence={"errors": counts[-1], "new": new, "uuid": samples[-1].get("uuid")},
            fix=f"take the node out and reset the GPU (`nvidia-smi -r -i {nvidia_smi_id(samples[-1])}`); if errors "
            "return, have it replaced",
            confidence=0.95,
        )
