"""Which cases of a test `make test` runs, and which are left to `make slow`."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def quick_or_slow(cases: Iterable[Any], is_quick: Callable[[Any], bool]) -> list[Any]:
    """Return `cases` for `parametrize`, of which those that are not quick run in `make slow` only."""
    return [case if is_quick(case) else slow(case) for case in cases]


def slow(case: Any) -> Any:
    """Return `case` for `parametrize`, run in `make slow` only. A tuple is one argument each."""
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
