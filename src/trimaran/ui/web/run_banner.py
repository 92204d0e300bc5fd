"""The top of a run's page: its name, what it is doing now, and what to do next; designed for every status."""

import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from trimaran.app.runs.run_state import ACTIVE_STATUSES
from trimaran.core import show_seconds
from trimaran.ui.report.markup import Html, tag
from trimaran.ui.report.sections import GOOD, headline, tiles, unread
from trimaran.ui.report.tables import command
from trimaran.ui.report.words import say

Tree = dict[str, Any]
QUIET_SECONDS = 60.0  # without a step or a sample a live run is said to be quiet


def run_header(facts: Tree, *, is_short: bool = False) -> Html:
    """Return the name and the status of the run, what it does, and its main numbers unless it is to be short."""
    status = facts["status"]
    dot = tag("span", {"class": "live-dot", "title": say("live")}, "") if status in ACTIVE_STATUSES else Html("")
    badge = tag("span", {"class": f"badge {GOOD.get(status, 'fair')}"}, dot, say(status))
    folder = Path(facts["run_dir"]).name  # several runs may have the name of one recipe
    about = tag("p", {"class": "quiet about"}, f"{facts['name']} · {facts['model']} · {facts['plan_words']}")
    others = tag("a", {"class": "beside", "href": f"/compare?with={quote(folder)}"}, say("Compare with another run"))
    title = tag("h1", None, folder, " ", badge, others)
    return tag(
        "header", {"class": "run-head"}, title, about, *unread(facts), banner(facts), "" if is_short else tiles(facts)
    )


def banner(facts: Tree) -> Html:
    """Return what the run is doing, or how it ended and the command that goes on."""
    drawn = {"starting": _starting, "training": _training, "restarting": _restarting, "done": _done}
    return drawn.get(facts["status"], _ended)(facts)


def _starting(facts: Tree) -> Html:
    if not facts["timeline"]["attempts"] and not facts["machines_used"]:
        return _busy(say("Waiting: no rank has started yet."))
    return _busy(say("Starting: {activity}", activity=facts["activity"]))


def _training(facts: Tree) -> Html:
    left = facts["remaining_seconds"]
    done, total = facts["steps"], facts["total_steps"]
    text = say("Step {step} of {total}", step=f"{done:,}", total=f"{total:,}")
    text += say(", about {time} left", time=show_seconds(left)) if left else ""
    newest = max([each.get("time") or 0.0 for each in facts["machines"]] + [facts["timeline"]["end"] or 0.0])
    quiet = time.time() - newest
    said = say("Nothing was written for {time}.", time=show_seconds(quiet)) if quiet > QUIET_SECONDS else ""
    note = tag("p", {"class": "fair"}, said) if said else Html("")
    bar = tag("progress", {"value": done, "max": total, "aria-label": say("steps")}, "")
    return tag("div", {"class": "banner good-side"}, tag("p", {"class": "lead"}, text), bar, note)


def _restarting(facts: Tree) -> Html:
    last = facts["incidents"][-1]["what"] if facts["incidents"] else ""
    return _busy(say("Restarting after: {what}", what=last) if last else say("Restarting."))


def _done(facts: Tree) -> Html:
    return tag("div", {"class": "banner good-side"}, tag("p", {"class": "lead"}, headline(facts)), _next(facts))


def _ended(facts: Tree) -> Html:
    """Return the banner of a run that stopped, failed or vanished: why, and how to go on."""
    error = facts["error"] or {}
    reason = str(error.get("what") or error.get("message") or facts["why"] or "")
    where = say("rank {rank}", rank=error["rank"]) + ": " if "rank" in error else ""
    texts = {
        "stopped": say("Stopped after step {step}.", step=f"{facts['steps']:,}"),
        "failed": say("Failed after step {step}.", step=f"{facts['steps']:,}"),
        "vanished": say("Killed after step {step}: its processes are gone, and nothing says why.",
                        step=f"{facts['steps']:,}"),
    }  # fmt: skip
    kind = "fair-side" if facts["status"] == "stopped" else "bad-side"
    why = tag("p", {"class": "why"}, f"{where}{reason}") if reason and facts["status"] != "stopped" else Html("")
    lead = tag("p", {"class": "lead"}, texts.get(facts["status"], say(facts["status"])))
    return tag("div", {"class": f"banner {kind}"}, lead, why, _next(facts))


def _next(facts: Tree) -> Html:
    """Return the first command, which suits the status, with what it is for."""
    first = facts["commands"][0]
    purpose = say(first["purpose"])
    return tag("div", {"class": "next"}, tag("p", {"class": "quiet"}, f"{purpose[:1].upper()}{purpose[1:]}:"),
               command(first["command"]))  # fmt: skip


def _busy(text: str) -> Html:
    """Return the banner of a run that is about to do something."""
    spinner = tag("span", {"class": "spinner"}, "")
    return tag("div", {"class": "banner fair-side"}, tag("p", {"class": "lead busy"}, spinner, text))
