"""The first page: all runs, newest first, with their state."""

import time
from collections.abc import Mapping

from nicegui import run, ui

from trimaran.app import ACTIVE_STATUSES, Status
from trimaran.core import show_count
from trimaran.ui.language import Language, current_language, say, speaking
from trimaran.ui.report.markup import Html, tag
from trimaran.ui.web.controls import Chips, button, show_age, text_field
from trimaran.ui.web.frame import Markup, WebState, empty_state, page_frame
from trimaran.ui.web.runs_root import RunPage, RunsRoot

ROWS = 50
REFRESH_SECONDS = 2.0
RESPONSE_SECONDS = 30.0  # on a busy machine
FIRST_COMMAND = "trimaran train"
FILTERS: Mapping[str, tuple[Status, ...]] = {
    "All": (),
    "Active": ACTIVE_STATUSES,
    "Done": ("done",),
    "Stopped": ("stopped",),
    "Failed": ("failed", "vanished"),
}
# A shape for each state, so that it can be told without its colour: names of CSS classes and paths of 10 x 10.
SHAPES: Mapping[Status | None, tuple[str, str]] = {
    "starting": ("fair", "M5 0a5 5 0 1 0 0 10A5 5 0 0 0 5 0m0 2a3 3 0 1 1 0 6 3 3 0 0 1 0-6"),
    "training": ("good", "M1 0l8 5-8 5z"),
    "restarting": ("fair", "M5 0a5 5 0 1 0 0 10A5 5 0 0 0 5 0m0 2a3 3 0 1 1 0 6 3 3 0 0 1 0-6"),
    "done": ("good", "M1 5l1.500-1.500L4 5l4-4 1.500 1.500L4 8z"),
    "stopped": ("quiet", "M1 1h3v8H1zm5 0h3v8H6z"),
    "failed": (
        "bad",
        "M1 2.500L2.500 1 5 3.500 7.500 1 9 2.500 6.500 5 9 7.500 7.500 9 5 6.500 2.500 9 1 7.500 3.500 5z",
    ),
    "vanished": ("bad", "M4 0h2v6H4zm0 8h2v2H4z"),
    None: ("quiet", "M4 0h2v6H4zm0 8h2v2H4z"),
}
COLUMNS = ("run", "state", "model", "plan", "steps", "speed", "loss", "updated")


class RunList:
    """The list on one page: what the user searches for, and how much of it is shown."""

    def __init__(self, runs: RunsRoot, language: Language) -> None:
        self._runs, self._language = runs, language
        self.search, self.filter, self.count = "", "All", ROWS

    def read(self) -> tuple[RunPage, Html]:
        """Return the runs and their markup. It reads files, so it runs outside of the event loop."""
        found = self._runs.list(search=self.search, statuses=FILTERS[self.filter], count=self.count)
        with speaking(self._language):
            if found.runs:
                return found, runs_table(found, now=time.time())
            if self.search or self.filter != "All":
                return found, empty_state(say("No run matches."))
            return found, empty_state(say("There are no runs in {folder} yet.", folder=self._runs.path), FIRST_COMMAND)


def add_page(state: WebState) -> None:
    @ui.page("/", response_timeout=RESPONSE_SECONDS)
    async def home() -> None:
        shown = RunList(state.runs, current_language())
        with page_frame(say("Runs"), active="/"):
            Markup(tag("h1", None, say("Runs")))
            await _show_list(shown)


async def _show_list(shown: RunList) -> None:

    async def refresh() -> None:
        asked = shown.search, shown.filter, shown.count
        answer = await run.io_bound(shown.read)
        now = shown.search, shown.filter, shown.count
        if answer is None or asked != now:  # the server ends, or another answer is on its way
            return
        found, markup = answer
        table.show(markup)
        more.set_visibility(found.total > len(found.runs))
        text = say("{shown} of {total} runs", shown=len(found.runs), total=f"{found.total:,}")
        text += say(", among the newest 500") if found.is_cut else ""
        count.show(tag("span", None, text) if found.runs else Html(""))

    async def search(text: str) -> None:
        shown.search, shown.count = text, ROWS
        await refresh()

    async def choose(name: str) -> None:
        shown.filter, shown.count = name, ROWS
        chips.press(name)
        await refresh()

    async def show_more() -> None:
        shown.count += 4 * ROWS
        await refresh()

    with ui.element("div").classes("bar-of-controls"):
        text_field(say("Search"), search, hint=say("part of a name"), is_search=True)
        with ui.element("div").classes("chips"):
            chips = Chips({name: say(name) for name in FILTERS}, choose, pressed=[shown.filter])
    table = Markup().props("aria-live=off")
    with ui.element("div").classes("more-runs"):
        more = button(say("Show more"), show_more)
        count = Markup(tag="span").classes("quiet")
    await refresh()
    ui.timer(REFRESH_SECONDS, refresh)


def runs_table(found: RunPage, *, now: float) -> Html:
    head = tag("tr", None, *(tag("th", {"scope": "col"}, say(name)) for name in COLUMNS))
    rows = []
    for each in found.runs:
        kind, path = SHAPES[each.status]
        shape = tag("svg", {"viewBox": "0 0 10 10", "aria-hidden": "true"}, tag("path", {"d": path}, ""))
        text = f"{each.step:,} / {each.total_steps:,}"
        bar = tag("progress", {"value": each.step, "max": each.total_steps, "aria-label": say("steps")}, "")
        steps = tag("span", None, text, bar if each.status in ACTIVE_STATUSES else "")
        cells = [
            tag("a", {"href": f"/runs/{each.slug}"}, each.slug),
            tag("span", {"class": f"state {kind}"}, shape, say(each.status or "unreadable")),
            each.model,
            each.plan,
            steps if each.total_steps else "",
            f"{show_count(each.tokens_per_second)} {say(each.unit)}/s" if each.tokens_per_second else "",
            "" if each.loss is None else f"{each.loss:.4g}",
            show_age(now - each.changed),
        ]
        rows.append(tag("tr", None, *(tag("td", None, cell) for cell in cells)))
    table = tag("table", {"class": "runs"}, tag("thead", None, head), tag("tbody", None, *rows))
    return tag("div", {"class": "scroll"}, table)
