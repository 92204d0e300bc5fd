"""Every text of the run page, the comparison and the report's sections has a Chinese one, with the same places."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from trimaran.core import PHASES
from trimaran.ui import (
    ALWAYS,
    AXES,
    GROUPS,
    HELD,
    LEDGER_KINDS,
    LIVE,
    MACHINE_TITLES,
    MEANINGS,
    NAMES,
    OUTCOMES,
    PLOTS,
    SPREAD_TITLES,
    STATES,
    WATERFALL,
    say,
    speaking,
)

UI = Path(__file__).parents[2] / "src" / "trimaran" / "ui"
FILES = [
    *sorted((UI / "report").glob("*.py")),
    *sorted((UI / "web").glob("run_*.py")),
    UI / "web" / "compare_page.py",
]
OTHERS = {"view_page.py", "comm_page.py"}  # pages of their own
PLACES = re.compile(r"\{(\w+)\}")


def chinese() -> dict[str, str]:
    found: dict[str, str] = {}
    for path in sorted((UI / "web").glob("zh*.json")):
        found |= json.loads(path.read_text(encoding="utf-8"))
    return found


def said() -> Iterator[str]:
    """Yield the texts that modules say: literals in calls of `say`, and the tables that are said by name."""
    for path in FILES:
        if path.name in OTHERS:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "say":
                for constant in ast.walk(node.args[0]):
                    if (
                        isinstance(constant, ast.Constant)
                        and isinstance(constant.value, str)
                        and len(constant.value) > 1
                    ):
                        yield constant.value
    yield from (title for title, _ in [*SPREAD_TITLES.values(), *MACHINE_TITLES.values()])
    yield from (meaning for _, meaning in [*STATES.values(), *OUTCOMES.values(), *WATERFALL.values()])
    yield from (purpose for purpose, _ in [*ALWAYS, *LIVE])
    yield from (title for title, _, _ in PLOTS.values())
    yield from [*AXES.values(), *LEDGER_KINDS, *GROUPS, *PHASES, *NAMES.values(), *HELD.values(), *MEANINGS.values()]


SKIPPED = {"unit", "severity", "title", "question", "name", "purpose", "status", "how", "action", "capitalize", "plan",
           "empty", "sharding", " per second", "feed", "tab"}  # fmt: skip


def test_every_text_has_a_chinese_one() -> None:
    known = chinese()
    missing = sorted({text for text in said() if text not in known and text not in SKIPPED})
    assert missing == []


def test_a_translation_has_the_places_of_its_text() -> None:
    wrong = {text for text, other in chinese().items() if {*PLACES.findall(text)} != {*PLACES.findall(other)}}
    assert wrong == set()


def test_a_text_is_said_in_the_language_of_the_block() -> None:
    assert say("{count} ranks", count=3) == "3 ranks"
    with speaking("zh"):
        assert say("{count} ranks", count=3) == chinese()["{count} ranks"].format(count=3) != "3 ranks"
        assert say("not known here") == "not known here"
    assert say("{count} ranks", count=3) == "3 ranks"


@pytest.mark.parametrize("name", ["zh_run.json"])
def test_no_text_is_translated_twice(name: str) -> None:
    pairs = json.loads((UI / "web" / name).read_text(encoding="utf-8"), object_pairs_hook=list)
    names = [text for text, _ in pairs]
    assert len(names) == len({*names})
