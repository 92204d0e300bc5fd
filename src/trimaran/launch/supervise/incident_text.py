"""An incident as a few lines of text: what happened, the ranks at fault, the evidence, the action and the cost."""

from collections.abc import Mapping, Sequence

from trimaran.core import Incident, show_seconds
from trimaran.launch.supervise.attribution import name_ranks

MAX_FACTS = 3
MAX_FILES = 2
MAX_SAMPLES = 8
ACTION_TEXTS = {
    "continued": "the run continued",
    "skipped": "the update was skipped, and the run continued",
    "rewound": "restored the last good state, and left these samples out",
    "quarantined": "left the sample out and restarted",
    "restarted": "restarted from the newest state",
    "replanned": "changed the plan and restarted",
    "resized": "restarted with another number of ranks",
    "saved": "saved a checkpoint",
    "waited": "waited",
    "stopped": "stopped the run",
    "finished": "the run is done: training was finished and saved before",
}


def incident_text(incident: Incident) -> str:
    """Return the lines about `incident`. The command line, the live view and the documentation show the same."""
    rows = [("ranks", [_ranks(incident)]), ("evidence", _evidence(incident)), ("action", [_action(incident)])]
    rows.append(("cost", [_cost(incident)]))
    lines = [headline(incident)]
    for name, texts in rows:
        shown = [text for text in texts if text]
        lines += [f"  {name + ':' if index == 0 else '':<10}{text}" for index, text in enumerate(shown)]
    return "\n".join(lines)


def headline(incident: Incident) -> str:
    """Return the first line: the incident's number, its cause, the step, and what happened."""
    when = f" after step {incident.step}" if incident.step else ""
    return f"{incident.id}  {incident.cause}{when}: {incident.what}"


def _ranks(incident: Incident) -> str:
    suspects, victims = incident.suspects, incident.victims
    at_fault = f"{name_ranks(suspects)} {_be(suspects)} at fault" if suspects else "no rank is at fault"
    return f"{at_fault}; {name_ranks(victims)} {_be(victims)} affected" if victims else at_fault


def _be(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _evidence(incident: Incident) -> list[str]:
    facts: Sequence[str] = incident.evidence.get("facts", ())
    files: Sequence[str] = incident.evidence.get("files", ())
    left = len(facts) - MAX_FACTS
    more = [f"and {left} more fact{'' if left == 1 else 's'}"] if left > 0 else []
    samples = incident.evidence.get("sample_ids", ())
    shown = f"samples {', '.join(map(str, samples[:MAX_SAMPLES]))}{' ...' if len(samples) > MAX_SAMPLES else ''}"
    # A name without a folder is in the incident's own folder.
    paths = [file if "/" in file else f"incidents/{incident.id}/{file}" for file in files[:MAX_FILES]]
    see = [f"see {', '.join(paths)}"] if paths else []
    return [*facts[:MAX_FACTS], *more, *([shown] if samples else []), *see]


def _action(incident: Incident) -> str:
    if incident.action is None:
        return "none yet"
    action, why = ACTION_TEXTS.get(incident.action, incident.action), incident.evidence.get("why")
    return f"{action}: {why}" if why and why not in action else action


def _steps(number: int) -> str:
    return f"{number} step{'' if number == 1 else 's'}"


def _bound(cost: Mapping[str, float]) -> str:
    """Return what the fault may cost at most, as the ranks stated it before; empty if they did not."""
    if "max_lost_steps" not in cost:
        return ""
    return f" (at most {round(cost['max_lost_steps'])}, about {show_seconds(cost.get('max_lost_seconds', 0.0))})"


def _cost(incident: Incident) -> str:
    cost = incident.cost
    parts = []
    if "seconds_to_detect" in cost:
        parts.append(f"detected in {cost['seconds_to_detect']:.1f} s")
    if "seconds_to_recover" in cost:
        parts.append(f"first new step after {cost['seconds_to_recover']:.1f} s")
    if "seconds_to_stop" in cost:
        parts.append(f"stopped in {cost['seconds_to_stop']:.1f} s")
    if "lost_steps" in cost:
        lost = round(cost["lost_steps"])
        parts.append(("no step lost" if lost == 0 else f"{_steps(lost)} repeated") + _bound(cost))
    if "slowdown" in cost:
        parts.append(f"each step takes {cost['slowdown']:.1f} times as long")
    return ", ".join(parts)
