"""F070: the memory of a GPU has errors that could not be corrected."""

from collections.abc import Iterator

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.evidence_queries import gpus_of, smi_name
from trimaran.doctor.step_breakdown import number


def gpu_memory_errors(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding for each GPU that has counted errors which its ECC could not correct."""
    for name, samples in gpus_of(evidence):
        counts = [count for each in samples if (count := number(each, "ecc_uncorrected")) is not None]
        if not counts or not counts[-1]:
            continue
        new = counts[-1] - counts[0]
        yield Finding(
            code="F070",
            severity="fault" if new else "warning",
            verdict=f"the memory of {name} had {counts[-1]:.0f} errors that could not be corrected, {new:.0f} of them "
            "during this run",
            culprit=name,
            evidence={"errors": counts[-1], "new": new, "uuid": samples[-1].get("uuid")},
            fix=f"take the machine out and reset the device (`nvidia-smi -r -i {smi_name(samples[-1])}`); if they "
            "come back, have it replaced",
            confidence=0.95,
        )
