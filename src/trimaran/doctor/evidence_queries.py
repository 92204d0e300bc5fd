"""What several rules ask of the evidence: incidents as they were told last, ranks by name, patches that parse."""

from collections.abc import Iterator, Sequence
from typing import Any

from trimaran.core import Recipe, UserError
from trimaran.doctor.evidence import Evidence, Line
from trimaran.doctor.predicted_gain import Patch, patched

OVER = ("stopped", None)  # what became of an incident that the run did not get over


def incidents_of(evidence: Evidence, *causes: str) -> list[Line]:
    """Return the incidents of these causes, each as it was filed last, in order."""
    latest = {each.get("id", index): each for index, each in enumerate(evidence.incidents)}
    return [each for each in latest.values() if each.get("cause") in causes]


def is_over(incident: Line) -> bool:
    """Whether the run has ended, or stands still, because of it."""
    return incident.get("action") in OVER


def severity_of(incidents: Sequence[Line]) -> Any:
    return "fault" if is_over(incidents[-1]) else "warning"


def rank_names(ranks: Sequence[int]) -> str:
    """Return `rank 3`, `ranks 1 and 2`, `ranks 0, 1 and 2`; empty where there is none."""
    if len(ranks) < 2:
        return "".join(f"rank {each}" for each in ranks)
    if len(ranks) > 6:
        return f"ranks {', '.join(map(str, ranks[:5]))} and {len(ranks) - 5} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def times(count: int, what: str) -> str:
    """Return `1 step`, `3 steps`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def facts_of(incident: Line) -> list[str]:
    return [str(each) for each in (incident.get("evidence") or {}).get("facts", ())]


def sound(recipe: Recipe, patch: Patch) -> Patch:
    """Return the patch, or nothing where the recipe would not take it."""
    try:
        patched(recipe, patch)
    except UserError:
        return {}
    return patch


def gpus_of(evidence: Evidence) -> Iterator[tuple[str, list[Line]]]:
    """Yield each GPU by name, with what the samples say of it, oldest first."""
    found: dict[str, list[Line]] = {}
    for sample in evidence.samples:
        for gpu in sample.get("gpus") or ():
            name = f"GPU {gpu.get('index')} of {_machine(sample)}"
            found.setdefault(name, []).append(gpu)
    yield from found.items()


def smi_name(gpu: Line) -> str:
    """Return what `nvidia-smi -i` calls a GPU: ranks may number them in another order."""
    return str(gpu.get("uuid") or gpu.get("index"))


def nodes_of(evidence: Evidence) -> Iterator[tuple[str, list[Line]]]:
    """Yield each machine by name, with its samples, oldest first."""
    found: dict[str, list[Line]] = {}
    for sample in evidence.samples:
        found.setdefault(_machine(sample), []).append(sample)
    yield from found.items()


def _machine(sample: Line) -> str:
    return str(sample.get("host") or f"node {sample.get('node')}")
