"""F071: a machine moves memory to its disk."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from trimaran.core import Finding, show_bytes
from trimaran.doctor.evidence import Evidence, Line
from trimaran.doctor.evidence_queries import nodes_of, sound
from trimaran.doctor.predicted_gain import Patch
from trimaran.doctor.step_breakdown import number

LEAST_BYTES = 256 << 20
SHARE = 0.02  # of the machine's memory
FULL = 0.85  # of it in use: else what lies in the swap space is old and nobody misses it


def swap(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding for each machine that moves memory to its swap space and back while its memory is full."""
    for name, samples in nodes_of(evidence):
        rams, useds = _numbers(samples, "ram"), _numbers(samples, "ram_used")
        if not rams or not useds or max(useds) < FULL * rams[-1]:
            continue
        ram, used, moved = rams[-1], max(useds), _moved(samples)
        if moved < max(LEAST_BYTES, SHARE * ram):
            continue
        patch = sound(evidence.recipe, _patch(evidence))
        yield Finding(
            code="F071",
            severity="warning",
            verdict=f"{name} has {show_bytes(used)} of {show_bytes(ram)} in use and moves memory to its disk: "
            f"{show_bytes(moved)} since the run began",
            culprit=name,
            evidence={"moved": moved, "swap_used": (_numbers(samples, "swap_used") or [0])[-1], "ram_used": used,
                      "ram": ram},
            patch=patch,
            fix="" if patch else "use a machine with more memory, or fewer ranks on this one",
            expected_effect="less of the host's memory is taken, and nothing waits for the disk" if patch else "",
            confidence=0.85,
        )  # fmt: skip


def _moved(samples: Sequence[Line]) -> float:
    """Return the bytes that went to the swap space or came back; where nobody counted them, what it has grown by.

    What lies there may have been put there before the first sample, and stay: only what moves is waited for.
    """
    held = _numbers(samples, "swap_used")
    grown = held[-1] - min(held) if held else 0.0
    pairs = [
        (number(after, "time"), number(before, "time"), number(after, "swap_read"), number(after, "swap_written"))
        for before, after in pairwise(samples)
    ]
    counted = sum((now - then) * (came + went) for now, then, came, went in pairs
                  if now is not None and then is not None and came is not None and went is not None)  # fmt: skip
    return max(grown, counted)


def _numbers(samples: Sequence[Line], name: str) -> list[float]:
    return [value for each in samples if (value := number(each, name)) is not None]


def _patch(evidence: Evidence) -> Patch:
    """Return what takes least away of what the host's memory is used for: copies of the state, then loaders."""
    if evidence.recipe.checkpoint.memory != 0:
        return {"checkpoint.memory": 0}
    return {"data.workers": 1} if evidence.recipe.data.workers not in (0, 1) else {}
