"""Shared by the tests of this folder: runs with 50 ms steps, the same runs without faults, and time limits."""

import os
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from tests.fault.harness import Supervised, lines, wait_for
from tests.ranks import run_ranks
from trimaran.core import EXIT_DONE
from trimaran.data import cache_folder
from trimaran.runs import RunDirectory, create_run
from trimaran.train import read_rank_info, run_worker

PLUGIN = {"TRIMARAN_TEST_PLUGIN": "tests.chaos.plugin"}
PAUSE = 0.05
DETECT_SECONDS, RECOVER_SECONDS = 1.0, 6.0  # of a dead process
NAME_SECONDS, RESUME_SECONDS = 10.0, 20.0  # of a hung process


def start_run(path: Path, *settings: str, ranks: int = 2, pause: float = PAUSE, **extra: str) -> Supervised:
    """Start a run with the faults of `plugin`; `extra` are its settings, such as `disk_seconds`."""
    settings_of_plugin = {f"TRIMARAN_TEST_{name.upper()}": value for name, value in extra.items()}
    return Supervised.start(path, *settings, ranks=ranks, pause=pause, extra=PLUGIN | settings_of_plugin)


def resume_run(run: RunDirectory, *, pause: float = PAUSE, **extra: str) -> Supervised:
    """Start another supervisor for an existing run."""
    settings_of_plugin = {f"TRIMARAN_TEST_{name.upper()}": value for name, value in extra.items()}
    return Supervised.again(run, pause=pause, extra=PLUGIN | settings_of_plugin)


def inject_fault(supervised: Supervised, rank: int, fault: str) -> None:
    """Have `rank` run into `fault` at its next step."""
    file = supervised.run.path / f"fault-{rank}"
    file.with_suffix(".draft").write_text(fault)
    file.with_suffix(".draft").rename(file)


def remove_pause(supervised: Supervised) -> None:
    """Remove the pause that is added to every step."""
    supervised.remove_pause()


def kill_supervisor(supervised: Supervised) -> None:
    """Kill the supervisor, and wait until all its processes are gone, and with them the copies in memory."""
    left = supervised.processes()
    supervised.process.kill()
    supervised.process.wait()
    wait_for(lambda: not any(each.is_running() and each.status() != "zombie" for each in left), 5)


def resumes(run: RunDirectory) -> list[dict[str, Any]]:
    """Return what every start but the first resumed from: tier, from_step, refused."""
    return [each["data"] for each in lines(run.events(0)) if each["kind"] == "resume"]


def first_time_after(supervised: Supervised, step: int) -> float:
    """Return when the metrics of the first step after `step` were written, one step after it was done."""
    return wait_for(lambda: next((each["time"] for each in lines(supervised.run.metrics) if each["step"] > step), None))


def assert_as_undisturbed(run: RunDirectory, path: Path) -> None:
    """Fail unless the final weights of `run` are bit for bit those of a run without faults."""
    plan = run.read_plan()
    calm = create_run(path, run.read_recipe(), plan)
    ranks = plan.mesh.world_size
    assert run_ranks(ranks, _train_undisturbed, calm.path) == [EXIT_DONE] * ranks
    ours, theirs = (load_file(each.model / "model.safetensors") for each in (run, calm))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if (ours[name] != theirs[name]).any()] == []


def _train_undisturbed(path: Path) -> int:
    return run_worker(RunDirectory(path), read_rank_info(os.environ), cache=cache_folder(os.environ))
