"""Mistakes in the user's language: `TRIMARAN_LANG=zh` shows them in Chinese. `--json` is always in English.

A mistake knows the template and the values of its texts. `core/messages` has the Chinese of each message beside the
English, and in `texts.zh.yaml` that of texts which are values of others. Only the messages of other libraries are
recognised by their English text, with the patterns of `libraries.zh.yaml`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

import yaml

from trimaran.core import MESSAGES, TemplateText, UserError, messages

Language = Literal["en", "zh"]
LANGUAGE_VARIABLE = "TRIMARAN_LANG"
PLACE = re.compile(r"\\\{(\d+)\\\}")


@dataclass(frozen=True, slots=True)
class ShownError:
    """An error as it is printed."""

    code: str
    what: str
    where: str
    fix: str


def chosen_language(environment: Mapping[str, str]) -> Language | None:
    """Return the language that TRIMARAN_LANG names (`zh`, `zh_CN.UTF-8`); None if it is not set.

    Another language than Chinese is English: there is no third one.
    """
    named = environment.get(LANGUAGE_VARIABLE, "").strip().lower()
    if not named:
        return None
    return "zh" if re.split(r"[-_.]", named)[0] == "zh" else "en"


def shown_errors(error: UserError, language: Language | None) -> list[ShownError]:
    """Return the mistake and those that were found with it, in this language where it has a text for them."""
    found = []
    for each in error.all:
        parts = (each.what, each.where, each.fix)
        found.append(ShownError(each.code, *(map(_chinese, parts) if language == "zh" else parts)))
    return found


def error_lines(shown: ShownError, language: Language | None) -> str:
    """Return what is printed after the code: what is wrong, where, and the fix."""
    if language == "zh":
        return f": {shown.what}\n  位置：{shown.where}\n  解决：{shown.fix}\n"
    return f": {shown.what}\n  where: {shown.where}\n  fix:   {shown.fix}\n"


def _chinese(text: str) -> str:
    """Return a text, and those that are its values, in Chinese where there is one."""
    values: Mapping[str, object] = {}
    if isinstance(text, TemplateText) and text.template:
        values, chinese = text.values, chinese_texts().get(text.template)
    elif (chinese := chinese_texts().get(text)) is None:
        for pattern, found in _library_patterns():
            if match := pattern.fullmatch(text):
                return found.format(*(_chinese(value) for value in match.groups()))
    if chinese is None:
        return text
    said = {name: _chinese(value) if isinstance(value, str) else value for name, value in values.items()}
    return chinese.format(**said)


@cache
def chinese_texts() -> Mapping[str, str]:
    """Return the Chinese of all messages, and of texts that are values of others, by their English template."""
    found: dict[str, str] = yaml.safe_load((MESSAGES / "texts.zh.yaml").read_text(encoding="utf-8"))
    for file in MESSAGES.glob("?.yaml"):
        for named in messages(file.stem).values():
            for texts in named.values():
                found |= {texts.what: texts.zh_what, texts.fix: texts.zh_fix}
    return {english: chinese for english, chinese in found.items() if chinese}


@cache
def _library_patterns() -> list[tuple[re.Pattern[str], str]]:
    """Return patterns of messages of pydantic and of the parser of the command line, and their Chinese."""
    texts = yaml.safe_load((MESSAGES / "libraries.zh.yaml").read_text(encoding="utf-8"))
    ordered = sorted(texts, key=lambda english: (english.startswith("{0}"), -len(english)))
    return [(re.compile(PLACE.sub("(.*?)", re.escape(english)), re.DOTALL), texts[english]) for english in ordered]
