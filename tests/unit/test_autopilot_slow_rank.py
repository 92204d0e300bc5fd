"""What the autopilot proposes about a slow rank: other rows, or to go on without its node."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_doctor_speed import predicted_run, recorded
from trimaran.autopilot import (
    SLOW_RANKS,
    SLOW_RATIO,
    deal_by_speed,
    rows_by_speed,
    settings_of,
    with_recovered_node,
    without_slow_node,
)
from trimaran.core import Decision, FaultsSection, Plan, Recipe
from trimaran.doctor import Evidence, predicted_gain, step_breakdown, with_measured_links
from trimaran.runs import (
    LEFT_OUT_FIELD,
    MAX_KEPT,
    add_speed,
    create_run,
    has_recovered,
    read_left_out,
    read_node_speeds,
    write_left_out,
    write_node_speeds,
)


def settings(evidence: Evidence) -> dict[str, Any]:
    return settings_of(evidence.plan, evidence.recipe) | {LEFT_OUT_FIELD: []}


@pytest.mark.parametrize(
    ("total", "ranks", "slow", "slowdown", "rows"),
    [
        (8, 2, 1, 3.0, [6, 2]),
        (8, 2, 0, 1.6, [3, 5]),
        (8, 2, 1, 1.0, [4, 4]),
        (8, 2, 1, 100.0, [7, 1]),
        (12, 3, 1, 2.0, [5, 2, 5]),
        (2, 2, 0, 9.0, [1, 1]),
    ],
)
def test_rows_are_dealt_so_that_the_last_rank_is_done_first(
    total: int, ranks: int, slow: int, slowdown: float, rows: list[int]
) -> None:
    assert deal_by_speed(total, ranks, slow, slowdown) == rows


def test_a_slow_rank_gets_fewer_rows_and_the_global_batch_stays() -> None:
    evidence = recorded("throttled-rank")
    (found,) = rows_by_speed(evidence, settings(evidence))
    rows = found.patch["plan.micro_batches"]
    assert sum(rows) == evidence.plan.micro_batch * evidence.plan.mesh.dp
    assert rows[1] < rows[0], "rank 1 is slow"
    assert found.undo == {"plan.micro_batches": []}
    assert 0.05 < found.gain < 1
    assert "rank 1 computes" in found.reason


def test_rows_are_equal_again_when_the_rank_has_recovered() -> None:
    evidence = recorded("throttled-rank")
    rows = (3, 1, 3, 3)
    plan = evidence.plan.model_copy(update={"micro_batches": rows})

    def with_busy(least: float) -> Evidence:
        busy = {"busy_seconds": {"min": least, "median": 0.3, "max": 0.3, "at": 0}}
        return replace(evidence, plan=plan, steps=tuple(each | {"ranks": busy} for each in evidence.steps))

    recovered = with_busy(0.1)
    (found,) = rows_by_speed(recovered, settings(recovered))
    assert found.patch == {"plan.micro_batches": []}
    assert found.undo == {"plan.micro_batches": [*rows]}
    assert found.is_measured, "it may take back a change that was kept"
    still_slow = with_busy(0.29)
    assert rows_by_speed(still_slow, settings(still_slow)) == []


def on_nodes(evidence: Evidence) -> Evidence:
    """Return the evidence of a run of which each rank is on a node of its own, and which may have fewer ranks."""
    faults = FaultsSection(ranks=(1, evidence.plan.mesh.world_size))
    start = {"kind": "start", "attempt": 0}
    hosts = [start | {"rank": rank, "data": {"host": f"node{rank}"}} for rank in range(evidence.plan.mesh.world_size)]
    return replace(evidence, recipe=evidence.recipe.model_copy(update={"faults": faults}), events=tuple(hosts))


def slower(evidence: Evidence, times: float) -> Evidence:
    """Return the evidence with all of the slowest rank's own times longer, and as much more waiting."""

    def changed(step: dict[str, Any]) -> dict[str, Any]:
        ranks, waits, more = dict(step.get("ranks", {})), dict(step.get("waits", {})), 0.0
        for name in ("forward_seconds", "busy_seconds"):
            if name in ranks:
                more = (times - 1) * ranks[name]["max"]
                ranks[name] = ranks[name] | {"max": times * ranks[name]["max"]}
        waits["straggler"] = waits.get("straggler", 0.0) + more
        phases = step["phases"] | {"comm": step["phases"]["comm"] + more}
        return step | {"ranks": ranks, "waits": waits, "phases": phases, "step_seconds": step["step_seconds"] + more}

    return replace(evidence, steps=tuple(changed(each) for each in evidence.steps))


