"""Every message of the catalogue is raised with its values; mistakes are shown in Chinese with TRIMARAN_LANG=zh."""

import ast
import os
import re
from collections.abc import Iterator
from string import Formatter

import pytest
import yaml

from tests.sources import FILES, nodes_of, text_of
from trimaran.app import chosen_language, main, shown_errors
from trimaran.core import MESSAGES, ErrorTexts, UserError, messages, parse_recipe
from trimaran.machine import parse_cluster
from trimaran.models import spec_of
from trimaran.planner.search.goals import choose

NAMED = re.compile(r"[A-Z]\d{3}\.[a-z0-9-]+")
TEXTS = yaml.safe_load((MESSAGES / "texts.zh.yaml").read_text())
# Plurals and verbs of English have no Chinese.
NEEDS_LESS = re.compile(r"plural|verb|kind")
HAS_CHINESE = re.compile(r"[\u3001-\uff5e]")


def catalogue() -> Iterator[tuple[str, ErrorTexts]]:
    """Yield every message with its full name."""
    for file in MESSAGES.glob("?.yaml"):
        for code, named in messages(file.stem).items():
            yield from ((f"{code}.{name}", message) for name, message in named.items())


def raised() -> Iterator[tuple[str, set[str]]]:
    """Yield the name of a message and the keywords that it is made with, for each place in the source."""
    for path in FILES:
        if not NAMED.search(text_of(path)):
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and node.args:
                for first in node.args[:2]:  # `UserError.__init__(self, ...)` has it second
                    if isinstance(first, ast.Constant) and NAMED.fullmatch(str(first.value)):
                        yield str(first.value), {str(each.arg) for each in node.keywords}


def places(*texts: str) -> set[str]:
    return {name for text in texts for _, name, _, _ in Formatter().parse(text) if name is not None}


def test_every_message_is_raised_with_its_values() -> None:
    known, found = dict(catalogue()), list(raised())
    assert {name for name, _ in found} == known.keys()
    for name, given in found:
        message = known[name]
        assert given - {"where", "fix"} == places(message.what, message.fix), name
        assert ("fix" in given) != bool(message.fix), name


def test_a_chinese_text_has_the_values_of_the_english_one() -> None:
    pairs = [*TEXTS.items()]
    for _, message in catalogue():
        pairs += [(message.what, message.zh_what), (message.fix, message.zh_fix)]
    assert sum(1 for _, chinese in pairs if chinese) > 800
    for english, chinese in pairs:
        if chinese:
            assert places(chinese) <= places(english), english
            assert all(NEEDS_LESS.search(each) for each in places(english) - places(chinese)), english
            assert HAS_CHINESE.search(chinese), english


def test_the_texts_of_values_are_written_somewhere() -> None:
    """A text that was changed in the source is stale here. Those of the operating system are not in the source."""
    joined = "\n".join(re.sub(r'"\s*\n\s*(?:f|rf)?"', "", text_of(path)) for path in FILES).replace('\\"', '"')
    stale = [text for text in TEXTS if text not in joined and text not in map(os.strerror, range(1, 134))]
    assert stale == []


@pytest.mark.parametrize(("value", "language"), [("zh", "zh"), ("zh_CN.UTF-8", "zh"), ("ZH-TW", "zh"), ("en", "en"),
                                                 ("fr", "en"), ("", None)])  # fmt: skip
def test_the_variable_names_the_language(value: str, language: str | None) -> None:
    assert chosen_language({"TRIMARAN_LANG": value}) == language
    assert chosen_language({}) is None


def test_values_that_are_texts_are_translated_too() -> None:
    with pytest.raises(UserError) as caught:
        parse_recipe("train: {stepz: 3}", name="my.yaml")
    (shown,) = shown_errors(caught.value, "zh")
    assert shown.what == "没有字段 'stepz'（是否想写 'steps'？）"
    assert shown.where == "train.stepz（my.yaml，第 1 行）"
    assert (
        shown_errors(caught.value, "en")[0].what
        == caught.value.what
        == "there is no field 'stepz' (did you mean 'steps'?)"
    )


def test_lists_of_fixes_are_translated_item_by_item() -> None:
    recipe = parse_recipe("model: {preset: llama-3-8b}\nplan: {precision: fp32, sharding: none}", name="my.yaml")
    with pytest.raises(UserError) as caught:
        choose(recipe, spec_of(recipe.model), parse_cluster("2xL4"))
    (shown,) = shown_errors(caught.value, "zh")
    assert "add devices" in caught.value.fix
    assert caught.value.fix.endswith(", or choose a smaller model")
    assert shown.fix.startswith("增加设备")
    assert shown.fix.endswith("，或者换更小的模型")


def test_a_text_without_a_translation_stays_english() -> None:
    error = UserError("A003", "something new", where="somewhere", fix="do it")
    assert shown_errors(error, "zh")[0].what == "something new"


def test_a_command_shows_its_mistakes_in_chinese(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRIMARAN_LANG", "zh")
    assert main(["plan", "--set", "train.stepz=3", "--set", "train.steps=-1"]) == 2
    assert capsys.readouterr().err.splitlines()[:6] == [
        "R013: train.steps 的值是 -1：应大于或等于 1",
        "  位置：train.steps (--set)",
        "  解决：使用不小于 1 的值",
        "R011: 没有字段 'stepz'（是否想写 'steps'？）",
        "  位置：train.stepz (--set)",
        "  解决：此处可用的字段：steps, global_batch, lr, seed, clip_norm, deterministic, precision, save, "
        "check_first_loss, schedule, optimizer, evaluate, sample",
    ]


def test_json_is_in_english_whatever_the_language(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = []
    for language in ("en", "zh"):
        monkeypatch.setenv("TRIMARAN_LANG", language)
        assert main(["plan", "--set", "plan.mesh.tp=3", "--set", "cluster=8xH100", "--json"]) == 2
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    assert '"code": "P001"' in answers[0]
