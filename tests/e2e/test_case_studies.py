"""The case studies of docs/cases: their commands print what the pages show, and figures in tables come from there."""

import re
import shlex
from pathlib import Path

import pytest

from tests.case_pages import (
    CASE_PAGES,
    COLUMNS,
    ROOT,
    ShownCommand,
    apply_grep,
    run_in_shell,
    shown_commands,
    tidy_lines,
)
from trimaran.app import main

SHOWN = [each for page in CASE_PAGES for each in shown_commands(page)]
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
FIGURE = re.compile(r"\d[\d,.]* (?:GiB|MiB)|\d+ min \d\d s|\d+\.\d s")
LOSSES = re.compile(r"loss ([\d.]+)(?: -> ([\d.]+))?")
PEAK = re.compile(r"^ +\d+ .*?([\d.]+) MiB +([\d.]+) MiB", re.MULTILINE)


def named(shown: list[ShownCommand]) -> list[object]:
    """Return the commands for `parametrize`. Variants of a page's first plan are slow."""
    slow = {True: [pytest.mark.slow], False: []}
    return [
        pytest.param(each, id=f"{each.page}: {each.command[:90]}", marks=slow["--set" in each.command])
        for each in shown
    ]


def read_tables(page: Path) -> list[list[dict[str, str]]]:
    """Return the tables of a page outside its blocks, each row by the names of the columns."""
    text = FENCE.sub("", page.read_text())
    tables = []
    for table in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        header, _, *rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()]
        tables.append([dict(zip(header, row, strict=True)) for row in rows])
    return tables


def answers_on(page: Path) -> str:
    return "\n".join(line for each in shown_commands(page) for line in each.lines)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a user without runs, with our recipes and examples, in a terminal as wide as that of the pages."""
    for name in ("recipes", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", COLUMNS)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


@pytest.mark.parametrize("shown", named([each for each in SHOWN if not each.is_slow]))
def test_a_command_prints_what_the_page_shows(
    shown: ShownCommand, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program, *arguments = shlex.split(apply_grep(shown.command, "")[0])
    assert program == "trimaran"
    main(arguments)
    printed = capsys.readouterr()
    assert tidy_lines(apply_grep(shown.command, printed.out or printed.err)[1]) == list(shown.lines)


@pytest.mark.slow
@pytest.mark.parametrize("shown", named([each for each in SHOWN if each.is_slow and not each.is_measured]))
def test_a_slow_command_prints_what_the_page_shows(shown: ShownCommand, repository: Path) -> None:
    assert tidy_lines(run_in_shell(shown.command, repository)) == list(shown.lines)


@pytest.mark.slow
@pytest.mark.parametrize("page", CASE_PAGES, ids=lambda page: page.stem)
def test_runs_in_small_measure_what_the_page_shows(page: Path, repository: Path) -> None:
    curves = []
    for shown in (each for each in shown_commands(page) if each.is_measured):
        printed = run_in_shell(shown.command, repository)
        expected = "\n".join(shown.lines)
        assert [float(peak) for peak, _ in PEAK.findall(printed)] == pytest.approx(
            [float(peak) for peak, _ in PEAK.findall(expected)], rel=0.1
        )
        if losses := losses_in(printed):
            assert losses == pytest.approx(losses_in(expected), rel=0.05)
            curves.append(losses)
    assert len(curves) > 1
    assert all(each == pytest.approx(curves[0], rel=2e-4) for each in curves)


def losses_in(printed: str) -> list[float]:
    return [float(loss) for pair in LOSSES.findall(printed) for loss in pair if loss]


@pytest.mark.parametrize("page", CASE_PAGES, ids=lambda page: page.stem)
def test_every_page_measures_in_small_and_its_runs_have_the_same_losses(page: Path) -> None:
    curves = [losses_in("\n".join(each.lines)) for each in shown_commands(page) if each.is_measured]
    curves = [each for each in curves if each]
    assert len(curves) > 1
    assert all(each == pytest.approx(curves[0], rel=2e-4) for each in curves)


@pytest.mark.parametrize("page", CASE_PAGES, ids=lambda page: page.stem)
def test_figures_in_tables_are_printed_by_a_command_of_the_page(page: Path) -> None:
    answers = answers_on(page)
    for table in read_tables(page):
        for row in table:
            if "published" in row:
                published, predicted = (float(row[name].replace(",", "")) for name in ("published", "predicted"))
                assert float(row["error"].removesuffix(" %")) == pytest.approx(
                    100 * (predicted / published - 1), abs=0.06
                )
            figures = FIGURE.findall(" ".join(cell for name, cell in row.items() if name != "published"))
            assert [each for each in figures if each not in answers] == [], row
