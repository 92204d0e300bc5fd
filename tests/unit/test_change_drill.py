"""Ranks that a drill kills in a change of the plan, and the answer to a change that was made before."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.runs import new_run
from trimaran.app import parse_kill_in_change
from trimaran.core import Mesh, Plan, Recipe, UserError
from trimaran.runs import (
    Journal,
    RunDirectory,
    change_answers,
    create_run,
    reach_phase,
    replace_plan,
    request_kill,
    write_change_request,
)
from trimaran.train import ChangeFile


def death(run: RunDirectory, rank: int, *phases: Any) -> int | None:
    """Return the signal that a process dies of which reaches `phases` as `rank`; None if it survives."""
    pid = os.fork()
    if pid == 0:
        for phase in phases:
            reach_phase(run, rank, phase)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else None


def test_a_rank_dies_only_at_the_phase_that_a_drill_asks_for_and_only_once(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    assert death(run, 1, "copy", "hand-over") is None
    request_kill(run, 1, "hand-over")
    assert death(run, 0, "copy", "hand-over") is None
    assert death(run, 1, "copy", "build") is None
    assert death(run, 1, "copy", "hand-over") == signal.SIGKILL
    assert death(run, 1, "copy", "hand-over") is None
    run.kill_request.write_text("[no JSON")
    assert death(run, 1, "hand-over") is None


def test_the_option_names_a_rank_and_a_phase() -> None:
    assert parse_kill_in_change("1=release").title == "kill-in-change 1=release"
    for text in ("1", "1=", "1=never", "x=copy", "-1=copy"):
        with pytest.raises(UserError, match="A001"):
            parse_kill_in_change(text)


@pytest.mark.parametrize(
    ("patch", "is_written", "status"),
    [
        ({"plan.mesh.dp_replicate": 1, "plan.mesh.dp_shard": 2}, False, "failed"),
        ({"plan.mesh.dp_replicate": 1, "plan.mesh.dp_shard": 2, "data.workers": 1}, True, "applied"),
        ({"data.workers": 1}, False, "failed"),
        ({"plan.precision": "bf16"}, False, "failed"),
    ],
)
def test_ranks_that_start_again_answer_a_change_by_the_plan_that_they_have(
    tmp_path: Path, patch: dict[str, Any], is_written: bool, status: str
) -> None:
    recipe = Recipe.model_validate({"model": {"preset": "tiny"}, "train": {"global_batch": 8}, "cluster": "2xcpu"})
    run = create_run(tmp_path / "run", recipe, Plan(mesh=Mesh(dp_replicate=2), micro_batch=4))
    write_change_request(run, patch)
    if is_written:  # the ranks died between the plan and the recipe
        replace_plan(run, Plan(mesh=Mesh(dp_shard=2), sharding="parameters", micro_batch=4))
    with Journal(run, 0) as journal:
        ChangeFile(run, journal, os.environ).drop("the ranks were started again before this change was made")
    (answer,) = change_answers(run)
    assert answer["data"]["status"] == status
    assert run.read_recipe().data.workers == (1 if is_written else recipe.data.workers)
    assert not run.change_request.exists()
