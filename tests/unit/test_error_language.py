"""Mistakes are shown in Chinese with TRIMARAN_LANG=zh; the catalogue is complete for its codes, and never stale."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.sources import FILES, nodes_of, text_of
from trimaran.app import PLACE, SHARED, catalogue, chosen_language, main, shown_errors
from trimaran.core import UserError

FIRST = 60  # at least as many codes have Chinese texts
LATE = 0.05  # of the messages may be new or changed since the catalogue was brought up to date
SYSTEM = {"No space left on device", "No such file or directory", "Permission denied", "Is a directory",
          "Address already in use", "Read-only file system"}  # fmt: skip
BOUNDS = {f"use a value of {phrase} {{0}}" for phrase in ("at least", "more than", "at most", "less than")}
# A plural and a verb of English; the name of a class.
NEEDS_LESS = {"{0}; {1} of {2} {3}{4} {5} bad, and the allowed fraction is {6}",
              "should be a valid dictionary or instance of {0}"}  # fmt: skip
HAS_CHINESE = re.compile(r"[\u4e00-\u9fff]")
# Commands and paths are the same in both languages.
SAME = re.compile(r"pip install '[\w\[\]]+'|--with \S+|--\S+ \{0\}(=\{1\})?|use \{0\}|\{0\}, or \{1\}")


def template_of(node: ast.AST | None) -> str | None:
    """Return a text of the source with numbers for its values; None if it is not a literal."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _escaped(node.value)
    if not isinstance(node, ast.JoinedStr):
        return None
    parts, number = [], 0
    for part in node.values:
        if isinstance(part, ast.Constant):
            parts.append(_escaped(str(part.value)))
        else:
            parts.append(f"{{{number}}}")
            number += 1
    return "".join(parts)


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def raised(codes: set[str]) -> Iterator[tuple[str, str]]:
    """Yield (code, template) of what and fix of every UserError of these codes, where they are literals."""
    named = re.compile(rf'"(?:{"|".join(sorted(codes))})"')
    for path in FILES:
        if not named.search(text_of(path)):
            continue
        for node in nodes_of(path):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "UserError"):
                continue
            if not node.args or not isinstance(node.args[0], ast.Constant) or node.args[0].value not in codes:
                continue
            keywords = {each.arg: each.value for each in node.keywords}
            for text in [*node.args[1:2], keywords.get("what"), keywords.get("fix")]:
                if (template := template_of(text)) is not None:
                    yield str(node.args[0].value), template


def test_the_first_codes_have_chinese_texts_for_what_is_raised() -> None:
    """English changes first: a few new messages may be in English until the catalogue follows."""
    codes = set(catalogue()) - set(SHARED)
    assert len(codes) >= FIRST
    shared, texts = catalogue()["common"].keys(), set(raised(codes))
    missing = {(code, text) for code, text in texts
               if text not in shared and text not in catalogue()[code] and not SAME.fullmatch(text)}  # fmt: skip
    assert len(missing) <= LATE * len(texts), sorted(missing)


def test_the_texts_of_the_catalogue_are_written_somewhere() -> None:
    """The fixed parts of each English text are in the source: a text that was changed there is stale here."""
    joined = "\n".join(re.sub(r'"\s*\n\s*(?:f|rf)?"', "", text_of(path)) for path in FILES).replace('\\"', '"')
    stale = []
    for name, texts in catalogue().items():
        for english in texts if name != "libraries" else ():
            parts = [part.replace("{{", "{").replace("}}", "}") for part in re.split(r"\{\d+\}", english)]
            if english not in SYSTEM | BOUNDS and not all(part in joined or _escaped(part) in joined for part in parts):
                stale.append(english)
    assert len(stale) <= LATE * sum(map(len, catalogue().values())), stale


def test_both_languages_have_the_same_values_and_the_other_is_chinese() -> None:
    for texts in catalogue().values():
        for english, other in texts.items():
            places = set(PLACE.findall(english))
            dropped = places - set(PLACE.findall(other))
            assert set(PLACE.findall(other)) <= places, english
            assert not dropped or english in NEEDS_LESS, english
            assert HAS_CHINESE.search(other) or "，" in other or "：" in other, english


@pytest.mark.parametrize(("value", "language"), [("zh", "zh"), ("zh_CN.UTF-8", "zh"), ("ZH-TW", "zh"), ("en", "en"),
                                                 ("fr", "en"), ("", None)])  # fmt: skip
def test_the_variable_names_the_language(value: str, language: str | None) -> None:
    assert chosen_language({"TRIMARAN_LANG": value}) == language
    assert chosen_language({}) is None


def test_values_that_are_texts_are_translated_too() -> None:
    error = UserError("T003", "'none' does not exist in /tmp (did you mean 'nodes'?)", where="data.path: /tmp/none",
                      fix="correct data.path; it is relative to the working directory")  # fmt: skip
    (shown,) = shown_errors(error, "zh")
    assert shown.what == "/tmp 中没有 'none'（是否想写 'nodes'？）"
    assert shown.where == "data.path: /tmp/none"
    assert shown.fix == "修正 data.path；它相对于当前工作目录"
    assert shown_errors(error, "en")[0].what == error.what


def test_lists_of_fixes_are_translated_item_by_item() -> None:
    fix = "add devices: 2xH100 is enough, set train.optimizer.states to 8bit, or choose a smaller model"
    (shown,) = shown_errors(UserError("P007", "no plan fits", where="cluster", fix=fix), "zh")
    assert shown.fix == "增加设备：2xH100 就够了，把 train.optimizer.states 设为 8bit，或者换更小的模型"


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
