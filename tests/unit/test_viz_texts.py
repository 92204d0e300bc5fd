"""Texts of views: each knows its template, and each has a Chinese translation with the same values in it."""

import ast
import json
import re
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cases import slow
from trimaran.app import chinese_texts, read_plan_request
from trimaran.core import DATA_PAYLOADS, PAYLOAD_AXES, TemplateText
from trimaran.planner import INEXACT, search
from trimaran.ui import (
    SHORT_NAMES,
    Subject,
    as_is,
    build_view,
    read_subject,
    say,
    translate,
    translate_view,
    view_as_dict,
)

SOURCE = Path(__file__).parents[2] / "src" / "trimaran"
WEB = SOURCE / "ui" / "web"
WORDS = re.compile(r"[A-Za-z]{2,}")
CHINESE = {**chinese_texts()}
for file in sorted(WEB.glob("zh*.json")):
    CHINESE |= json.loads(file.read_text(encoding="utf-8"))


def untranslated(view: Any) -> set[str]:
    """Return the texts of a view, and of the values in them, that have no translation."""
    found = set[str]()

    def note(text: str) -> str:
        found.add(text)
        return text

    translate_view(view, note)
    return {each for each in found if WORDS.search(each) and each not in CHINESE}


def fields_of(template: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(template) if name}


def test_a_text_is_a_string_that_can_be_said_in_another_language() -> None:
    text = say("{count:,} ranks of {axis}", count=1024, axis=say("replicas"))
    assert text == "1,024 ranks of replicas"
    assert json.dumps(text) == '"1,024 ranks of replicas"'
    words = {"{count:,} ranks of {axis}": "{axis}: {count:,}", "replicas": "R"}
    assert translate(text, words.get) == "R: 1,024"
    assert translate(text, {}.get) == text
    assert translate(as_is("replicas"), words.get) == "replicas"
    assert translate("replicas", words.get) == "R"


def test_chinese_templates_have_the_values_of_the_english_ones() -> None:
    views = json.loads((WEB / "zh_views.json").read_text(encoding="utf-8"))
    assert [key for key, text in views.items() if "{" in key and fields_of(key) != fields_of(text)] == []
    assert [key for key, text in views.items() if not text.strip()] == []


@pytest.mark.parametrize(("plan", "cluster"), [("llama-3.1-8b", "2x8xH100"), slow(("llama-3.1-70b", "4x8xH100")),
                                               slow(("llama-3.2-1b", "8xA100-80GB")), ("tiny", "2xcpu")])  # fmt: skip
def test_reasons_and_hints_of_the_planner_are_known(plan: str, cluster: str) -> None:
    answer = search(read_plan_request(plan, {"cluster": cluster}, ()).question)
    best = answer.ranked[0].prediction
    assert best is not None
    texts = [*(each.why for each in (*answer.misses, *answer.ties)), *answer.hints]
    texts += [each for text in texts for each in text.values.values() if isinstance(each, TemplateText)]
    assert [each for each in texts if each.template.format(**each.values) != each] == []
    assert [each.template for each in texts if each.template not in CHINESE] == []
    assert [each for each in best.exposed if each.partition(" on ")[0] not in CHINESE] == []


def test_every_template_of_the_planner_has_a_translation() -> None:
    files = [SOURCE / "planner" / "hints.py", SOURCE / "planner" / "search" / "rejections.py"]
    calls = [each for file in files for each in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
             if isinstance(each, ast.Call) and getattr(each.func, "id", "") == "templated"]  # fmt: skip
    templates = {str(each.args[0].value) for each in calls if isinstance(each.args[0], ast.Constant)}
    payloads = {*PAYLOAD_AXES, *DATA_PAYLOADS, "computing slowed by collectives", "communication"}
    others = {INEXACT, "optimizer", "parameters", "activations", "allocator", "{payload} on {link}"}
    assert len(templates) > 30
    assert sorted({*templates, *payloads, *others} - CHINESE.keys()) == []


@pytest.fixture(scope="module")
def subjects() -> list[Subject]:
    example = read_subject(None, None, None, (), ())
    piped = read_subject("llama-3.1-8b", None, "2x8xH100", ("plan.mesh.pp=2",), ())
    small = read_subject(None, None, None, ("cluster=1xcpu",), ())
    return [example, piped, small]


@pytest.mark.parametrize("name", SHORT_NAMES)
def test_every_text_of_a_view_has_a_translation(subjects: list[Subject], name: str) -> None:
    for subject in subjects[: 1 if name == "strategies" else None]:  # it searches, and has the same texts for all
        view = build_view(name, subject)
        assert untranslated(view) == set()
        assert {each.label for each in view.controls} <= CHINESE.keys()
        shown = json.dumps(view_as_dict(translate_view(view, CHINESE.get)), ensure_ascii=False)
        assert CHINESE[view.title] in shown
        assert view.question not in shown
        numbers = [each.value for mode in view.modes.values() for each in mode.formulas]
        again = translate_view(view, CHINESE.get)
        assert [each.value for mode in again.modes.values() for each in mode.formulas] == numbers


CHANGED = {
    "need": {"precision": "fp32", "gpu": "A100-80GB"},
    "strategies": {"tp": "2", "pp": "16"},
    "life": {"target": "ssh"},
    "ddp": {"straggler": "1.5"},
    "fsdp": {"reshard": "no", "replicas": "2"},
    "zero": {"precision": "fp32", "optimizer": "sgd"},
    "offload": {"pcie": "8"},
    "pipeline": {"schedule": "zero-bubble", "slow_factor": "2"},
    "tensor": {"tp": "3", "sequence": "no"},
    "mesh": {"tp": "64", "order": "tp-cp-dp-pp"},
    "collectives": {"algorithm": "hierarchical", "step": "0"},
}


@pytest.mark.parametrize("name", SHORT_NAMES)
def test_texts_that_a_control_brings_have_a_translation(subjects: list[Subject], name: str) -> None:
    changed = replace(subjects[0], settings=CHANGED[name])
    view = build_view(name, changed)
    assert untranslated(view) == set()
    before = view_as_dict(build_view(name, subjects[0]))
    assert view_as_dict(view) != before, "a control changes what is shown"
