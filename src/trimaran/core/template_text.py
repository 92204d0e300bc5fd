"""Texts that know their template and values: English where they arise, another language where they are read."""

from collections.abc import Mapping
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
