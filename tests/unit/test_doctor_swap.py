"""The doctor on samples of a machine that swaps: F071. A real one is in `tests/fault/test_diagnosis_swap.py`."""

import pytest

from trimaran.core import Mesh, Plan, parse_recipe
from trimaran.doctor import Evidence, swap

MIB = 2**20


def sampled(**keys: float) -> Evidence:
    """Return the evidence of a node with full memory, with `keys` added to ten samples."""
    recipe = parse_recipe("", name="test", overrides=["cluster=1xcpu"])
    full = {"node": 0, "host": "a", "ram": 64 << 30, "ram_used": 61 << 30, "swap_used": 3 << 30}
    samples = tuple(full | {"time": 5.0 * number} | keys for number in range(10))
    return Evidence(recipe=recipe, plan=Plan(mesh=Mesh(), micro_batch=1), samples=samples)


def test_swap_traffic_is_counted_and_old_swapped_pages_are_not() -> None:
    (found,) = swap(sampled(swap_read=20 * MIB, swap_written=20 * MIB))
    assert found.evidence["moved"] == pytest.approx(9 * 5 * 40 * MIB)
    assert not list(swap(sampled(swap_read=0, swap_written=0)))
    assert not list(swap(sampled(swap_read=20 * MIB, swap_written=20 * MIB, ram_used=20 << 30)))
