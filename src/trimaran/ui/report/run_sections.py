"""The sections about a run, by name: the report shows them one below the other, the web page as tabs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trimaran.ui.report.event_sections import checkpoints, decisions, incidents, last_decision, samples
from trimaran.ui.report.layout_picture import rank_layout
from trimaran.ui.report.machine_section import machine_tables
from trimaran.ui.report.markup import Html, tag
from trimaran.ui.report.plot import stacked_bar
from trimaran.ui.report.plots import PHASE_KINDS, downsample_note, machine_plots, phases_plot, spread_plots, step_plots
from trimaran.ui.report.rank_matrix import rank_matrix
from trimaran.ui.report.sections import commands, comparison, findings, header, outliers, reproduction, weights
from trimaran.ui.report.tables import note, plots, section
from trimaran.ui.report.time_sections import ledger, timeline
from trimaran.ui.report.view_sections import views
from trimaran.ui.report.words import say

Tree = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection:
    """One section: the parts of the facts that it shows (see `run_feed`), and how it is drawn. It may be empty."""

    parts: tuple[str, ...]
    draw: Callable[[Tree], Html]


def _training(facts: Tree) -> Html:
    return section(say("Training"), note(downsample_note(facts)), plots(step_plots(facts)))


def _layout(facts: Tree) -> Html:
    return section(say("Parallel layout"), tag("p", None, facts["plan_words"]), rank_layout(facts))


def _phases(facts: Tree) -> Html:
    phases = {say(name): seconds for name, seconds in facts["phases"].items()}
    kinds = {say(name): kind for name, kind in PHASE_KINDS.items()}
    now = stacked_bar(phases, kinds) if phases else Html("")
    return section(say("Time of a step"), plots([phases_plot(facts)]), now)


def _ranks(facts: Tree) -> Html:
    matrix = rank_matrix(facts) if facts["ranks_now"] else Html("")
    return section(say("Ranks"), matrix, plots(spread_plots(facts)), outliers(facts))


def _machines(facts: Tree) -> Html:
    return section(say("Machines"), plots(machine_plots(facts)), machine_tables(facts))


SECTIONS: Mapping[str, RunSection] = {
    "header": RunSection(parts=("about", "state"), draw=header),
    "training": RunSection(parts=("about", "state", "curves"), draw=_training),
    "findings": RunSection(parts=("state", "findings"), draw=findings),
    "autopilot": RunSection(parts=("state",), draw=last_decision),
    "layout": RunSection(parts=("about", "state"), draw=_layout),
    "comparison": RunSection(
        parts=("state",), draw=lambda facts: section(say("Predicted and measured"), comparison(facts))
    ),
    "phases": RunSection(parts=("state", "phases"), draw=_phases),
    "ranks": RunSection(parts=("details", "ranks"), draw=_ranks),
    "weights": RunSection(parts=("state",), draw=lambda facts: section(say("Weights"), weights(facts))),
    "time": RunSection(parts=("state",), draw=lambda facts: section(say("Time of the run"), ledger(facts))),
    "timeline": RunSection(parts=("state",), draw=timeline),
    "incidents": RunSection(parts=("state",), draw=lambda facts: section(say("Incidents"), incidents(facts))),
    "checkpoints": RunSection(
        parts=("state", "checkpoints"), draw=lambda facts: section(say("Checkpoints"), checkpoints(facts))
    ),
    "machines": RunSection(parts=("state", "machines"), draw=_machines),
    "samples": RunSection(parts=("state",), draw=lambda facts: section(say("Samples"), samples(facts))),
    "views": RunSection(parts=("views",), draw=lambda facts: section(say("Views of the plan"), views(facts))),
    "commands": RunSection(parts=("state",), draw=lambda facts: section(say("Commands"), commands(facts))),
    "reproduction": RunSection(parts=("about", "state"), draw=reproduction),
    "decisions": RunSection(parts=("state",), draw=decisions),
}
REPORT = (
    "header", "training", "findings", "autopilot", "layout", "comparison", "views", "phases", "ranks", "weights",
    "time", "incidents", "checkpoints", "samples", "machines", "reproduction",
)  # fmt: skip
