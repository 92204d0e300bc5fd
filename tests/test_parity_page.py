"""docs/parity.md shows the matrix of tests/matrix.py. Apart from test_docs.py, which starts without torch."""

import re

from tests.environment import ROOT
from tests.matrix import cases
from tests.parity import TOLERANCE


def test_the_parity_page_shows_every_case_of_the_matrix() -> None:
    page = (ROOT / "docs" / "parity.md").read_text()
    shown = re.findall(r"^\| ([\w-]+) \| ([a-z]+-[a-z]+) \| \d+ \| (.*) \|$", page, re.MULTILINE)
    assert [f"{plan}-{model}" for plan, model, _ in shown] == [str(case) for case in cases()]
    assert all(float(number) <= TOLERANCE for _, _, numbers in shown for number in numbers.split(" | "))
