"""One run, live: what it does, and tabs with the sections that the report shows, too."""

import asyncio
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from nicegui import run, ui
from nicegui.events import GenericEventArguments

from trimaran.app import ACTIVE_STATUSES, path_argument, program_name
from trimaran.core import UserError, show_seconds
from trimaran.runs import MARKER
from trimaran.ui.language import Language, current_language, say, speaking
from trimaran.ui.report.markup import Html, note, plots, section, tag
from trimaran.ui.report.plots import downsample_note, step_plots
from trimaran.ui.report.rank_pictures import TROUBLE
from trimaran.ui.report.run_feed import SLOW_PARTS, RunFeed
from trimaran.ui.report.run_sections import SECTIONS, RunSection, training
from trimaran.ui.report.sections import GOOD, headline, purposed, tiles, unread
from trimaran.ui.web.controls import button, text_field
from trimaran.ui.web.frame import (
    Markup,
    WebState,
    draw_soon,
    empty_state,
    error_state,
    loading_state,
    page_frame,
)
from trimaran.ui.web.runs_root import RecentValues, RunsRoot

MAX_FEEDS = 8  # a run of a million steps takes tens of megabytes


class RunFeeds:
    """Keeps the feeds that were used last."""

    def __init__(self, runs: RunsRoot) -> None:
        self._runs, self._feeds = runs, RecentValues[str, RunFeed](MAX_FEEDS)

    def get(self, slug: str) -> RunFeed:
        """Return the feed of a run; raise UserError if there is no such run, or if its files are damaged."""
        run = self._runs.open(slug)
        status = (run.path / MARKER).lstat()
        version = (status.st_ino, status.st_mtime_ns)  # another run may have taken the name
        kept = self._feeds.get(slug)
        if kept is not None and kept[0] == version:
            return kept[1]
        feed = RunFeed(run)
        self._feeds.add(slug, version, feed)
        return feed


Tree = dict[str, Any]
QUIET_SECONDS = 60.0  # without a step or a sample a live run is said to be quiet


def run_header(facts: Tree, *, is_short: bool = False) -> Html:
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
    match facts["status"]:
        case "starting" if not facts["timeline"]["attempts"] and not facts["machines_used"]:
            return _busy(say("Waiting: no rank has started yet."))
        case "starting":
            return _busy(say("Starting: {activity}", activity=facts["activity"]))
        case "training":
            left = facts["remaining_seconds"]
            done, total = facts["steps"], facts["total_steps"]
            text = say("Step {step} of {total}", step=f"{done:,}", total=f"{total:,}")
            text += say(", about {time} left", time=show_seconds(left)) if left else ""
            newest = max([each.get("time") or 0.0 for each in facts["machines"]] + [facts["timeline"]["end"] or 0.0])
            quiet = time.time() - newest
            said = say("Nothing was written for {time}.", time=show_seconds(quiet)) if quiet > QUIET_SECONDS else ""
            note = tag("p", {"class": "fair"}, said) if said else ""
            bar = tag("progress", {"value": done, "max": total, "aria-label": say("steps")}, "")
            return tag("div", {"class": "banner good-side"}, tag("p", {"class": "lead"}, text), bar, note)
        case "restarting" if facts["incidents"] and (last := facts["incidents"][-1]["what"]):
            return _busy(say("Restarting after: {what}", what=last))
        case "restarting":
            return _busy(say("Restarting."))
        case "done":
            lead = tag("p", {"class": "lead"}, headline(facts))
            return tag("div", {"class": "banner good-side"}, lead, _next(facts))
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
    return tag("div", {"class": "next"}, purposed(facts["commands"][0], kind="quiet"))


def _busy(text: str) -> Html:
    spinner = tag("span", {"class": "spinner"}, "")
    return tag("div", {"class": "banner fair-side"}, tag("p", {"class": "lead busy"}, spinner, text))


OVERVIEW_PLOTS = ("loss", "speed", "time")


@dataclass(frozen=True, slots=True)
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


