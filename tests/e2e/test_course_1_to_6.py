"""Lessons 1 to 6 of docs/course: every command prints what its page shows, and the claims of the pages hold."""

from pathlib import Path

import pytest

from tests.cases import quick_or_slow
from tests.lessons import Student, difference

LESSONS = (
    "01-memory.md",
    "02-ddp.md",
    "03-accumulation.md",
    "04-zero.md",
    "05-tensor-parallel.md",
    "06-pipeline.md",
)


# Lesson 4 counts the bytes of ranks for as long as all other lessons take.
@pytest.mark.parametrize("page", quick_or_slow(LESSONS, lambda page: not page.startswith("04")))
def test_commands_print_what_the_page_shows(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Student(tmp_path).check(page)


@pytest.mark.slow
@pytest.mark.parametrize("page", LESSONS)
def test_commands_run_as_processes(page: str, tmp_path: Path) -> None:
    Student(tmp_path, is_real=True).check(page)


def test_output_differs_by_words_and_by_numbers_beyond_one_per_cent() -> None:
    shown = "loss 5.00 -> 4.000\n...\npeak 1,000 bytes"
    assert difference(shown, "loss 5.01   -> 3.99\nstep 2 s\n\npeak 1,009 bytes\n") == ""
    for printed in ("loss 5.06 -> 4.0\n\npeak 1,000 bytes", "loss 5 -> 4\npeak 1,000 bits", "loss 5 -> 4"):
        assert difference(shown, printed) != ""
