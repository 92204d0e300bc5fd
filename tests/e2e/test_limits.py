"""Limits of the operating system: found before the start if they are too low, and raised where a run may."""

import os
import resource
import subprocess
import sys
from pathlib import Path

from tests import forked
from tests.cpu_rates import give_cpu_rates
from tests.environment import environment

RAISED = (
    "import resource; from trimaran.runs.process_control import raise_soft_limits; raise_soft_limits(); "
    "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
)


def started(arguments: list[str], limit: tuple[int, int], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python with these limits of open files, soft and hard."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"TRIMARAN_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limit),
    )


def test_too_few_open_files_are_found_before_the_start(tmp_path: Path) -> None:
    give_cpu_rates(tmp_path / "cache")
    command = ["-m", "trimaran", "train", "--set", "cluster=2xcpu", "--run-dir", "run"]
    result = started(command, (64, 64), tmp_path)
    assert result.returncode == 2
    assert "H009: only 64 files may be open at once, and a rank of 2 opens at least 94" in result.stderr
    assert "fix:   ulimit -n 65536" in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_run_raises_its_soft_limit_to_the_hard_one(tmp_path: Path) -> None:
    assert started(["-c", RAISED], (64, 4000), tmp_path).stdout.split() == ["4000", "4000"]


def test_threads_that_openmp_cannot_read_are_found_before_the_start(tmp_path: Path) -> None:
    own = environment(OMP_NUM_THREADS="abc")
    result = forked.run("trimaran", "train", "--run-dir", "run", cwd=tmp_path, env=own)
    assert result.returncode == 2
    assert "H007: OMP_NUM_THREADS is 'abc', which is not a number of threads" in result.stderr
    assert not (tmp_path / "run").exists()
