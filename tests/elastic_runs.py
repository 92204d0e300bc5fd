"""What an elastic run must have computed: each step once, with the samples and the loss of a run that never changed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fault.harness import lines
from tests.parity import TOLERANCE
from trimaran.machine import parse_cluster
from trimaran.models import spec_of
from trimaran.planner import choose
from trimaran.runs import RunDirectory, create_run


def sizes(run: RunDirectory) -> list[int]:
    """Return the number of ranks of each start."""
    return [each["world_size"] for each in lines(run.attempts) if "world_size" in each]


def last_step(run: RunDirectory) -> int:
    found = lines(run.metrics)
    return found[-1]["step"] if found else 0


def remove_pause(run: RunDirectory) -> None:
    """Remove the pause that `tests.chaos.plugin` adds to each step."""
    (run.path / "no-pause").touch()


def assert_as_one_size(run: RunDirectory, path: Path, *, tolerance: float = TOLERANCE) -> None:
    """Fail unless the metrics are those of an undisturbed run at `path`, on this machine, with the planned ranks.

    The same loss of each step means the same samples in it, and the same number of them a constant global batch.
    """
    recipe = run.read_recipe()
    calm = create_run(path, recipe, choose(recipe, spec_of(recipe.model), parse_cluster(recipe.cluster)))
    command = [sys.executable, "-m", "trimaran.launch", str(calm.path), "--no-check"]
    outer = {name: value for name, value in os.environ.items() if not name.startswith("TRIMARAN_TEST_")}
    done = subprocess.run(
        command, env=outer | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    ours, theirs = lines(run.metrics), lines(calm.metrics)
    assert [each["step"] for each in ours] == [*range(1, recipe.train.steps + 1)]
    for name in ("step", "samples", "tokens"):
        assert [each[name] for each in ours] == [each[name] for each in theirs], name
    assert [each["loss"] for each in ours] == pytest.approx([each["loss"] for each in theirs], rel=tolerance)
