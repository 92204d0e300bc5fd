"""The list of slow cases names tests that exist, each once."""

from collections import Counter
from pathlib import Path

from tests.slow_cases import LEFT_OUT

TESTS = Path(__file__).parents[1]


def test_every_slow_case_belongs_to_a_test_that_exists() -> None:
    for each in LEFT_OUT:
        text = (TESTS / each.file).read_text()
        missing = [name for name in each.names if f"def {name.partition('[')[0]}(" not in text]
        assert missing == [], f"tests/{each.file} has no such tests"


def test_a_file_is_listed_once_and_so_is_a_case() -> None:
    files = Counter(each.file for each in LEFT_OUT)
    cases = Counter((each.file, name) for each in LEFT_OUT for name in each.names)
    assert set(files.values()) == set(cases.values()) == {1}
