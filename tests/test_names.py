"""One name, one meaning: class names and module names are unique over the whole of the source."""

from collections import defaultdict
from pathlib import Path

from tests.sources import FILES, facts_of, name_of, names_of, text_of

ROOT = Path(__file__).parents[1]
# Folders of files that are named after what they hold a row for (a command, a tool), and are read as a table.
TABLES = ("app/", "planner/emit", "runs/sinks", "kernels")
# Invented nouns that were replaced by the field's own terms (docs/glossary.md has those that are left).
REPLACED = {
    "boat", "berth", "cargo", "crew", "ferry", "inquest", "keeper", "moorings", "muster", "nursery", "reunion",
    "roster", "sentinel", "testify", "testimony", "voyage", "witness",
}  # fmt: skip


def test_every_class_name_has_one_meaning() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for name in facts_of(path).classes:
            homes[name].append(name_of(path))
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_every_module_name_has_one_meaning() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        name = name_of(path)
        if path.stem not in ("__init__", "__main__") and not any(table in name for table in TABLES):
            homes[path.stem].append(name)
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_names_are_the_fields_own() -> None:
    wrong: list[str] = []
    for path in FILES:
        text = f"{path.stem} {text_of(path)}".lower()
        if not any(word in text for word in REPLACED):
            continue  # to parse every file takes seconds
        names = {path.stem, *names_of(path)}
        invented = {part for name in names for part in name.lower().split("_")} & REPLACED
        wrong += [f"{name_of(path)}: {part}" for part in sorted(invented)]
    assert wrong == []


def test_the_glossary_has_at_most_25_terms() -> None:
    rows = [line for line in (ROOT / "docs" / "glossary.md").read_text().splitlines() if line.startswith("| ")]
    assert len(rows) - 1 <= 25  # the first row is the head