CURVE_PARTS = ("about", "state", "curves")
TRAINING = RunSection(CURVE_PARTS, lambda facts: training(facts, may_zoom=True) if facts["steps"] else Html(""))
NO_STEP, NO_RANK = "No step has finished yet.", "No rank has started yet."
NO_SAMPLE = "The model has generated no sample yet: a run does so at its end (train.sample.tokens)."
TABS: Mapping[str, RunTab] = {
    "overview": RunTab("Overview", (SECTIONS["findings"], RunSection(CURVE_PARTS, _overview)), NO_STEP),
    "training": RunTab("Training", (TRAINING, SECTIONS["weights"]), NO_STEP),
    "ranks": RunTab("Ranks", (SECTIONS["ranks"],), NO_RANK),
    "time": RunTab("Time", (SECTIONS["time"], SECTIONS["phases"]), NO_RANK),
    "incidents": RunTab("Incidents", (SECTIONS["incidents"],),
                        "No incidents so far: nothing crashed, hung or ran out of memory.", "incidents"),
    "checkpoints": RunTab("Checkpoints", (SECTIONS["checkpoints"],), "No checkpoint is complete yet.", "checkpoints"),
    "autopilot": RunTab("Autopilot", (SECTIONS["autopilot"],), "The autopilot has decided nothing in this run.",
                        "decisions"),
    "plan": RunTab("Plan", (SECTIONS["comparison"], SECTIONS["layout"], SECTIONS["views"]),
                   "This run has no plan yet."),
    "machines": RunTab("Machines", (SECTIONS["machines"],), "No machine was sampled yet."),
    "samples": RunTab("Samples", (SECTIONS["samples"],), NO_SAMPLE, "generate"),
    "commands": RunTab("Commands", (SECTIONS["commands"], SECTIONS["reproduction"]), "There are no commands."),
}  # fmt: skip
FIRST_TAB = "overview"


def tab_bar(slug: str, active: str, facts: Tree) -> Html:
    """Return the links to the tabs; some have a number, of what happened or of what is wrong."""
    counts = {
        "incidents": len(facts.get("incidents", ())),
        "autopilot": len(facts.get("decisions", ())),
        "checkpoints": len(facts.get("checkpoints", ())),
        "samples": len(facts.get("samples", ())),
        "ranks": sum(each in TROUBLE for each in (facts.get("ranks_now") or {}).get("state", ())),
        "overview": sum(each["severity"] != "note" for each in facts.get("findings", ())),
    }
    links = []
    for name, tab in TABS.items():
        kind = "count bad" if name in ("incidents", "ranks", "overview") else "count"
        count = tag("span", {"class": kind}, f"{counts[name]:,}") if counts.get(name) else ""
        about = {"href": f"/runs/{slug}?tab={name}", "data-tab": name, "role": "tab"}
        links.append(tag("a", about | {"aria-selected": str(name == active).lower()}, say(tab.title), count))
    return tag("div", {"class": "run-tabs", "role": "tablist", "aria-label": say("Sections of the run")}, *links)


LIVE_SECONDS, ENDED_SECONDS = 1.0, 5.0  # between two looks at the files
LAST_STEPS = 1000  # that a button shows


class RunView:
    """What one page shows of a run: a tab, and a range of steps. `draw` reads files: call it in a thread."""

    def __init__(self, feeds: RunFeeds, slug: str, tab: str, language: Language) -> None:
        self._feeds, self.slug, self.tab, self._language = feeds, slug, tab, language
        self.steps: tuple[int, int] | None = None
        self.is_partial = False  # whether slow parts were left out, which the next `draw` reads
        self.feed: RunFeed | None = None
        self._drawn: dict[str, tuple[object, Html]] = {}

    def draw(self) -> tuple[Html, Html, Html]:
        """Return the header, the tabs and the content of the tab, with what is new in the run's files."""
        self.feed = feed = self._feeds.get(self.slug)
        tab = TABS[self.tab]
        wanted = dict.fromkeys(("about", "state", *tab.parts))
        slow = [part for part in wanted if part in SLOW_PARTS and not feed.is_read(part)]
        self.is_partial = bool(slow) and not self.is_partial
        facts = feed.refresh([part for part in wanted if part not in slow] if self.is_partial else wanted)
        with speaking(self._language):
            parts = [self._section(number, facts, feed) for number in range(len(tab.sections))]
            command = shlex.join([program_name(), tab.verb, path_argument(feed.run.path)])
            content = Html("".join(parts)) or empty_state(say(tab.empty), command)
            return run_header(facts, is_short=self.tab != FIRST_TAB), tab_bar(self.slug, self.tab, facts), content

    def _section(self, number: int, facts: Tree, feed: RunFeed) -> Html:
        """Return a section; it is drawn again only if the facts that it shows have changed."""
        section = TABS[self.tab].sections[number]
        if not all(map(feed.is_read, section.parts)):
            return loading_state(say("Reading more of the run"))
        steps = self.steps if section is TRAINING else None
        versions = (feed.versions(section.parts), steps)
        key = f"{self.tab} {number}"
        if key not in self._drawn or self._drawn[key][0] != versions:
            shown = facts | feed.between(*steps) if steps else facts
            self._drawn[key] = versions, section.draw(shown)
        return self._drawn[key][1]


