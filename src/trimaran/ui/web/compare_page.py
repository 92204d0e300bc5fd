"""Runs beside each other: curves by step, by tokens, by time; results; what differs in recipe and plan."""

from fastapi import Request
from nicegui import run, ui

from trimaran.core import UserError
from trimaran.ui.language import Language, current_language, say, speaking
from trimaran.ui.report.markup import Html, tag
from trimaran.ui.report.run_comparison import AXES, MAX_RUNS, MIN_RUNS, compare_feeds, comparison_parts, refuse_count
from trimaran.ui.web.controls import Chips, text_field
from trimaran.ui.web.frame import Markup, WebState, draw_soon, empty_state, error_state, loading_state, page_frame
from trimaran.ui.web.run_page import RunFeeds

REFRESH_SECONDS, ENDED_SECONDS = 3.0, 15.0
NUM_LISTED = 40


class ComparedRuns:
    """What one page compares. `draw` reads files: call it in a thread."""

    def __init__(self, feeds: RunFeeds, slugs: list[str], language: Language) -> None:
        self._feeds, self._slugs, self._language = feeds, slugs, language
        self.axis, self.is_live = "step", True

    def draw(self) -> Html:
        refuse_count(len(self._slugs))
        feeds = [self._feeds.get(slug) for slug in self._slugs]
        facts = compare_feeds(feeds)
        self.is_live = any(feed.is_live for feed in feeds)
        with speaking(self._language):
            return Html("".join(comparison_parts(facts, axis=self.axis)))


def add_page(state: WebState) -> None:
    feeds = RunFeeds(state.runs)

    @ui.page("/compare")
    async def compare(request: Request) -> None:
        runs, first = (request.query_params.get(name, "") for name in ("runs", "with"))
        slugs = list(dict.fromkeys(each.strip() for each in runs.split(",") if each.strip()))
        with page_frame(say("Compare"), active="/compare"):
            Markup(tag("h1", None, say("Compare runs")))
            if slugs:
                await _show_comparison(ComparedRuns(feeds, slugs, current_language()))
            else:
                await _show_choice(state, [first] if first else [])


async def _show_comparison(compared: ComparedRuns) -> None:
    async def update() -> None:
        try:
            drawn = await run.io_bound(compared.draw)
        except UserError as error:
            content.show(error_state(error))
            timer.deactivate()
            return
        if drawn is not None:
            content.show(drawn)
        timer.interval = REFRESH_SECONDS if compared.is_live else ENDED_SECONDS

    async def choose(axis: str) -> None:
        compared.axis = axis
        chips.press(axis)
        await update()

    with ui.element("div").classes("chips"):
        chips = Chips({name: say(title) for name, title in AXES.items()}, choose, pressed=[compared.axis])
    content = Markup(loading_state(say("Reading the runs"))).classes("run-body")
    timer = ui.timer(REFRESH_SECONDS, update, immediate=False)
    await draw_soon(update)


async def _show_choice(state: WebState, chosen: list[str]) -> None:
    def toggle(slug: str) -> None:
        chosen.remove(slug) if slug in chosen else chosen.append(slug)
        shown[0].press(*chosen)
        link.show(_link(chosen))

    shown: list[Chips] = []

    async def refresh(search: str = "") -> None:
        found = await run.io_bound(state.runs.list, search=search, count=NUM_LISTED)
        if found is None:
            return
        rows.clear()
        with rows:
            if not found.runs:
                Markup(empty_state(say("No run matches."), "trimaran train"))
            shown[:] = [Chips({each.slug: each.slug for each in found.runs}, toggle, pressed=chosen)]

    Markup(tag("p", {"class": "quiet"}, say("Choose {least} to {most} runs.", least=MIN_RUNS, most=MAX_RUNS)))
    with ui.element("div").classes("bar-of-controls"):
        text_field(say("Search"), refresh, hint=say("part of a name"), is_search=True)
    rows = ui.element("div").classes("chips")
    link = Markup(_link(chosen))
    await refresh()


def _link(chosen: list[str]) -> Html:
    if not MIN_RUNS <= len(chosen) <= MAX_RUNS:
        return tag("p", {"class": "quiet"}, say("{count} chosen", count=len(chosen)))
    text = say("Compare {count} runs", count=len(chosen))
    return tag("p", None, tag("a", {"class": "button-link", "href": f"/compare?runs={','.join(chosen)}"}, text))
