"""The doctor on a run in a container with too little memory, on a machine with swap space: F071."""

import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import pytest

from tests.diagnosed_runs import findings, in_container
from tests.fault.harness import Supervised, lines
from trimaran.core import EXIT_DONE
from trimaran.doctor import patch_settings
from trimaran.runs import RunDirectory

MEMORY = Path("/sys/fs/cgroup/memory")  # cgroup v1 counts memory and swap separately
MIB = 2**20
# A state of 200 MiB, of which a rank holds three copies.
LARGE = (
    "model.shape={layers: 5, hidden: 512, heads: 8, kv_heads: 8, ffn: 2048}",
    "train.global_batch=1",
    "train.steps=13",
    "train.save=false",
    "checkpoint.every=0",
    "data.workers=0",
    "telemetry.sample_seconds=0.3",
)


@contextmanager
def swapping(place: Path, *, mib: int) -> Iterator[None]:
    """Make the machine swap to a file; skip the test if it cannot."""
    subprocess.run(["fallocate", "-l", f"{mib}M", place], check=True)
    place.chmod(0o600)
    subprocess.run(["mkswap", "-q", place], check=True)
    done = subprocess.run(["swapon", place], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"no swap space may be had here: {done.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["swapoff", place], check=True)
        place.unlink()


@contextmanager
def container(*, mib: int) -> Iterator[Path]:
    """Create a memory cgroup of that size."""
    cgroup = MEMORY / f"trimaran-test-{os.getpid()}"
    cgroup.mkdir()
    try:
        (cgroup / "memory.limit_in_bytes").write_text(str(mib * MIB))
        yield cgroup
    finally:
        cgroup.rmdir()


def train_supervised(path: Path, *settings: str) -> RunDirectory:
    with Supervised.start(path, *LARGE, *settings, ranks=1) as supervised:
        assert supervised.wait(120) == EXIT_DONE
    return supervised.run


def step_seconds(run: RunDirectory) -> float:
    return median(each["step_seconds"] for each in lines(run.metrics)[5:])


@pytest.mark.chaos
@pytest.mark.skipif(
    os.geteuid() != 0 or not (MEMORY / "memory.limit_in_bytes").exists(), reason="needs root and cgroup v1"
)
def test_a_swapping_container_is_found_and_no_in_memory_checkpoints_help(tmp_path: Path) -> None:
    with swapping(tmp_path / "swap", mib=2048), container(mib=1056) as cgroup:
        full = in_container(cgroup, train_supervised, tmp_path / "full", "checkpoint.memory=1")
        found = findings(full)["F071"]
        assert found.culprit == platform.node()
        assert found.patch == {"checkpoint.memory": 0}
        assert found.evidence["ram"] == 1056 * MIB, "the container's, not the machine's"
        lean = in_container(cgroup, train_supervised, tmp_path / "lean", *patch_settings(found.patch))
    assert "F071" not in findings(lean)
    assert step_seconds(lean) < 0.5 * step_seconds(full)
