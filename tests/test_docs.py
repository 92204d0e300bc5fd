"""What the documentation names is real: codes, links, fields, recipes, commands and the messages it shows."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from trimaran.app import COMMANDS, DETAILS, main
from trimaran.core import PHASES, Plan, Recipe, StepMetrics, UserError, parse_recipe
from trimaran.train import MEASURES

ROOT = Path(__file__).parents[1]
CODES = ROOT / "docs" / "codes"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
ON_SITE = {ROOT / "docs" / "reference" / name for name in ("commands.md", "recipe.md")}  # made by ops/site
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)")
SETTING = re.compile(r"--set (?:'([^']+)'|([a-z][^\s`]*=[^\s`),]+))")
CODE = re.compile(r'"((?:[A-Z]0|P1)\d\d)(?:\.[a-z0-9-]+)?"')  # H100 is a device
# A command whose output is an error, on purpose.
MISTAKE = re.compile(r"^\$ (.*)\n((?:[A-Z]0|P1)\d\d: .*\n  where: .*\n  fix: .*\n)", re.MULTILINE)


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return (text after the opening fence, content) of each fenced block."""
    return FENCE.findall(page.read_text())


def examples() -> Iterator[Any]:
    """Yield (command, file, output) for each refused `plan`; `file` is the YAML block before it.

    `plan` writes nothing and asks no device before it refuses. What needs files that no page shows is left out.
    """
    for page in PAGES:
        if page.is_relative_to(ROOT / "docs" / "zh"):
            continue  # its commands are those of its English page: tests/unit/test_chinese_pages.py
        file = ""
        for info, body in blocks(page):
            for command, answer in MISTAKE.findall(body):
                unseen = "model.path=" in command or (".yaml" in command and not file)
                if command.startswith("trimaran plan") and not unseen:
                    yield pytest.param(command, file, answer, id=f"{page.stem}: {command}")
            file = body if info.startswith("yaml") else ""


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def test_every_code_has_a_page_and_a_row_in_the_index() -> None:
    raised = {code for path in ROOT.glob("src/**/*.py") for code in CODE.findall(path.read_text())}
    titles = {page.stem: page.read_text().splitlines()[0] for page in CODES.glob("[A-Z][01]*.md")}
    assert titles.keys() == raised
    rows = re.findall(r"^\| \[(.*)\]\(\1\.md\) \| (.*) \|$", (CODES / "README.md").read_text(), re.MULTILINE)
    assert titles == {code: f"# {code}: {meaning}" for code, meaning in rows}


def test_links_lead_somewhere() -> None:
    links = [(page, target) for page in PAGES for target in LINK.findall(FENCE.sub("", page.read_text()))]
    paths = [(page, each, (page.parent / each).resolve()) for page, each in links if "://" not in each]
    assert [(page.name, each) for page, each, path in paths if path not in ON_SITE and not path.exists()] == []


def test_lines_fit_on_a_screen() -> None:
    # Their tables have names of plans and of runs.
    generated = {"parity.md", "parity-nccl.md", "accuracy.md", "hf-sweep.md"}
    wide = [
        f"{page.name}: {line[:60]}"
        for page in PAGES
        for line in FENCE.sub("", page.read_text()).splitlines()
        if len(line) > 120 and not (page.name in generated and line.startswith("|"))
    ]
    assert wide == []


def test_paths_of_the_tour_exist() -> None:
    named = re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", (ROOT / "docs" / "tour.md").read_text())
    assert named
    assert [
        path for path in named if not (ROOT / path).exists() and not (ROOT / "src" / "trimaran" / path).exists()
    ] == []


def test_settings_are_fields_of_a_recipe() -> None:
    for page in PAGES:
        for quoted, plain in SETTING.findall(MISTAKE.sub("", page.read_text())):
            parse_recipe("", name=str(page), overrides=[quoted or plain])


def test_recipes_parse_or_fail_as_they_are_marked() -> None:
    for page in PAGES:
        for info, body in blocks(page):
            if info == "yaml":
                parse_recipe(body, name=str(page))
            elif re.fullmatch(r"yaml R\d+", info):
                with pytest.raises(UserError, match=info.removeprefix("yaml ")):
                    parse_recipe(body, name=str(page))


def test_commands_exist() -> None:
    for page in PAGES:
        typed = [MISTAKE.sub("", body) for info, body in blocks(page) if info in ("", "sh", "bash", "console", "text")]
        typed += re.findall(r"`([^`]+)`", FENCE.sub("", page.read_text()))
        names = {name for text in typed for name in re.findall(r"\btrimaran ([a-z]\w*)", text)}
        assert names <= COMMANDS.keys(), page


@pytest.mark.parametrize(("command", "file", "answer"), list(examples()))
def test_a_mistake_is_answered_as_the_page_shows(
    command: str, file: str, answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in re.findall(r"[\w-]+\.yaml", command):
        Path(name).write_text(file)
    assert main(shlex.split(command)[1:]) == 2
    shown = ".*".join(map(re.escape, answer.split("...")))
    assert re.fullmatch(shown, capsys.readouterr().err)


def test_the_recipe_guide_has_every_field_with_its_default() -> None:
    guide = (ROOT / "docs" / "guides" / "recipes.md").read_text()
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (.*?) \|", guide, re.MULTILINE))
    pins = {f"plan.{name}" for name, _ in leaves(Plan().model_dump())}
    asked = dict(leaves(Recipe().model_dump(mode="json", exclude={"plan"})))
    assert rows.keys() == asked.keys() | pins
    assert {name: yaml.safe_load(rows[name].strip("`")) for name in asked} == asked


def test_the_metrics_guide_explains_every_number() -> None:
    guide = (ROOT / "docs" / "guides" / "metrics.md").read_text()
    known = {field.name for field in fields(StepMetrics)} - {"details"} | {"tokens_per_second", *DETAILS}
    for name in [*known, *PHASES, *MEASURES, "hfu", "memory", "ranks", "waits", "host_seconds", "host_bound"]:
        assert f"\n| `{name}` |" in guide
