"""F071: a node swaps memory to disk."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from trimaran.core import Finding, show_bytes
from trimaran.doctor.evidence import Evidence, Line
from trimaran.doctor.evidence_queries import samples_by_node, valid_patch
from trimaran.doctor.predicted_gain import Patch
from trimaran.doctor.step_breakdown import get_number

MIN_SWAPPED_BYTES = 256 << 20
MIN_SWAPPED_FRACTION = 0.02  # of the node's memory
MIN_USED_FRACTION = 0.85  # of the node's memory: below that, swapped pages are old and unused


def swap(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding for each node that swaps while its memory is full."""
    for name, samples in samples_by_node(evidence):
        rams, useds = _numbers(samples, "ram"), _numbers(samples, "ram_used")
        if not rams or not useds or max(useds) < MIN_USED_FRACTION * rams[-1]:
            continue
        ram, used, swapped = rams[-1], max(useds), _swapped(samples)
        if swapped < max(MIN_SWAPPED_BYTES, MIN_SWAPPED_FRACTION * ram):
            continue
        patch = valid_patch(evidence.recipe, _patch(evidence))
        yield Finding(
            code="F071",
            severity="warning",
            verdict=f"{name} uses {show_bytes(used)} of {show_bytes(ram)} memory and swaps to disk: "
            f"{show_bytes(swapped)} since the run began",
            culprit=name,
            evidence={"moved": swapped, "swap_used": (_numbers(samples, "swap_used") or [0])[-1], "ram_used": used,
                      "ram": ram},
            patch=patch,
            fix="" if patch else "use a node with more memory, or fewer ranks on this one",
            expected_effect="less host memory is used, and no process waits for swapping" if patch else "",
            confidence=0.85,
        )  # fmt: skip


def _swapped(samples: Sequence[Line]) -> float:
    """Return the bytes swapped out and in; without these counters, the growth of the swap space in use.

    Pages that were swapped out before the first sample and stay there cost nothing.
    """
    held = _numbers(samples, "swap_used")
    grown = held[-1] - min(held) if held else 0.0
    pairs = [
        (
            get_number(after, "time"),
            get_number(before, "time"),
            get_number(after, "swap_read"),
            get_number(after, "swap_written"),
        )
        for before, after in pairwise(samples)
    ]
    counted = sum((now - then) * (came + went) for now, then, came, went in pairs
                  if now is not None and then is not None and came is not None and went is not None)  # fmt: skip
    return max(grown, counted)


def _numbers(samples: Sequence[Line], name: str) -> list[float]:
    return [value for each in samples if (value := get_number(each, name)) is not None]


def _patch(evidence: Evidence) -> Patch:
    """Return the patch that frees host memory at the least cost: no in-memory checkpoints, then fewer loaders."""
    if evidence.recipe.checkpoint.memory != 0:
        return {"checkpoint.memory": 0}
    return {"data.workers": 1} if evidence.recipe.data.workers not in (0, 1) else {}
