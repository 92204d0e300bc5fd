"""One name, one meaning: class names and module names are unique over the whole of the source."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "trimaran"
FILES = sorted(SRC.rglob("*.py"))
# Folders of files that are named after what they hold a row for (a command, a tool, a rule), and are read as a table.
TABLES = ("app/commands", "planner/emit", "telemetry/sinks", "doctor/rules", "doctor/checks", "kernels")
# Invented nouns that were replaced by the field's own terms (docs/glossary.md has those that are left).
REPLACED = {
    "boat", "berth", "cargo", "crew", "ferry", "inquest", "keeper", "moorings", "muster", "nursery", "reunion",
    "roster", "sentinel", "testify", "testimony", "voyage", "witness",
}  # fmt: skip


def test_every_class_name_has_one_meaning() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(str(path.relative_to(SRC)))
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_every_module_name_has_one_meaning() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        name = str(path.relative_to(SRC))
        if path.stem not in ("__init__", "__main__") and not any(table in name for table in TABLES):
            homes[path.stem].append(name)
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_names_are_the_fields_own(path: Path) -> None:
    tree = ast.parse(path.read_text())
    names = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    names += [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    names += [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    assert REPLACED.isdisjoint(part for name in [path.stem, *names] for part in name.lower().split("_"))


def test_the_glossary_has_at_most_25_terms() -> None:
    rows = [line for line in (ROOT / "docs" / "glossary.md").read_text().splitlines() if line.startswith("| ")]
    assert len(rows) - 1 <= 25  # the first row is the head
