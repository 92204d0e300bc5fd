"""The texts of pages and views in the language of their reader. The English text is the key of its translation.

A text is said in the language of the block (`speaking`), or else in that of the page that is built; elsewhere
in English. It also knows its template and values, so that a view can be translated after it was built.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from trimaran.app import Language, chinese_texts
from trimaran.core import TemplateText
from trimaran.ui.viz.figures import PlanView

Lookup = Callable[[str], str | None]
"""Returns the translation of a template; None if there is none."""

LANGUAGES: Mapping[Language, str] = {"en": "English", "zh": "中文"}
LANGUAGE_COOKIE = "trimaran-language"
# Fields that programs read: names of views and controls, units.
KEPT = {"name": ("PlanView", "Control"), "kind": ("Control",), "value": ("Control",), "options": ("Control",),
        "unit": (), "x_unit": (), "y_unit": (), "content": ("FileText",)}  # fmt: skip
_spoken: ContextVar[Language | None] = ContextVar("language", default=None)


def say(template: str, /, **values: object) -> str:
    """Return the text in the reader's language, with the values in it: `say("{count} ranks", count=8)`."""
    found = translation_of(template) or template
    return TemplateText(found.format(**values) if values else found, template, values)


def as_is(content: object) -> str:
    """Return a text that is the same in every language: a number, a name, a plan, a command."""
    return TemplateText(str(content))


def translation_of(template: str) -> str | None:
    """Return the template in the reader's language; None if that is English, or has no translation."""
    return chinese().get(template) if current_language() == "zh" else None


def translate(content: str, lookup: Lookup = translation_of) -> str:
    """Return a text in the language of `lookup`; in English where that has no translation."""
    if not isinstance(content, TemplateText):
        return lookup(content) or content
    found = lookup(content.template) if content.template else None
    if found is None:
        return content
    values = content.values.items()
    return found.format(
        **{name: translate(each, lookup) if isinstance(each, TemplateText) else each for name, each in values}
    )


def translate_view(view: PlanView, lookup: Lookup = translation_of) -> PlanView:
    """Return the view with all its texts in the language of `lookup`."""

    def translated(value: Any) -> Any:
        if isinstance(value, str):
            return translate(value, lookup)
        if isinstance(value, tuple):
            return tuple(map(translated, value))
        if isinstance(value, Mapping):
            return {key if key in ("explain", "simulate", "live") else translate(key, lookup): translated(each)
                    for key, each in value.items()}  # fmt: skip
        if is_dataclass(value) and not isinstance(value, type):
            kind = type(value).__name__
            names = [each.name for each in fields(value)]
            changed = [name for name in names if name not in KEPT or (KEPT[name] and kind not in KEPT[name])]
            return replace(value, **{name: translated(getattr(value, name)) for name in changed})
        return value

    return translated(view)


@contextmanager
def speaking(language: Language) -> Iterator[None]:
    """Say the texts of the block in this language, as a thread has no page."""
    token = _spoken.set(language)
    try:
        yield
    finally:
        _spoken.reset(token)


def current_language() -> Language:
    """Return the language of the block, or else that of the current page; English outside of both."""
    if (chosen := _spoken.get()) is not None:
        return chosen
    if "nicegui" not in sys.modules:  # this process has no pages
        return "en"
    from nicegui import context

    try:
        request = context.client.request
    except RuntimeError:  # no page is being built
        return "en"
    return language_of(request.cookies.get(LANGUAGE_COOKIE), request.headers.get("accept-language", ""))


def language_of(cookie: str | None, accepted: str) -> Language:
    """Return the language of the cookie, which a button sets, or else the server's, or else the browser's."""
    from nicegui import app

    if cookie == "en" or cookie == "zh":
        return cookie
    if (chosen := getattr(app.state, "trimaran_language", None)) is not None:
        return chosen
    return "zh" if accepted.strip().lower().startswith("zh") else "en"


@cache
def chinese() -> Mapping[str, str]:
    """Return the texts of errors, and those of `zh*.json` beside the web page: each page may have its own file."""
    found = {**chinese_texts()}
    for file in sorted(files("trimaran.ui.web").iterdir(), key=lambda each: each.name):
        if file.name.startswith("zh") and file.name.endswith(".json"):
            found |= json.loads(file.read_text(encoding="utf-8"))
    return found
