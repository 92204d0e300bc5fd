"""The tabs of a run's page: which sections each shows, and what is said if there is nothing to show."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimaran.ui.report.markup import Html, tag
from trimaran.ui.report.plots import downsample_note, step_plots
from trimaran.ui.report.rank_matrix import TROUBLE
from trimaran.ui.report.run_sections import SECTIONS, RunSection
from trimaran.ui.report.tables import note, plots, section
from trimaran.ui.report.words import say

Tree = dict[str, Any]
OVERVIEW_PLOTS = ("loss", "speed", "time")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTab:
    """A tab: its name, its sections, and the text and the command if they are all empty."""

    title: str
    sections: Sequence[RunSection]
    empty: str
    verb: str = "watch"

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the facts that its sections need."""
        return tuple(dict.fromkeys(part for each in self.sections for part in each.parts))


def _overview(facts: Tree) -> Html:
    drawn = step_plots(facts, names=OVERVIEW_PLOTS) if facts["steps"] else []
    return section(say("Course"), note(downsample_note(facts)), plots(drawn))


def zoomed_training(facts: Tree) -> Html:
    """Return the plots over the steps, which can be zoomed."""
    drawn = plots(step_plots(facts, may_zoom=True)) if facts["steps"] else Html("")
    return section(say("Training"), note(downsample_note(facts)), drawn)


TRAINING = RunSection(parts=("about", "state", "curves"), draw=zoomed_training)
TABS: Mapping[str, RunTab] = {
    "overview": RunTab(
        title="Overview",
        sections=(SECTIONS["findings"], RunSection(parts=("about", "state", "curves"), draw=_overview)),
        empty="No step has finished yet.",
    ),
    "training": RunTab(title="Training", sections=(TRAINING, SECTIONS["weights"]), empty="No step has finished yet."),
    "ranks": RunTab(title="Ranks", sections=(SECTIONS["ranks"],), empty="No rank has started yet."),
    "time": RunTab(title="Time", sections=(SECTIONS["time"], SECTIONS["phases"]), empty="No rank has started yet."),
    "incidents": RunTab(
        title="Incidents",
        sections=(SECTIONS["incidents"],),
        empty="No incidents so far: nothing crashed, hung or ran out of memory.",
        verb="incidents",
    ),
    "checkpoints": RunTab(
        title="Checkpoints",
        sections=(SECTIONS["checkpoints"],),
        empty="No checkpoint is complete yet.",
        verb="checkpoints",
    ),
    "autopilot": RunTab(
        title="Autopilot",
        sections=(SECTIONS["autopilot"],),
        empty="The autopilot has decided nothing in this run.",
        verb="decisions",
    ),
    "plan": RunTab(
        title="Plan",
        sections=(SECTIONS["comparison"], SECTIONS["layout"], SECTIONS["views"]),
        empty="This run has no plan yet.",
    ),
    "machines": RunTab(
        title="Machines", sections=(SECTIONS["machines"],), empty="No machine was sampled yet.", verb="watch"
    ),
    "samples": RunTab(
        title="Samples",
        sections=(SECTIONS["samples"],),
        empty="The model has generated no sample yet: a run does so at its end (train.sample.tokens).",
        verb="generate",
    ),
    "commands": RunTab(
        title="Commands",
        sections=(SECTIONS["commands"], SECTIONS["reproduction"]),
        empty="There are no commands.",
    ),
}
FIRST_TAB = "overview"


def tab_bar(slug: str, active: str, facts: Tree) -> Html:
    """Return the links to all tabs, with how much there is to see in some."""
    links = [
        tag("a", {"href": f"/runs/{slug}?tab={name}", "data-tab": name, "role": "tab",
                  "aria-selected": str(name == active).lower()}, say(tab.title), _count(name, facts))
        for name, tab in TABS.items()
    ]  # fmt: skip
    return tag("div", {"class": "run-tabs", "role": "tablist", "aria-label": say("Sections of the run")}, *links)


def _count(name: str, facts: Tree) -> Html:
    """Return a number beside the name of a tab: what happened, or what is wrong."""
    counts = {
        "incidents": len(facts.get("incidents", ())),
        "autopilot": len(facts.get("decisions", ())),
        "checkpoints": len(facts.get("checkpoints", ())),
        "samples": len(facts.get("samples", ())),
        "ranks": sum(each in TROUBLE for each in (facts.get("ranks_now") or {}).get("state", ())),
        "overview": sum(each["severity"] != "note" for each in facts.get("findings", ())),
    }
    kind = "count bad" if name in ("incidents", "ranks", "overview") else "count"
    return tag("span", {"class": kind}, f"{counts[name]:,}") if counts.get(name) else Html("")
