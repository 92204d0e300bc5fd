"""One run, live: what it does, and tabs with the sections that the report shows, too."""

import asyncio
import shlex
from collections.abc import Callable
from typing import Any

from nicegui import run, ui
from nicegui.events import GenericEventArguments

from trimaran.app.recipe.options import path_argument, program_name
from trimaran.core import UserError
from trimaran.ui.report.markup import Html, tag
from trimaran.ui.report.run_feed import SLOW_PARTS, RunFeed
from trimaran.ui.report.words import say as said
from trimaran.ui.report.words import speaking
from trimaran.ui.web.controls import button, text_field
from trimaran.ui.web.frame import Markup, empty_state, error_state, loading_state, page_frame, show_error
from trimaran.ui.web.language import Language, current_language, say, say_in
from trimaran.ui.web.run_banner import run_header
from trimaran.ui.web.run_feeds import RunFeeds
from trimaran.ui.web.run_tabs import FIRST_TAB, TABS, TRAINING, tab_bar
from trimaran.ui.web.web_state import WebState

Tree = dict[str, Any]
LIVE_SECONDS, ENDED_SECONDS = 1.0, 5.0  # between two looks at the files
FIRST_DRAW_SECONDS = 0.4  # a page waits this long for its content before it is sent without
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
        with speaking(lambda text: say_in(self._language, text)):
            parts = [self._section(number, facts, feed) for number in range(len(tab.sections))]
            content = Html("".join(parts)) or self._empty(feed)
            return run_header(facts, is_short=self.tab != FIRST_TAB), tab_bar(self.slug, self.tab, facts), content

    def _section(self, number: int, facts: Tree, feed: RunFeed) -> Html:
        """Return a section; it is drawn again only if the facts that it shows have changed."""
        section = TABS[self.tab].sections[number]
        if not all(map(feed.is_read, section.parts)):
            return loading_state(said("Reading more of the run"))
        steps = self.steps if section is TRAINING else None
        versions = (feed.versions(section.parts), steps)
        key = f"{self.tab} {number}"
        if key not in self._drawn or self._drawn[key][0] != versions:
            shown = facts | feed.between(*steps) if steps else facts
            self._drawn[key] = versions, section.draw(shown)
        return self._drawn[key][1]

    def _empty(self, feed: RunFeed) -> Html:
        tab = TABS[self.tab]
        command = shlex.join([program_name(), tab.verb, path_argument(feed.run.path)])
        return empty_state(said(tab.empty), command)


def add_page(state: WebState) -> None:
    """Register the page of a run at `/runs/{slug}`."""
    feeds = RunFeeds(state.runs)

    @ui.page("/runs/{slug}")
    async def run_page(slug: str, tab: str = FIRST_TAB) -> None:
        try:
            state.runs.open(slug)
        except UserError as error:
            ui.context.client.status_code = 404
            with page_frame(slug[:60], active="/"):
                show_error(error)
            return
        view = RunView(feeds, slug, tab if tab in TABS else FIRST_TAB, current_language())
        with page_frame(slug, active="/"):
            await _show_run(view)


async def _show_run(view: RunView) -> None:
    drawing = asyncio.Lock()

    async def update() -> None:
        async with drawing:
            await _draw(view, header, bar, content)
            if view.is_partial:
                await _draw(view, header, bar, content)
        if view.feed is not None:
            timer.interval = LIVE_SECONDS if view.feed.is_live else ENDED_SECONDS
        controls.set_visibility(view.tab == "training")

    async def choose(event: GenericEventArguments) -> None:
        name = event.args.get("detail") if isinstance(event.args, dict) else None
        if name in TABS:
            view.tab = name
            await update()

    async def zoom(event: GenericEventArguments) -> None:
        detail = event.args.get("detail") if isinstance(event.args, dict) else None
        view.steps = _range(detail)
        await update()

    header = Markup(Html(tag("h1", None, view.slug) + loading_state(say("Reading the run"))))
    bar = Markup(_first_tabs(view)).on("tab", choose, ["detail"])
    controls = ui.element("div").classes("bar-of-controls zoom-controls")
    with controls:
        _zoom_controls(view, update)
    controls.set_visibility(view.tab == "training")
    content = Markup().classes("run-body").on("zoom", zoom, ["detail"])
    timer = ui.timer(LIVE_SECONDS, update, immediate=False)
    first = asyncio.ensure_future(update())
    await asyncio.wait({first}, timeout=FIRST_DRAW_SECONDS)


async def _draw(view: RunView, header: Markup, bar: Markup, content: Markup) -> None:
    try:
        drawn = await run.io_bound(view.draw)
    except UserError as error:
        header.show(error_state(error))
        return
    if drawn is not None:  # None: the server is about to end
        for element, markup in zip((header, bar, content), drawn, strict=True):
            element.show(markup)


def _first_tabs(view: RunView) -> Html:
    """Return the tabs before anything was read."""
    with speaking(say):
        return tab_bar(view.slug, view.tab, {})


def _zoom_controls(view: RunView, update: Callable[[], Any]) -> None:
    """Add what chooses a range of steps without a pointer."""
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

    text_field(say("From step"), lambda text: set_end("first", text), hint="1")
    text_field(say("To step"), lambda text: set_end("last", text), hint="1000")
    button(say("Last {count} steps", count=f"{LAST_STEPS:,}"), show_last)
    button(say("The whole run"), show_all)


def _range(detail: object) -> tuple[int, int] | None:
    """Return the steps that were chosen; None is the whole run."""
    if not isinstance(detail, dict):
        return None
    low, high = detail.get("low"), detail.get("high")
    if not isinstance(low, int | float) or not isinstance(high, int | float) or not 0 <= low < high < 2**53:
        return None
    return int(low), int(high)
