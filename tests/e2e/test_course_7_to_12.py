"""Lessons 7 to 12 of docs/course: every command prints what its page shows, and the claims of the pages hold."""

import contextlib
import io
import json
import math
import re
import shlex
from itertools import takewhile
from pathlib import Path

import pytest

from tests.diagnosed_runs import findings, measured
from tests.lessons import TOLERANCE, Student, commands
from trimaran.app import main
from trimaran.runs import RunDirectory

LESSONS = ("07-three-d.md", "08-precision.md", "09-vlm-data.md", "10-faults.md", "11-bottleneck.md", "12-clusters.md")
EXIT_CODES = {"trimaran checkpoints verify runs/ten": 1}  # of commands that find what is wrong
STARTS_PROCESSES = "trimaran rehearse "  # which import torch: left to the slow tests


class Reader(Student):
    """A student who expects some commands to find something wrong."""

    def check(self, page: str, *, tolerance: float = TOLERANCE) -> None:
        for command in commands(page):
            if self.is_real or not command.line.startswith(STARTS_PROCESSES):
                assert not (wrong := self.difference(command, tolerance)), f"{page}: {command.line}\n{wrong}"

    def run(self, line: str) -> str:
        if line not in EXIT_CODES:
            return super().run(line)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            assert main(shlex.split(line)[1:]) == EXIT_CODES[line]
        return out.getvalue()


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("page", [page for page in LESSONS if not page.startswith(("10", "11"))])
def test_commands_print_what_the_page_shows(page: str, tmp_path: Path) -> None:
    Reader(tmp_path).check(page)


def test_damage_is_found_with_and_without_trimaran(tmp_path: Path) -> None:
    """Lesson 10 up to its resume; the two ranks are trained without a supervisor, and none is killed."""
    reader, page = Reader(tmp_path), commands("10-faults.md")
    reader.run("trimaran train examples/course/10-faults/recipe.yaml --run-dir runs/ten")
    kept = [each for each in takewhile(lambda each: "resume" not in each.line, page) if "incidents" not in each.line]
    assert [each.line.split()[:3] for each in kept[1:]] == [
        ["trimaran", "checkpoints", "runs/ten"],
        ["python", "examples/course/10-faults/damage.py", "runs/ten"],
        ["trimaran", "checkpoints", "verify"],
    ]
    solution = page[-1]
    for command in kept[1:]:
        assert not (wrong := reader.difference(command)), wrong
    assert "DAMAGED" in solution.shown
    found = reader.run(solution.line.replace("refused-step", "step"))
    assert re.findall(r"\S+: .*(?:right|DAMAGED)", found) == re.findall(r"\S+: .*(?:right|DAMAGED)", solution.shown)


def test_dips_and_a_speed_up_of_5_2_are_explained(tmp_path: Path) -> None:
    """Lesson 11: the doctor finds the dips, its fix removes them, and the factors on the page multiply to 5.2."""
    Reader(tmp_path).check("11-bottleneck.md")
    dips, smooth = (RunDirectory(tmp_path / "runs" / name) for name in ("dips", "smooth"))
    assert findings(dips)["F007"].patch == {"checkpoint.asynchronous": True}
    assert measured(smooth).fraction("checkpoint") < measured(dips).fraction("checkpoint") / 2
    shown = next(each.shown for each in commands("11-bottleneck.md") if each.line.endswith("speedup.py"))
    assert 8 * math.prod(float(each) for each in re.findall(r" x (0\.\d+)", shown)) == pytest.approx(5.2, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("page", LESSONS)
def test_commands_run_as_processes(page: str, tmp_path: Path) -> None:
    Reader(tmp_path, is_real=True).check(page)
    if page.startswith("10"):
        incidents = [json.loads(line) for line in (tmp_path / "runs/ten/incidents.jsonl").read_text().splitlines()]
        crash = [each for each in incidents if each["id"] == "i-0001"][-1]
        assert (crash["cause"], crash["suspects"]) == ("crash", [1])
        assert crash["cost"]["lost_steps"] <= 2
