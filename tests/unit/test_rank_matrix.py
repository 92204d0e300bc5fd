"""Ranks as a matrix: what is known about each, and a page of a thousand that stays small."""

import json
import time
from pathlib import Path

import pytest

from tests.runs import PREDICTION, new_run, start_ranks, step_metrics
from trimaran.core import Mesh, Plan, parse_recipe
from trimaran.runs import (
    HeartbeatBoard,
    Journal,
    RankTableWriter,
    RunDirectory,
    add_heartbeats,
    append_line,
    create_run,
    read_rank_table,
)
from trimaran.ui import LEVELS, RunFeed, grid_columns, level_of, rank_matrix

NAMES = ("busy_seconds", "data_seconds", "wait_seconds", "peak_bytes", "tokens")


def run_of(path: Path, ranks: int) -> RunDirectory:
    """Return a live run whose samples have the heartbeats of all ranks; rank 3 is late, rank 5 silent."""
    plan = Plan(mesh=Mesh(dp_replicate=ranks), micro_batch=2, prediction=PREDICTION)
    run = create_run(path, parse_recipe("name: toy", name="test", overrides=["train.steps=100"]), plan)
    start_ranks(run, world_size=ranks)
    with Journal(run, 0) as journal:
        for step in range(1, 6):
            journal.step(step_metrics(step, loss=2.0))
    now = time.time() + 100
    for node in range(ranks // 8):
        ages = {str(rank): 80.0 if rank == 5 else 0.5 for rank in range(8 * node, 8 * node + 8)}
        known = {"ram": 1 << 30, "cpu": 1.0, "section": "step", "step": 5, "progress_seconds": 0.1}
        beats = {rank: known | {"heartbeat_seconds": age} for rank, age in ages.items()}
        append_line(run.samples(node), {"time": now, "node": node, "host": f"n{node}", "ranks": beats, "gpus": []})
    rows = [[0.4 + (0.2 if rank == 3 else 0.0), 0.01, 0.05, (rank + 1) << 20, 1024] for rank in range(ranks)]
    RankTableWriter(run.rank_table, seconds=5.0).write(4, NAMES, rows)
    return run


def test_each_rank_has_its_lag_memory_heartbeat_and_state(tmp_path: Path) -> None:
    ranks = RunFeed(run_of(tmp_path / "run", 16)).refresh()["ranks_now"]
    assert ranks["lag_seconds"][3] == pytest.approx(0.2)
    assert ranks["lag_seconds"][4] == 0
    assert ranks["memory_bytes"][7] == 8 << 20
    assert ranks["heartbeat_time"][0] - ranks["heartbeat_time"][5] == pytest.approx(79.5)
    assert [rank for rank, state in enumerate(ranks["state"]) if state == "late"] == [3]
    assert [rank for rank, state in enumerate(ranks["state"]) if state == "silent"] == [5]
    assert (ranks["node"][9], ranks["section"][9], ranks["step"][9]) == (1, "step", 5)
    assert ranks["measured_step"] == 4


def test_the_late_rank_is_named_beside_the_picture(tmp_path: Path) -> None:
    assert "rank 3" in rank_matrix(RunFeed(run_of(tmp_path / "run", 16)).refresh(("ranks",)))


def test_a_cell_has_the_level_of_the_first_limit_it_is_below() -> None:
    limits = (1.0, 2.0, 3.0, 4.0)
    assert [level_of(value, limits) for value in (0.5, 1.0, 3.5, 9.0)] == [LEVELS[0], LEVELS[1], LEVELS[3], LEVELS[4]]
    assert level_of(None, limits) == "level-none"


@pytest.mark.parametrize(
    ("ranks", "per_node", "columns"),
    [(1, 1, 1), (2, 2, 2), (8, 8, 8), (16, 8, 8), (64, 8, 8), (1024, 8, 32), (96, 0, 10)],
)
def test_rows_have_whole_nodes(ranks: int, per_node: int, columns: int) -> None:
    assert grid_columns(ranks, per_node) == columns


def test_a_run_without_samples_and_without_ranks_has_a_matrix_or_none(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    assert RunFeed(run).refresh()["ranks_now"] == {}
    start_ranks(run)
    ranks = RunFeed(run).refresh()["ranks_now"]
    assert ranks["lag_seconds"] == [None, None]
    assert "level-none" not in rank_matrix({"ranks_now": ranks}).split("Last heartbeat")[1]


def test_the_table_of_ranks_is_replaced_now_and_then_and_a_damaged_one_is_none(tmp_path: Path) -> None:
    times = iter([0.0, 1.0, 1.0, 4.0, 7.0, 7.0])
    writer = RankTableWriter(tmp_path / "telemetry" / "ranks.json", seconds=5.0, now=lambda: next(times))
    assert writer.is_due
    writer.write(7, NAMES, [[0.1, 0.0, 0.2, 5, 9], [0.3, 0.0, 0.0, 6, 9]])
    assert not writer.is_due
    assert not writer.is_due
    assert writer.is_due
    path = tmp_path / "telemetry" / "ranks.json"
    table = read_rank_table(path)
    assert table is not None
    assert (table.step, table.measures["busy_seconds"], table.measures["peak_bytes"]) == (7, [0.1, 0.3], [5.0, 6.0])
    for text in ("", "[]", '{"step": 1}', json.dumps({"step": 1, "time": 1.0, "measures": {"a": [1], "b": []}})):
        path.write_text(text)
        assert read_rank_table(path) is None


def test_a_sample_has_the_heartbeats_of_its_ranks() -> None:
    board = HeartbeatBoard.make(2)
    board.first_rank = 8
    board.clear()
    board.enter(1, "save", 12)
    ranks: dict[str, dict[str, object]] = {"8": {"ram": 5}, "9": {"ram": 6}, "7": {"ram": 7}}
    add_heartbeats(ranks, HeartbeatBoard(board.fd))
    assert (ranks["9"]["section"], ranks["9"]["step"], ranks["9"]["ram"]) == ("save", 12, 6)
    assert ranks["8"]["section"] == "start"
    assert 0 <= float(str(ranks["9"]["heartbeat_seconds"])) < 60
    assert ranks["7"] == {"ram": 7}  # of another node