def test_a_node_is_left_out_only_if_it_is_so_slow_that_the_others_are_faster_without_it() -> None:
    evidence = on_nodes(recorded("throttled-rank"))
    assert without_slow_node(evidence, settings(evidence), instead=rows_by_speed(evidence, settings(evidence))) == []
    stuck = slower(evidence, 8.0)
    (found,) = without_slow_node(stuck, settings(stuck))
    assert found.patch == {LEFT_OUT_FIELD: ["node1"]}
    assert found.undo == {LEFT_OUT_FIELD: []}
    assert 0.3 < found.gain < 1
    fixed = replace(stuck, recipe=stuck.recipe.model_copy(update={"faults": FaultsSection()}))
    assert without_slow_node(fixed, settings(fixed)) == [], "the recipe has a fixed number of ranks"
    together = replace(stuck, events=tuple(each | {"data": {"host": "node0"}} for each in stuck.events))
    assert without_slow_node(together, settings(together)) == [], "nobody would be left"


def test_the_nodes_to_leave_out_are_a_file_of_the_run(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", Recipe(), Plan())
    assert read_left_out(run) == frozenset()
    write_left_out(run, ["b", "a"], reason="slow")
    assert read_left_out(run) == {"a", "b"}
    run.left_out_nodes.write_text("{")
    assert read_left_out(run) == frozenset()
    write_left_out(run, [])
    assert not run.left_out_nodes.exists()


def leaving(host: str, *, ratio: float = 8.0) -> Decision:
    return Decision(
        id=1,
        time=0.0,
        step=40,
        finding="F005",
        reason="slow",
        patch={LEFT_OUT_FIELD: [host]},
        undo={LEFT_OUT_FIELD: []},
        outcome="kept",
        baseline={"step_seconds": 1.0, SLOW_RATIO: ratio, SLOW_RANKS: 1},
    )


def three_of_four() -> tuple[Evidence, dict[str, Any]]:
    """Return the evidence of a run of four ranks that goes on with three of them, and its settings."""
    evidence = on_nodes(recorded("throttled-rank"))
    mesh = evidence.plan.mesh.model_copy(update={"dp_replicate": 3, "dp_shard": 1})
    now = replace(evidence, plan=evidence.plan.model_copy(update={"mesh": mesh, "micro_batch": 1}))
    assert now.plan.mesh.world_size == 3
    return now, settings(now) | {LEFT_OUT_FIELD: ["node1"]}


def test_a_node_is_taken_back_only_if_it_is_clearly_faster_than_when_it_was_left_out() -> None:
    evidence, now = three_of_four()
    fast, cause = {"node1": (1.0, 1.0, 8.0, 8.1)}, leaving("node1")
    (found,) = with_recovered_node(evidence, now, decisions=[cause], speeds=fast)
    assert found.patch == {LEFT_OUT_FIELD: []}
    assert found.undo == {LEFT_OUT_FIELD: ["node1"]}
    assert found.gain > 0.05
    assert found.is_measured, "it may take back a decision that was kept"
    for speeds in ((1.0,), (1.0, 8.0), (1.0, 1.1, 8.0), (1.0, 8.0, 1.0)):
        assert with_recovered_node(evidence, now, decisions=[cause], speeds={"node1": speeds}) == [], speeds
    half = with_recovered_node(evidence, now, decisions=[cause], speeds={"node1": (1.0, 2.0, 2.0)})
    assert half == [], "four times as slow as the others is still too slow"
    assert with_recovered_node(evidence, now, decisions=[], speeds=fast) == [], "a person left it out"


def test_the_first_speed_of_a_node_is_kept(tmp_path: Path) -> None:
    speeds: tuple[float, ...] = ()
    for number in range(1, 100):
        speeds = add_speed(speeds, float(number))
    assert speeds == (1.0, *map(float, range(101 - MAX_KEPT, 100)))
    assert has_recovered(speeds)
    run = create_run(tmp_path / "run", Recipe(), Plan())
    assert read_node_speeds(run) == {}
    write_node_speeds(run, {"a": speeds})
    assert read_node_speeds(run) == {"a": speeds}
    for damaged in ("{", '{"hosts": 3}', '{"hosts": {"a": [0]}}', '{"hosts": {"a": ["x"]}}'):
        run.node_speeds.write_text(damaged)
        assert read_node_speeds(run) == {}


def test_of_a_slow_network_only_the_link_between_nodes_is_slowed_down() -> None:
    sets = ("model.preset=llama-3.2-1b", "cluster=2x8xH100", "data.seq_len=2048", "train.global_batch=64",
            "plan={mesh: {dp_shard: 8, dp_replicate: 2}}")  # fmt: skip
    evidence = predicted_run(*sets, slower={"comm": 20.0}, waits={"comm": 0.0, "straggler": 0.0})
    question, measured = evidence.planner_inputs(), step_breakdown(evidence)
    assert question is not None
    assert measured is not None
    links = with_measured_links(question, evidence.plan, measured).cluster.levels
    before = question.cluster.levels
    assert [each.bandwidth for each in links[:-1]] == [each.bandwidth for each in before[:-1]]
    assert links[-1].bandwidth < before[-1].bandwidth
    assert predicted_gain(evidence, measured, {"plan.comm.compression": "bf16"}) is not None
