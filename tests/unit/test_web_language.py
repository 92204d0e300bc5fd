"""Every text of the web page is there in Chinese, with the same values in it."""

import ast
import re
from typing import get_args

import pytest

pytest.importorskip("nicegui")

from tests.sources import FILES, name_of, nodes_of
from trimaran.app import Status, chinese_texts
from trimaran.planner import GOALS, MEANING, PHASE_MEANING
from trimaran.ui import COLUMNS, FILTERS, OUTSIDE, PAGES, POINT_KINDS, TEXTS, chinese, language_of, say, speaking

WEB = [path for path in FILES if name_of(path).startswith("ui/web/")]


def said() -> dict[str, str]:
    """Return every text that is given to `say` as it is, and the file that has it."""
    found: dict[str, str] = {}
    for path in WEB:
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "say":
                texts = [each.value for each in node.args if isinstance(each, ast.Constant)]
                found |= {text: name_of(path) for text in texts if isinstance(text, str)}
    return found


def test_every_text_is_there_in_chinese() -> None:
    assert {text: file for text, file in said().items() if text not in chinese()} == {}


def test_names_that_are_shown_are_there_in_chinese() -> None:
    names = {*COLUMNS, *FILTERS, *GOALS, *MEANING, *PHASE_MEANING, *get_args(Status), OUTSIDE, *POINT_KINDS}
    names |= {*TEXTS.values(), *(name for _, name, _ in PAGES)}
    assert names - chinese().keys() == set()


def test_both_languages_have_the_same_values() -> None:
    values = re.compile(r"\{\w+\}")
    own = chinese().keys() - chinese_texts().keys()  # those of errors: test_error_language.py
    pairs = {text: (sorted(values.findall(text)), sorted(values.findall(chinese()[text]))) for text in own}
    assert {text for text, (english, other) in pairs.items() if english != other} == set()


def test_the_language_is_that_of_the_cookie_or_of_the_browser() -> None:
    assert language_of("zh", "en-GB") == "zh"
    assert language_of(None, "zh-CN,zh;q=0.9") == "zh"
    assert language_of("fr", "fr-FR") == "en"


def test_a_text_is_said_in_the_chosen_language() -> None:
    assert say("{count} min ago", count=3) == "3 min ago"
    with speaking("zh"):
        assert say("{count} min ago", count=3) == "3 分钟前"
        assert say("a text without a translation") == "a text without a translation"
