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
