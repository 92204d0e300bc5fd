"""An incident in a few lines that anybody can read: what happened, who, the evidence, what was done, what it cost."""

from collections.abc import Sequence

from trimaran.core import Incident
from trimaran.launch.attribution import name_ranks

NUM_FACTS = 3
NUM_FILES = 2
DONE = {
    "continued": "the run went on",
    "skipped": "the update was not applied, and the run went on",
    "rewound": "went back to the last good state, without these samples",
    "quarantined": "left the sample out and started again",
    "restarted": "started again from the newest state",
    "replanned": "changed the plan and started again",
    "resized": "started again with another number of ranks",
    "saved": "saved a checkpoint",
    "waited": "waited",
    "stopped": "stopped the run",
}


def incident_text(incident: Incident) -> str:
    """Return the lines about `incident`, the same for the command line, the live view and the documentation."""
    rows = [("who", [_who(incident)]), ("evidence", _evidence(incident)), ("done", [_done(incident)])]
    rows.append(("cost", [_cost(incident)]))
    lines = [headline(incident)]
    for name, texts in rows:
        shown = [text for text in texts if text]
        lines += [f"  {name + ':' if index == 0 else '':<10}{text}" for index, text in enumerate(shown)]
    return "\n".join(lines)


def headline(incident: Incident) -> str:
    """Return the first line of the incident_text: which incident, what kind, when, and what happened."""
    when = f" after step {incident.step}" if incident.step else ""
    return f"{incident.id}  {incident.cause}{when}: {incident.what}"


def _who(incident: Incident) -> str:
    did = f"{name_ranks(incident.suspects)} did it" if incident.suspects else ""
    suffered = f"{name_ranks(incident.victims)} only suffered from it" if incident.victims else ""
    if not did:
        return "no rank is to blame" + (f"; {suffered}" if suffered else "")
    return "; ".join(filter(None, [did, suffered]))


def _evidence(incident: Incident) -> list[str]:
    facts: Sequence[str] = incident.evidence.get("facts", ())
    files: Sequence[str] = incident.evidence.get("files", ())
    left = len(facts) - NUM_FACTS
    more = [f"and {left} fact{'' if left == 1 else 's'} more"] if left > 0 else []
    samples = incident.evidence.get("sample_ids", ())
    found = [f"samples {', '.join(map(str, samples[:8]))}{' ...' if len(samples) > 8 else ''}"] if samples else []
    # A bare name lies in the incident's own folder.
    paths = [file if "/" in file else f"incidents/{incident.id}/{file}" for file in files[:NUM_FILES]]
    return [*facts[:NUM_FACTS], *more, *found, *([f"see {', '.join(paths)}"] if paths else [])]


def _done(incident: Incident) -> str:
    if incident.action is None:
        return "nothing yet"
    done, why = DONE[incident.action], incident.evidence.get("why")
    return f"{done}: {why}" if why and why not in done else done


def _cost(incident: Incident) -> str:
    cost = incident.cost
    parts = []
    if "seconds_to_detect" in cost:
        parts.append(f"noticed in {cost['seconds_to_detect']:.1f} s")
    if "seconds_to_recover" in cost:
        parts.append(f"the next new step after {cost['seconds_to_recover']:.1f} s")
    if "seconds_to_stop" in cost:
        parts.append(f"{cost['seconds_to_stop']:.1f} s to the end")
    if "lost_steps" in cost:
        lost = round(cost["lost_steps"])
        parts.append("no step lost" if lost == 0 else f"{lost} step{'' if lost == 1 else 's'} done again")
    if "slowdown" in cost:
        parts.append(f"every step takes {cost['slowdown']:.1f} times as long")
    return ", ".join(parts)
