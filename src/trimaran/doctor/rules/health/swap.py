"""F071: a machine moves memory to its disk."""

from collections.abc import Iterator

from trimaran.core import Finding, show_bytes
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.measured import number
from trimaran.doctor.remedy import Patch
from trimaran.doctor.told import nodes_of, sound

LEAST_BYTES = 256 << 20
SHARE = 0.02  # of the machine's memory
FULL = 0.85  # of it in use: else what lies in the swap space is old and nobody misses it


def swap(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding for each machine whose swap space fills up while its memory is full."""
    for name, samples in nodes_of(evidence):
        told = [used for each in samples if (used := number(each, "swap_used")) is not None]
        ram, used = number(samples[-1], "ram"), number(samples[-1], "ram_used")
        if not told or not ram or not used or used < FULL * ram:
            continue
        grown = told[-1] - min(told)
        if grown < max(LEAST_BYTES, SHARE * ram):
            continue
        patch = sound(evidence.recipe, _patch(evidence))
        yield Finding(
            code="F071",
            severity="warning",
            verdict=f"{name} has {show_bytes(used)} of {show_bytes(ram)} in use and has moved {show_bytes(grown)} to "
            "its disk since the run began",
            culprit=name,
            evidence={"swap_used": told[-1], "grown": grown, "ram_used": used, "ram": ram},
            patch=patch,
            fix="" if patch else "use a machine with more memory, or fewer ranks on this one",
            expected_effect="less of the host's memory is taken, and nothing waits for the disk" if patch else "",
            confidence=0.85,
        )


def _patch(evidence: Evidence) -> Patch:
    """Return what takes least away of what the host's memory is used for: copies of the state, then loaders."""
    if evidence.recipe.checkpoint.memory != 0:
        return {"checkpoint.memory": 0}
    return {"data.workers": 1} if evidence.recipe.data.workers not in (0, 1) else {}
