"""Texts that know their template and values: English where they arise, another language where they are read."""

from collections.abc import Mapping, Sequence
from typing import Self


class TemplateText(str):
    """A text made of a template and values. Without a template it is the same in every language."""

    __slots__ = ("template", "values")
    template: str
    values: Mapping[str, object]

    def __new__(cls, content: str = "", template: str = "", values: Mapping[str, object] | None = None) -> Self:
        made = super().__new__(cls, content)
        made.template, made.values = template, values or {}
        return made


def templated(template: str, /, **values: object) -> TemplateText:
    """Return the text in English: `templated("{gain} faster, but {risk}", gain="3.0%", risk=...)`."""
    return TemplateText(template.format(**values), template, values)


def joined(texts: Sequence[str], last: str = "{first}, or {last}") -> str:
    """Return `a, b, or c` as one text, whose parts keep their templates. `last` is the template of the last join."""
    first, *rest = texts or ("",)
    for each in rest[:-1]:
        first = templated("{first}, {next}", first=first, next=each)
    return templated(last, first=first, last=rest[-1]) if rest else first
