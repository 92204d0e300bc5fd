"""The doctor against a run whose container is too small for it, on a machine with swap space: F071."""

import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import pytest

from tests.doctoring import findings, in_container
from tests.fault.harness import Supervised, lines
from trimaran.core import EXIT_DONE, Mesh, Plan, parse_recipe
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.predicted_gain import settings_of
from trimaran.doctor.rules.health.swap import swap
from trimaran.run import RunDirectory

MEMORY = Path("/sys/fs/cgroup/memory")  # of cgroup v1, which counts memory and swap apart
MIB = 2**20
# A state of 200 MiB that a rank keeps three copies of.
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
    """Let the machine swap to a file; skips where it will not."""
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
    """Make a memory cgroup of that size."""
    cgroup = MEMORY / f"trimaran-test-{os.getpid()}"
    cgroup.mkdir()
    try:
        (cgroup / "memory.limit_in_bytes").write_text(str(mib * MIB))
        yield cgroup
    finally:
        cgroup.rmdir()


def supervised(path: Path, *settings: str) -> RunDirectory:
    with Supervised.start(path, *LARGE, *settings, ranks=1) as sailing:
        assert sailing.wait(120) == EXIT_DONE
    return sailing.run


def step_seconds(run: RunDirectory) -> float:
    return median(each["step_seconds"] for each in lines(run.metrics)[5:])


@pytest.mark.chaos
@pytest.mark.skipif(
    os.geteuid() != 0 or not (MEMORY / "memory.limit_in_bytes").exists(), reason="needs root and cgroup v1"
)
def test_a_container_that_swaps_is_found_and_without_copies_in_memory_it_does_not(tmp_path: Path) -> None:
    with swapping(tmp_path / "swap", mib=2048), container(mib=1056) as cgroup:
        full = in_container(cgroup, supervised, tmp_path / "full", "checkpoint.memory=1")
        found = findings(full)["F071"]
        assert found.culprit == platform.node()
        assert found.patch == {"checkpoint.memory": 0}
        assert found.evidence["ram"] == 1056 * MIB, "the container's, not the machine's"
        lean = in_container(cgroup, supervised, tmp_path / "lean", *settings_of(found.patch))
    assert "F071" not in findings(lean)
    assert step_seconds(lean) < 0.5 * step_seconds(full)


def sampled(**keys: float) -> Evidence:
    """Return the evidence of a machine whose memory is full, and of which ten samples say this besides."""
    recipe = parse_recipe("", name="test", overrides=["cluster=1xcpu"])
    full = {"node": 0, "host": "a", "ram": 64 << 30, "ram_used": 61 << 30, "swap_used": 3 << 30}
    samples = tuple(full | {"time": 5.0 * number} | keys for number in range(10))
    return Evidence(recipe=recipe, plan=Plan(mesh=Mesh(), micro_batch=1), samples=samples)


def test_what_goes_to_and_fro_is_counted_and_what_only_lies_there_is_not() -> None:
    (found,) = swap(sampled(swap_read=20 * MIB, swap_written=20 * MIB))
    assert found.evidence["moved"] == pytest.approx(9 * 5 * 40 * MIB)
    assert not list(swap(sampled(swap_read=0, swap_written=0)))
    assert not list(swap(sampled(swap_read=20 * MIB, swap_written=20 * MIB, ram_used=20 << 30)))
