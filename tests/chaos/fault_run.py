"""What the tests of this folder share: runs with 50 ms steps, their undisturbed twins, and the goals."""

import os
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from tests.fault.harness import Supervised, lines, wait_for
from tests.ranks import run_ranks
from trimaran.core import EXIT_DONE
from trimaran.data import cache_folder
from trimaran.run import RunDirectory, create_run
from trimaran.train.process.rank_info import read_rank_info
from trimaran.train.worker import run_worker

PLUGIN = {"TRIMARAN_TEST_PLUGIN": "tests.chaos.plugin"}
PAUSE = 0.05
DETECT_SECONDS, RECOVER_SECONDS = 1.0, 6.0  # of a dead process; the goals are those of the research, 1.2
NAME_SECONDS, RESUME_SECONDS = 10.0, 20.0  # of one that stands still


def sail(path: Path, *settings: str, ranks: int = 2, pause: float = PAUSE, **extra: str) -> Supervised:
    """Start a run that breaks as `plugin` says; `extra` are settings of the plugin, such as `disk_seconds`."""
    told = {f"TRIMARAN_TEST_{name.upper()}": value for name, value in extra.items()}
    return Supervised.start(path, *settings, ranks=ranks, pause=pause, extra=PLUGIN | told)


def sail_on(run: RunDirectory, *, pause: float = PAUSE, **extra: str) -> Supervised:
    """Start another supervisor for a run whose first one is gone."""
    told = {f"TRIMARAN_TEST_{name.upper()}": value for name, value in extra.items()}
    return Supervised.again(run, pause=pause, extra=PLUGIN | told)


def order(sailing: Supervised, rank: int, fault: str) -> None:
    """Have `rank` break by itself at its next step."""
    letter = sailing.run.path / f"strike-{rank}"
    letter.with_suffix(".draft").write_text(fault)
    letter.with_suffix(".draft").rename(letter)


def hurry(sailing: Supervised) -> None:
    """From now on steps take no longer than they must."""
    (sailing.run.path / "hurry").touch()


def lose(sailing: Supervised) -> None:
    """Kill the supervisor, and see that it takes everything with it: what was in memory is gone."""
    left = sailing.processes()
    sailing.process.kill()
    sailing.process.wait()
    wait_for(lambda: not any(each.is_running() and each.status() != "zombie" for each in left), 5)


def resumes(run: RunDirectory) -> list[dict[str, Any]]:
    """Return what every start but the first has found to go on from: tier, from_step, refused."""
    return [each["data"] for each in lines(run.events(0)) if each["kind"] == "resume"]


def first_time_after(sailing: Supervised, step: int) -> float:
    """Return when the first step after `step` was written down, which is one step after it was done."""
    return wait_for(lambda: next((each["time"] for each in lines(sailing.run.metrics) if each["step"] > step), None))


def assert_as_undisturbed(run: RunDirectory, path: Path) -> None:
    """Fail unless the weights that `run` ended with are, bit by bit, those of a run in which nothing happened."""
    plan = run.read_plan()
    calm = create_run(path, run.read_recipe(), plan)
    ranks = plan.mesh.world_size
    assert run_ranks(ranks, _sail_undisturbed, calm.path) == [EXIT_DONE] * ranks
    ours, theirs = (load_file(each.model / "model.safetensors") for each in (run, calm))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if (ours[name] != theirs[name]).any()] == []


def _sail_undisturbed(path: Path) -> int:
    return run_worker(RunDirectory(path), read_rank_info(os.environ), cache=cache_folder(os.environ))
