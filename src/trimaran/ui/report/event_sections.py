"""What happened to a run: incidents, decisions of the autopilot, checkpoints, and what the model generated."""

import time
from collections.abc import Sequence
from typing import Any

from trimaran.app.runs.summary import readable_sample
from trimaran.core import show_bytes, show_seconds
from trimaran.ui.report.markup import Content, Html, tag
from trimaran.ui.report.sections import MAX_TITLE
from trimaran.ui.report.tables import clock, command, message, note, section, table
from trimaran.ui.report.words import say

Tree = dict[str, Any]
MAX_ROWS = 40
OUTCOMES = {  # of a decision: its class in page.css and what it means
    "kept": ("good", "kept: steps became shorter"),
    "rolled-back": ("fair", "rolled back: steps did not become shorter"),
    "refused": ("bad", "refused: the run did not accept it"),
    "failed": ("bad", "failed: the change was undone"),
    "trying": ("fair", "on trial"),
    "advised": ("fair", "advised: not applied"),
    "undone": ("fair", "taken back by the user"),
}
STATUSES = {"complete": "good", "damaged": "bad", "refused": "bad"}


def incidents(facts: Tree) -> Html:
    """Return the newest incidents as cards: what happened, and the lines about it."""
    found = facts["incidents"]
    left = len(found) - MAX_ROWS
    more = say("{count} earlier incidents: trimaran incidents {run}", count=left, run=facts["run_dir"])
    return Html("".join([*([note(more)] if left > 0 else []), *map(_incident, found[-MAX_ROWS:])]))


def _incident(each: Tree) -> Html:
    first, _, rest = each["verdict"].partition("\n")
    identifier, _, text = first.partition("  ")
    title, _, detail = text.partition(": ")
    lines = "\n".join(line.removeprefix("  ") for line in rest.splitlines())
    action = tag("span", {"class": "severity warning"}, say(each["action"] or "open"))
    head = tag("h3", None, action, " ", tag("code", None, identifier), " ", title[:MAX_TITLE])
    return tag("article", {"class": "card warning"}, head, message(detail), tag("pre", None, lines) if lines else "")


def last_decision(facts: Tree) -> Html:
    """Return the autopilot's decisions as a section; nothing if it decided nothing."""
    if not facts["last_decision"]:
        return Html("")
    kept = sum(each["outcome"] == "kept" for each in facts["decisions"])
    text = say("{kept} of {count} decisions were kept. Decision {last}.", kept=kept, count=len(facts["decisions"]),
               last=facts["last_decision"])  # fmt: skip
    return section(say("Autopilot"), tag("p", None, text), decisions(facts))


def decisions(facts: Tree) -> Html:
    """Return the newest decisions as cards: before and after, expected and measured, and the command."""
    found = facts["decisions"]
    return Html("".join(_decision(each) for each in reversed(found[-MAX_ROWS:])))


def _decision(each: Tree) -> Html:
    kind, meaning = OUTCOMES.get(each["outcome"], ("fair", each["outcome"]))
    badge = tag("span", {"class": f"badge {kind}"}, say(meaning))
    where = say("decision {number}, after step {step}", number=each["id"], step=f"{each['step']:,}")
    changes: list[list[Content]] = [[name.removeprefix("plan."), str(each["undo"].get(name)), str(value)]
               for name, value in each["patch"].items() if each["undo"].get(name) != value]  # fmt: skip
    effect = _effect(each)
    parts = [tag("h3", None, where, " ", badge), message(each["reason"])]
    tables = [table([say("setting"), say("before"), say("after")], changes)] if changes else []
    tables += [table([say("step time"), say("expected"), say("measured")], effect)] if effect else []
    parts.append(tag("div", {"class": "side"}, *tables))
    if each["outcome"] in ("kept", "advised"):
        said = "This command takes it back:" if each["outcome"] == "kept" else "This command applies it:"
        parts += [tag("p", None, say(said)), command(each["command"])]
    return tag("article", {"class": f"card {'note' if kind == 'good' else 'warning'}"}, *parts)


