"""A container that allows few processes refuses a run. Memory and CPU: `test_process`, `test_clean_runs`."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.harness import ROOT, TINY, wait_for

PIDS = Path("/sys/fs/cgroup/pids")
pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(os.geteuid() != 0 or not (PIDS / "cgroup.procs").exists(), reason="needs root and cgroups v1"),
]


@pytest.fixture
def container() -> Iterator[Path]:
    """A control group for 40 processes and threads."""
    folder = PIDS / f"trimaran-{os.getpid()}"
    folder.mkdir()
    (folder / "pids.max").write_text("40")
    yield folder
    wait_for(lambda: not (folder / "cgroup.procs").read_text(), 30)
    folder.rmdir()


def test_a_run_that_may_not_start_its_threads_is_refused_by_name(tmp_path: Path, container: Path) -> None:
    settings = (*TINY, "cluster=2xcpu", "plan.mesh.dp_replicate=2", "train.steps=5")
    options = [word for each in settings for word in ("--set", each)]
    command = [sys.executable, "-m", "trimaran", "train", "--run-dir", str(tmp_path / "run"), *options]
    inside = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(container), *command]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(inside, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2, done
    assert "H009: only" in done.stderr, done
    assert "--pids-limit" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
