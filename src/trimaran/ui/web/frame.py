"""What all pages have: the header with the navigation, the themes, the languages, and empty and error states.

Markup is shown with `Markup`, not with `ui.html`: that component, like `ui.select`, `ui.input`, `ui.link` and others
with a Vue template, would need `eval`, which the content policy refuses (see `security.py`). Quasar's own components
(`ui.button`, `ui.slider`) and `ui.element` do not; `controls.py` has what a page needs to ask for.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from nicegui import Client, ui

from trimaran.app import Language, shown_errors
from trimaran.core import UserError
from trimaran.ui.language import LANGUAGES, current_language, say
from trimaran.ui.report.markup import Html, tag
from trimaran.ui.web.runs_root import RunsRoot

ASSETS: Mapping[str, str] = {  # names of files, and the packages that have them
    "page.css": "trimaran.ui.report",
    "page.js": "trimaran.ui.report",
    "web.css": "trimaran.ui.web",
    "web.js": "trimaran.ui.web",
}
FIRST_DRAW_SECONDS = 0.4
ASSET_PATH = "/_trimaran/"
# Addresses of the pages, their names and the key that opens each.
PAGES = (("/", "Runs", "r"), ("/workshop", "Workshop", "w"), ("/views", "Views", "v"), ("/compare", "Compare", "c"))
# Three hulls, seen from above.
LOGO = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32" width="24" height="24" aria-hidden="true">'
    '<path d="M16 2c3 5 4 11 4 17s-1 8-4 11c-3-3-4-5-4-11s1-12 4-17z" fill="#0072b2"/>'
    '<path d="M5 9c2 3 2.500 7 2.500 10S7 24 5 26c-2-2-2.500-4-2.500-7S3 12 5 9zm22 0c2 3 2.500 7 2.500 10S29 24 27 26'
    'c-2-2-2.500-4-2.500-7S25 12 27 9z" fill="#e69f00"/>'
    '<path d="M5 15.500h22v2.500H5z" fill="#8a929c"/></svg>'
)


class Markup(ui.element):
    """Markup that this program built, which can be replaced. Everything in it that is text is escaped already."""

    def __init__(self, content: Html = Html(""), *, tag: str = "div") -> None:  # noqa: B008  (a constant)
        super().__init__(tag)
        self.props["innerHTML"] = str(content)

    def show(self, content: Html) -> None:
        """Show other markup. Nothing is sent if it is the same."""
        if self.props["innerHTML"] != content:
            self.props["innerHTML"] = str(content)


@contextmanager
def page_frame(title: str, *, active: str) -> Iterator[None]:
    """Add the header to the page, and collect its content. `title` is translated; `active` is its address."""
    ui.page_title(f"{title} · Trimaran")
    language = current_language()
    parts = [
        tag("meta", {"name": "trimaran-language", "content": language}),
        Html(f'<link rel="stylesheet" href="{_asset_url("page.css")}">'),
        Html(f'<link rel="stylesheet" href="{_asset_url("web.css")}">'),
        tag("script", {"src": _asset_url("web.js")}, ""),  # at once: it sets the theme before anything is drawn
        tag("script", {"src": _asset_url("page.js"), "defer": True}, ""),
    ]
    ui.add_head_html("\n".join(parts))
    known = set(Client.page_routes.values())
    links = [
        tag("a", {"href": path, "aria-current": "page" if path == active else None, "data-key": key}, say(name))
        for path, name, key in PAGES
        if path in known
    ]
    other = next(name for key, name in LANGUAGES.items() if key != current_language())
    themes = {"data-light": say("Light"), "data-dark": say("Dark"), "data-system": say("System")}
    tools = [
        tag("button", {"type": "button", "data-action": "language", "title": say("Language")}, other),
        tag("button", {"type": "button", "data-action": "theme", "title": say("Theme"), **themes}, say("System")),
        tag("button", {"type": "button", "data-action": "shortcuts", "title": say("Keyboard shortcuts")}, "?"),
    ]
    skip = tag("a", {"class": "skip", "href": "#content"}, say("Skip to the content"))
    brand = tag("a", {"class": "brand", "href": "/"}, Html(LOGO), tag("span", None, "Trimaran"))
    nav = tag("nav", {"aria-label": say("Pages")}, *links)
    top = tag("header", {"class": "top"}, skip, brand, nav, tag("div", {"class": "tools"}, *tools))
    keys = [(key, say(name)) for _, name, key in PAGES]
    keys += [("/", say("Search")), ("t", say("Theme")), ("l", say("Language")), ("?", say("Keyboard shortcuts"))]
    rows = [tag("tr", None, tag("th", None, tag("kbd", None, key)), tag("td", None, name)) for key, name in keys]
    close = tag("button", {"type": "button", "data-action": "close", "class": "plain"}, say("Close"))
    table = tag("table", None, tag("tbody", None, *rows))
    Markup(
        Html(top + tag("dialog", {"id": "shortcuts"}, tag("h3", None, say("Keyboard shortcuts")), table, close)),
        tag="div",
    ).classes("top-bar")
    with ui.element("div").props("id=content").classes("page"):  # Quasar's page around it is the `main` element
        yield


def empty_state(text: str, command: str | None = None) -> Html:
    shown = [tag("pre", {"class": "command"}, command)] if command else []
    return tag("section", {"class": "empty"}, Html(LOGO), tag("p", {"class": "lead"}, text), *shown)


def error_state(error: UserError) -> Html:
    cards = [
        tag("article", {"class": "card fault", "role": "alert"},
            tag("h3", None, tag("code", None, each.code), " ", each.what),
            tag("p", {"class": "quiet"}, say("where: {where}", where=each.where)),
            tag("p", None, say("fix: {fix}", fix=each.fix)))
        for each in shown_errors(error, current_language())
    ]  # fmt: skip
    return Html("".join(cards))


async def draw_soon(update: Callable[[], Awaitable[None]]) -> None:
    """Start to draw a page's content, and wait a moment for it before the page is sent without."""
    await asyncio.wait({asyncio.ensure_future(update())}, timeout=FIRST_DRAW_SECONDS)


def loading_state(text: str) -> Html:
    return tag("p", {"class": "loading", "role": "status"}, tag("span", {"class": "spinner"}, ""), text)


@cache
def asset(name: str) -> bytes:
    return files(ASSETS[name]).joinpath(name).read_bytes()


@cache
def _asset_url(name: str) -> str:
    """Return an address that changes with the content, so that browsers may keep it."""
    return f"{ASSET_PATH}{name}?{hashlib.sha256(asset(name)).hexdigest()[:16]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WebState:
    """The runs, whether pages may change or start something, and the language of those that have not chosen one."""

    runs: RunsRoot
    may_write: bool = False
    language: Language | None = None
