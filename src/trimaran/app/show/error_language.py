"""Mistakes in the user's language: `TRIMARAN_LANG=zh` shows them in Chinese. `--json` is always in English.

Code raises an error with its English text. `zh_errors.json` has the English templates of each code, with numbers for
the values (`port {0} cannot be used: {1}`), and the Chinese sentence for each. A text is shown in Chinese if it matches
a template of its code; any other stays as it is.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

from trimaran.core import UserError

Language = Literal["en", "zh"]
LANGUAGE_VARIABLE = "TRIMARAN_LANG"
SHARED = ("common", "libraries")  # sections of the catalogue for every code
PLACE = re.compile(r"(\{\d+\}|\{\{|\}\})")
SEPARATOR = re.compile(r", or |, | and ")  # of fixes that are lists
CHINESE_SEPARATORS = {", or ": "，或者", ", ": "，", " and ": "，"}
NUMBERS = re.compile(r"\d[\d, x]*(?: or \d[\d, x]*)+")  # that a field may have
# A value directly after another one is an addition, which may be empty: `runs/tiny (did you mean 'runs/tiny-2'?)`.
ADDITION = r"((?: \(| with |, and ).*?|s?)"
MAX_DEPTH = 4  # of values that are texts themselves


@dataclass(frozen=True, slots=True)
class ShownError:
    """An error as it is printed."""

    code: str
    what: str
    where: str
    fix: str


def chosen_language(environment: Mapping[str, str]) -> Language | None:
    """Return the language of TRIMARAN_LANG: Chinese for `zh` or `zh_CN.UTF-8`, else English; None if it is not set."""
    named = environment.get(LANGUAGE_VARIABLE, "").strip().lower()
    if not named:
        return None
    return "zh" if re.split(r"[-_.]", named)[0] == "zh" else "en"


def shown_errors(error: UserError, language: Language | None) -> list[ShownError]:
    """Return the mistake and those that were found with it, in this language where it has a text for them."""
    found = []
    for each in error.all:
        parts = (each.what, each.where, each.fix)
        if language == "zh":
            parts = tuple(_chinese(part, each.code, MAX_DEPTH) or part for part in parts)
        found.append(ShownError(each.code, *parts))
    return found


def error_lines(shown: ShownError, language: Language | None) -> str:
    """Return what is printed after the code: what is wrong, where, and the fix."""
    if language == "zh":
        return f": {shown.what}\n  位置：{shown.where}\n  解决：{shown.fix}\n"
    return f": {shown.what}\n  where: {shown.where}\n  fix:   {shown.fix}\n"


def _chinese(text: str, code: str, depth: int) -> str | None:
    """Return the Chinese for `text`; None if neither it nor, for a list, each of its items has one."""
    if NUMBERS.fullmatch(text):
        return text.replace(" or ", " 或 ")
    for found in SEPARATOR.finditer(text):
        first = _chinese_sentence(text[: found.start()], code, depth)
        if first and (rest := _chinese(text[found.end() :], code, depth)):
            return f"{first}{CHINESE_SEPARATORS[found[0]]}{rest}"
    return _chinese_sentence(text, code, depth)


def _chinese_sentence(text: str, code: str, depth: int) -> str | None:
    for pattern, order, other in _templates(code):
        if (found := pattern.fullmatch(text)) is not None:
            values = dict(zip(order, found.groups(), strict=True))
            if depth:
                values = {place: _chinese(value, code, depth - 1) or value for place, value in values.items()}
            return other.format(*(values[place] for place in sorted(values)))
    return None


@cache
def _templates(code: str) -> tuple[tuple[re.Pattern[str], tuple[int, ...], str], ...]:
    """Return (pattern, numbers of groups, Chinese): more fixed text first; what begins with a value last."""
    sections = [catalogue().get(name, {}) for name in (code, *SHARED)]
    known = {english: other for section in reversed(sections) for english, other in section.items()}
    ordered = sorted(known, key=lambda english: (english.startswith("{0}"), -len(PLACE.sub("", english))))
    found = []
    for english in ordered:
        order: list[int] = []
        parts: list[str] = []
        for part in PLACE.split(english):
            if part in ("{{", "}}"):
                parts.append(re.escape(part[0]))
            elif PLACE.fullmatch(part):
                order.append(int(part[1:-1]))
                parts.append(ADDITION if parts and parts[-1] == "" and len(order) > 1 else "(.*?)")
            else:
                parts.append(re.escape(part))
        found.append((re.compile("".join(parts), re.DOTALL), tuple(order), known[english]))
    return tuple(found)


@cache
def catalogue() -> Mapping[str, Mapping[str, str]]:
    """Return the Chinese texts by code and English template; `common` and `libraries` are for all codes."""
    return json.loads(files("trimaran.app.show").joinpath("zh_errors.json").read_text(encoding="utf-8"))
