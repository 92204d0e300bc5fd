"""Queries that several rules share: incidents by cause, samples by GPU or node, rank names, valid patches."""

from collections.abc import Iterator, Sequence
from typing import Any

from trimaran.core import Recipe, UserError
from trimaran.doctor.evidence import Evidence, Line
from trimaran.doctor.predicted_gain import Patch, apply_patch

RUN_ENDING_ACTIONS = ("stopped", None)  # of an incident that ended the run


def incidents_of(evidence: Evidence, *causes: str) -> list[Line]:
    """Return the incidents with these causes, each in its latest version, in order."""
    latest = {each.get("id", index): each for index, each in enumerate(evidence.incidents)}
    return [each for each in latest.values() if each.get("cause") in causes]


def ended_run(incident: Line) -> bool:
    """Whether the run ended, or still hangs, because of the incident."""
    return incident.get("action") in RUN_ENDING_ACTIONS


def was_passed(evidence: Evidence, incident: Line) -> bool:
    """Whether the run later got past what it was doing at the incident: a new step, or its end with exit code 0."""
    over = [each["over"] for each in evidence.attempts if "over" in each]
    later = [each for each in evidence.events_of_kind("done") if each.get("attempt", 0) > incident.get("attempt", 0)]
    return evidence.last_step > int(incident.get("step") or 0) or bool(later) or over[-1:] == [0]


def incident_severity(incidents: Sequence[Line]) -> Any:
    return "fault" if ended_run(incidents[-1]) else "warning"


def rank_names(ranks: Sequence[int]) -> str:
    """Return `rank 3`, `ranks 1 and 2`, `ranks 0, 1 and 2`; '' without ranks."""
    if len(ranks) < 2:
        return "".join(f"rank {each}" for each in ranks)
    if len(ranks) > 6:
        return f"ranks {', '.join(map(str, ranks[:5]))} and {len(ranks) - 5} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def plural(count: int, what: str) -> str:
    """Return `1 step`, `3 steps`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def incident_facts(incident: Line) -> list[str]:
    return [str(each) for each in (incident.get("evidence") or {}).get("facts", ())]


def valid_patch(recipe: Recipe, patch: Patch) -> Patch:
    """Return the patch, or an empty one if the recipe does not accept it."""
    try:
        apply_patch(recipe, patch)
    except UserError:
        return {}
    return patch


def samples_by_gpu(evidence: Evidence) -> Iterator[tuple[str, list[Line]]]:
    """Yield (name, samples) of each GPU, oldest sample first."""
    samples: dict[str, list[Line]] = {}
    for sample in evidence.samples:
        for gpu in sample.get("gpus") or ():
            name = f"GPU {gpu.get('index')} of {_node_name(sample)}"
            samples.setdefault(name, []).append(gpu)
    yield from samples.items()


def nvidia_smi_id(gpu: Line) -> str:
    """Return the UUID for `nvidia-smi -i`, because CUDA may number GPUs in another order; else the index."""
    return str(gpu.get("uuid") or gpu.get("index"))


def samples_by_node(evidence: Evidence) -> Iterator[tuple[str, list[Line]]]:
    """Yield (name, samples) of each node, oldest sample first."""
    samples: dict[str, list[Line]] = {}
    for sample in evidence.samples:
        samples.setdefault(_node_name(sample), []).append(sample)
    yield from samples.items()


def _node_name(sample: Line) -> str:
    return str(sample.get("host") or f"node {sample.get('node')}")