def _effect(each: Tree) -> list[list[Content]]:
    """Return rows of the expected and the measured effect."""
    expected, measured, before = each["expected"], each["measured"] or {}, each["baseline"].get("step_seconds")
    rows: list[list[Content]] = []
    if before:
        rows.append([say("before"), show_seconds(before), show_seconds(before)])
    if "step_seconds" in expected or "step_seconds" in measured:
        rows.append([say("after"), _shown(expected.get("step_seconds")), _shown(measured.get("step_seconds"))])
    if "gain" in expected or "gain" in measured:
        rows.append([say("shorter by"), _share(expected.get("gain")), _share(measured.get("gain"))])
    if "uncertainty" in expected or "confidence" in measured:
        error = f"±{expected['uncertainty']:.0%}" if "uncertainty" in expected else "-"
        sure = say("{sure} sure", sure=f"{measured['confidence']:.1%}") if "confidence" in measured else "-"
        rows.append([say("certainty"), error, sure])
    return rows


def _shown(seconds: float | None) -> str:
    return "-" if seconds is None else show_seconds(seconds)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"


def checkpoints(facts: Tree) -> Html:
    """Return the ledger of checkpoints: complete, verified, tier, size, age."""
    stalls = {each["step"]: each["stall_seconds"] for each in facts["timeline"]["saved"]}
    rows = [_checkpoint(each, stalls.get(each["step"])) for each in reversed(facts["checkpoints"][-MAX_ROWS:])]
    if not rows:
        return Html("")
    columns = ["step", "state", "checked", "where", "size", "new on disk", "training waited", "age", "when"]
    left = len(facts["checkpoints"]) - len(rows)
    parts = [table([say(each) for each in columns], rows)]
    parts += [note(say("{count} older checkpoints are not shown.", count=left))] if left else []
    if drafts := facts["checkpoint_drafts"]:
        parts.append(note(say("{count} being written, or left by a run that died.", count=drafts)))
    verify = next((each["command"] for each in facts["commands"] if " verify " in each["command"]), "")
    parts += [note(say("To read every file and compare it with its checksum:")), command(verify)] if verify else []
    return Html("".join(parts))


def _checkpoint(each: Tree, stall: object) -> Sequence[Content]:
    state = say(each["status"]) + (f": {each['why']}" if each["why"] else "")
    checked = say("read back at a resume") if each["restored"] else say("length of every file")
    tiers = ", ".join(say(name) for name in each["tiers"])
    nodes = f" ({', '.join(each['on_nodes'])})" if each["on_nodes"] else ""
    return [f"{each['step']:,}", tag("span", {"class": STATUSES.get(each["status"], "fair")}, state),
            checked if each["status"] == "complete" else "-", tiers + nodes, show_bytes(each["bytes"]),
            show_bytes(each["written_bytes"]), show_seconds(stall) if isinstance(stall, int | float) else "-",
            show_seconds(max(0.0, time.time() - each["time"])) if each["time"] else "-",
            clock(each["time"]) if each["time"] else "-"]  # fmt: skip


def samples(facts: Tree) -> Html:
    """Return what the model generated: texts, and answers beside the expected ones; the newest first."""
    return Html("".join(_sample(each) for each in reversed(facts["samples"][-MAX_ROWS:]) if "text" in each))


def _sample(each: Tree) -> Html:
    title = say("after step {step}", step=f"{each['step']:,}")
    if "expected" in each:
        is_right = bool(each.get("right"))
        verdict = tag(
            "span", {"class": f"badge {'good' if is_right else 'bad'}"}, say("right" if is_right else "wrong")
        )
        rows = [(say("question"), str(each.get("prompt", ""))), (say("answer"), str(each["text"])),
                (say("expected"), str(each["expected"]))]  # fmt: skip
        return tag("article", {"class": "card note"}, tag("h3", None, title, " ", verdict), table(["", ""], rows))
    short = note(say("cut short: {why}", why=each["cut_short"])) if isinstance(each.get("cut_short"), str) else Html("")
    text = readable_sample(str(each["text"]))
    return tag("article", {"class": "card note"}, tag("h3", None, title), tag("pre", None, text), short)
