"""The page of benchmarks is generated: it is as new as the results, and has no figure that they do not have."""

import pytest
from benchmarks import report


def test_the_page_is_what_the_results_give() -> None:
    assert report.main(["--check"]) == 0


def test_the_check_fails_when_a_result_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    files = report.page()
    changed = {path: text.replace("**1.14**", "**1.15**") for path, text in files.items()}
    monkeypatch.setattr(report, "page", lambda: changed)
    assert report.main(["--check"]) == 1


def test_every_section_says_what_was_not_measured() -> None:
    text = report.page()[report.DOCS / "benchmarks.md"]
    sections = text.split("\n## ")[1:6]
    assert ["Not measured:" in each for each in sections] == [True] * 5


def test_a_table_is_read_up_to_its_end() -> None:
    text = "| a | b |\n|---|--:|\n| 1 | 2 |\n\n| a | c |\n|---|---|\n| 3 | 4 |\n"
    assert report.table(text, "| a | b |") == [["a", "b"], ["1", "2"]]
