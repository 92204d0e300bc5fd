"""After the warm-up the host runs ahead of the device: it never synchronises, and nothing is compiled."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.gpu.steady import PLANS, TRAIN

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of one process for all plans, because imports take most of the time."""
    command = [sys.executable, "-m", "tests.gpu.steady", str(tmp_path_factory.mktemp("steady"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", PLANS)
def test_the_host_does_not_synchronise_after_the_warm_up(seen: dict[str, Any], name: str) -> None:
    assert seen[name]["refused"] == ""
    assert seen[name]["waits"] == {}
    assert seen[name]["steps"] == TRAIN["steps"]


@pytest.mark.parametrize("name", PLANS)
def test_nothing_is_compiled_after_the_warm_up(seen: dict[str, Any], name: str) -> None:
    assert seen[name]["late"] == 0


@pytest.mark.parametrize("name", PLANS)
def test_memory_and_group_norms_are_measured_without_synchronising(seen: dict[str, Any], name: str) -> None:
    for memory in seen[name]["memory"]:
        assert 0 < memory["allocated"] <= memory["reserved"] <= memory["total"]
        assert 0 <= memory["fragmentation"] < 1
        assert (memory["retries"], memory["ooms"]) == (0, 0)
    assert len(seen[name]["groups"]) == -(-TRAIN["steps"] // 4)
    for groups in seen[name]["groups"]:
        assert all(1e-7 < each["update_ratio"] < 0.1 and each["grad_norm"] > 0 for each in groups.values())
