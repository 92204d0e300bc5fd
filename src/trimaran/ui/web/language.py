"""The texts of the web page in English and Chinese. The English text is the key, and what is shown without another.

The language of a page is that of its cookie, which the button sets; else that of `TRIMARAN_LANG` when the server was
started; else that which the browser prefers.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.resources import files

from nicegui import app as nicegui_app
from nicegui import context

from trimaran.app.show.error_language import Language

LANGUAGES: Mapping[Language, str] = {"en": "English", "zh": "中文"}
LANGUAGE_COOKIE = "trimaran-language"
_CHOSEN: ContextVar[Language | None] = ContextVar("language", default=None)


def say(text: str, **values: object) -> str:
    """Return `text` in the language of the page that is being built or updated, with `values` in its braces."""
    return say_in(current_language(), text, **values)


def say_in(language: Language, text: str, **values: object) -> str:
    found = chinese().get(text, text) if language == "zh" else text
    return found.format(**values) if values else found


def current_language() -> Language:
    """Return the language that `speaking` chose, or that of the current page; English outside of a page."""
    if (chosen := _CHOSEN.get()) is not None:
        return chosen
    try:
        request = context.client.request
    except RuntimeError:  # no page is being built
        return "en"
    return language_of(request.cookies.get(LANGUAGE_COOKIE), request.headers.get("accept-language", ""))


def set_server_language(language: Language | None) -> None:
    """Set the language of all pages without a cookie; None leaves it to the browsers."""
    nicegui_app.state.trimaran_language = language


def server_language() -> Language | None:
    return getattr(nicegui_app.state, "trimaran_language", None)


def language_of(cookie: str | None, accepted: str) -> Language:
    """Return the language of the cookie, or else the server's, or else that which the browser prefers."""
    if cookie == "en" or cookie == "zh":
        return cookie
    if (chosen := server_language()) is not None:
        return chosen
    return "zh" if accepted.strip().lower().startswith("zh") else "en"


@contextmanager
def speaking(language: Language) -> Iterator[None]:
    """Use this language in the block, for a thread that has no page."""
    token = _CHOSEN.set(language)
    try:
        yield
    finally:
        _CHOSEN.reset(token)


@cache
def chinese() -> Mapping[str, str]:
    """Return all texts of `zh*.json` in this package: each page may have its own file."""
    found: dict[str, str] = {}
    for file in sorted(files("trimaran.ui.web").iterdir(), key=lambda each: each.name):
        if file.name.startswith("zh") and file.name.endswith(".json"):
            found |= json.loads(file.read_text(encoding="utf-8"))
    return found