def add_page(state: WebState) -> None:
    feeds = RunFeeds(state.runs)

    @ui.page("/runs/{slug}")
    async def run_page(slug: str, tab: str = FIRST_TAB) -> None:
        try:
            state.runs.open(slug)
        except UserError as error:
            ui.context.client.status_code = 404
            with page_frame(slug[:60], active="/"):
                Markup(error_state(error))
            return
        view = RunView(feeds, slug, tab if tab in TABS else FIRST_TAB, current_language())
        with page_frame(slug, active="/"):
            await _show_run(view)


async def _show_run(view: RunView) -> None:
    drawing = asyncio.Lock()

    async def update() -> None:
        async with drawing:
            try:
                show(await run.io_bound(view.draw))
                if view.is_partial:
                    show(await run.io_bound(view.draw))
            except UserError as error:
                header.show(error_state(error))
        if view.feed is not None:
            timer.interval = LIVE_SECONDS if view.feed.is_live else ENDED_SECONDS
        controls.set_visibility(view.tab == "training")

    def show(drawn: tuple[Html, Html, Html] | None) -> None:
        for element, markup in zip((header, bar, content), drawn or (), strict=False):  # None: the server ends
            element.show(markup)

    async def choose(event: GenericEventArguments) -> None:
        name = event.args.get("detail") if isinstance(event.args, dict) else None
        if name in TABS:
            view.tab = name
            await update()

    async def zoom(event: GenericEventArguments) -> None:
        view.steps = _range(event.args.get("detail") if isinstance(event.args, dict) else None)
        await update()

    header = Markup(Html(tag("h1", None, view.slug) + loading_state(say("Reading the run"))))
    bar = Markup(tab_bar(view.slug, view.tab, {})).on("tab", choose, ["detail"])
    ends = {"first": "", "last": ""}

    async def set_end(name: str, text: str) -> None:
        ends[name] = text.strip().replace(",", "")
        if all(each.isdecimal() for each in ends.values()):
            view.steps = _range({"low": int(ends["first"]), "high": int(ends["last"])})
            await update()

    async def show_all() -> None:
        view.steps = None
        await update()

    async def show_last() -> None:
        step = view.feed.state.step if view.feed else 0
        view.steps = (max(1, step - LAST_STEPS + 1), step) if step else None
        await update()

    controls = ui.element("div").classes("bar-of-controls zoom-controls")
    with controls:
        text_field(say("From step"), lambda text: set_end("first", text), hint="1")
        text_field(say("To step"), lambda text: set_end("last", text), hint="1000")
        button(say("Last {count} steps", count=f"{LAST_STEPS:,}"), show_last)
        button(say("The whole run"), show_all)
    controls.set_visibility(view.tab == "training")
    content = Markup().classes("run-body").on("zoom", zoom, ["detail"])
    timer = ui.timer(LIVE_SECONDS, update, immediate=False)
    await draw_soon(update)


def _range(detail: object) -> tuple[int, int] | None:
    """Return the steps that were chosen; None is the whole run."""
    if not isinstance(detail, dict):
        return None
    low, high = detail.get("low"), detail.get("high")
    if not isinstance(low, int | float) or not isinstance(high, int | float) or not 0 <= low < high < 2**53:
        return None
    return int(low), int(high)
