"""After the warm-up the host runs ahead of the device: nothing makes it wait, and nothing is compiled any more."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.gpu.steady import PLANS, TRAIN

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process saw of all plans: most of the time of each would be imports."""
    command = [sys.executable, "-m", "tests.gpu.steady", str(tmp_path_factory.mktemp("steady"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", PLANS)
def test_the_host_waits_for_nothing_in_the_steady_state(seen: dict[str, Any], name: str) -> None:
    assert seen[name]["refused"] == ""
    assert seen[name]["waits"] == {}
    assert seen[name]["steps"] == TRAIN["steps"]


@pytest.mark.parametrize("name", PLANS)
def test_nothing_is_compiled_after_the_warm_up(seen: dict[str, Any], name: str) -> None:
    assert seen[name]["late"] == 0


@pytest.mark.parametrize("name", PLANS)
def test_meters_of_the_device_and_of_groups_of_modules_are_read_meanwhile(seen: dict[str, Any], name: str) -> None:
    for told in seen[name]["memory"]:
        assert 0 < told["allocated"] <= told["reserved"] <= told["total"]
        assert 0 <= told["fragmentation"] < 1
        assert (told["retries"], told["ooms"]) == (0, 0)
    assert len(seen[name]["groups"]) == -(-TRAIN["steps"] // 4)
    for groups in seen[name]["groups"]:
        assert all(1e-7 < each["update_ratio"] < 0.1 and each["grad_norm"] > 0 for each in groups.values())
