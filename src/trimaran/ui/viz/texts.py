"""Texts of views that know their template and values, so that a page can show them in another language.

They are strings: JSON and the terminal show them as they are.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from trimaran.ui.viz.figures import PlanView

Lookup = Callable[[str], str | None]
"""Returns the translation of a template; None if there is none."""

# Fields that programs read: names of views and controls, units.
KEPT = {"name": ("PlanView", "Control"), "kind": ("Control",), "value": ("Control",), "options": ("Control",),
        "unit": (), "x_unit": (), "y_unit": (), "content": ("FileText",)}  # fmt: skip


class ViewText(str):
    """A text made of a template and values. Without a template it is the same in every language."""

    __slots__ = ("template", "values")
    template: str
    values: Mapping[str, object]

    def __new__(cls, content: str = "", template: str = "", values: Mapping[str, object] | None = None) -> "ViewText":
        made = super().__new__(cls, content)
        made.template, made.values = template, values or {}
        return made


def say(template: str, /, **values: object) -> ViewText:
    """Return the template with the values in it: `say("{count} ranks", count=8)`."""
    return ViewText(template.format(**values), template, values)


def as_is(content: object) -> ViewText:
    """Return a text that is the same in every language: a number, a name, a plan, a command."""
    return ViewText(str(content))


def translate(content: str, lookup: Lookup) -> str:
    """Return the text in the language of `lookup`; in English where that has no translation."""
    if not isinstance(content, ViewText):
        return lookup(content) or content
    found = lookup(content.template) if content.template else None
    if found is None:
        return content
    values = content.values.items()
    return found.format(
        **{name: translate(each, lookup) if isinstance(each, ViewText) else each for name, each in values}
    )


def translate_view(view: PlanView, lookup: Lookup) -> PlanView:
    """Return the view with all its texts in the language of `lookup`."""
    return _changed(view, lambda content: translate(content, lookup))


def texts_of(view: PlanView) -> Iterator[str]:
    """Yield the templates of all texts of a view that a person reads, and the plain texts among their values."""
    found: list[str] = []

    def note(content: str) -> str:
        if not isinstance(content, ViewText):
            found.append(content)
        elif content.template:
            found.append(content.template)
            for value in content.values.values():
                if isinstance(value, ViewText):
                    note(value)
        return content

    _changed(view, note)
    yield from found


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """Return the value with every text in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_changed(each, change) for each in value)
    if isinstance(value, Mapping):
        return {key if key in ("explain", "simulate", "live") else change(key): _changed(each, change)
                for key, each in value.items()}  # fmt: skip
    if is_dataclass(value) and not isinstance(value, type):
        kind = type(value).__name__
        names = [each.name for each in fields(value)]
        changed = [name for name in names if name not in KEPT or (KEPT[name] and kind not in KEPT[name])]
        return replace(value, **{name: _changed(getattr(value, name), change) for name in changed})
    return value
