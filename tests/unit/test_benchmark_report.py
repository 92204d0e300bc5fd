"""The page of benchmarks is generated: it is as new as the results, and has no figure that they do not have."""

from benchmarks import report


def test_the_page_is_what_the_results_give() -> None:
    assert report.main(["--check"]) == 0


def test_a_page_that_differs_from_the_results_is_stale() -> None:
    files = report.page()
    assert report.stale(files) == []
    path, text = next(iter(files.items()))
    assert report.stale({**files, path: text + "x"}) == [path]


def test_every_section_says_what_was_not_measured() -> None:
    text = report.page()[report.DOCS / "benchmarks.md"]
    sections = text.split("\n## ")[1:6]
    assert ["Not measured:" in each for each in sections] == [True] * 5


def test_a_table_is_read_up_to_its_end() -> None:
    text = "| a | b |\n|---|--:|\n| 1 | 2 |\n\n| a | c |\n|---|---|\n| 3 | 4 |\n"
    assert report.table(text, "| a | b |") == [["a", "b"], ["1", "2"]]
