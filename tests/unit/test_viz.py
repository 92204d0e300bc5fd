"""Views: their numbers are those of the cost model, of torch, or of arithmetic that anybody can check."""

import dataclasses
import html
import json
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from trimaran.app import main
from trimaran.core import Mesh, Pipeline
from trimaran.cost import all_reduce_seconds, pipeline_order, ring_of, simulate_step
from trimaran.parallel import build_mesh
from trimaran.runs import create_run
from trimaran.ui import (
    OPERATIONS,
    ORDER,
    SCHEDULES,
    SHORT_NAMES,
    VIEWS,
    Bars,
    RunMedians,
    Subject,
    Table,
    Timeline,
    backward_blocks,
    build_view,
    bytes_of,
    collective_steps,
    equal_stages,
    exposed_seconds,
    gathered_blocks,
    gathered_bytes,
    groups_of,
    least_ranks,
    most_held,
    read_subject,
    reduce_in_buckets,
    reduced_at,
    sent_bytes,
    shard_step,
    slowed,
    view_as_dict,
    view_page,
    waited_seconds,
    with_slow_rank,
)

GB = 1e9


@cache  # it is searched for, and no test changes it
def subject_of(*settings: str, plan: str = "llama-3.1-8b", cluster: str = "2x8xH100", **controls: str) -> Subject:
    return read_subject(plan, None, cluster, settings, [f"{name}={value}" for name, value in controls.items()])


@pytest.fixture(scope="module")
def example() -> Subject:
    return read_subject(None, None, None, (), ())


def figures(view: Any, mode: str, kind: type) -> list[Any]:
    return [each for each in view.modes[mode].figures if isinstance(each, kind)]


@pytest.mark.parametrize("name", ["need", "pipeline", "mesh"])
def test_a_view_is_json_and_one_page_that_fetches_nothing(example: Subject, name: str) -> None:
    view = build_view(name, example)
    assert VIEWS[view.name] is SHORT_NAMES[name]
    tree = json.loads(json.dumps(view_as_dict(view)))
    assert all(figure["kind"] and figure["title"] for mode in tree["modes"].values() for figure in mode["figures"])
    page = html.unescape(view_page(view))
    assert "default-src 'none'" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page


@pytest.mark.parametrize("settings", [(), ("plan.precision=fp32", "plan.micro_batch=2")])
def test_the_bars_of_memory_are_the_cost_models_terms(settings: Sequence[str]) -> None:
    subject = subject_of(*settings)
    view = build_view("need", subject)
    prediction = subject.prediction
    (bars,) = figures(view, "simulate", Bars)
    at = bars.categories.index("with the plan")
    assert {each.name: each.values[at] for each in bars.series if each.values[at]} == {
        name: float(size) for name, size in prediction.memory.items() if size
    }
    assert sum(each.values[at] for each in bars.series) == pytest.approx(prediction.peak_bytes)
    formulas = view.modes["explain"].formulas
    assert formulas[-1].value == pytest.approx(sum(each.value for each in formulas[:-1]))


def test_zero_of_7b_on_four_ranks_has_the_right_arithmetic() -> None:
    totals = [sum(bytes_of(stage, 7e9, 4)) / GB for stage in range(4)]
    assert totals == pytest.approx([112.0, 49.0, 38.5, 28.0])
    assert sent_bytes(0, 7e9, 4) == sent_bytes(2, 7e9, 4) == pytest.approx(2 * 14 * GB * 3 / 4)
    assert sent_bytes(3, 7e9, 4) == pytest.approx(1.5 * sent_bytes(1, 7e9, 4))


def test_zero_stages_in_our_trainer_need_less_and_less() -> None:
    subject = subject_of("plan.mesh.dp_shard=8", "plan.sharding=optimizer", cluster="8xH100")
    (memory, seconds) = figures(build_view("zero", subject), "simulate", Bars)
    totals = [sum(each.values[at] for each in memory.series) for at in range(4)]
    assert totals == sorted(totals, reverse=True)
    assert totals[1] == pytest.approx(subject.prediction.peak_bytes)
    assert sum(each.values[1] for each in seconds.series) == pytest.approx(subject.prediction.step_seconds)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_collectives_end_with_the_right_values_and_send_as_much_as_they_say(operation: str, ranks: int) -> None:
    everyone = frozenset(range(ranks))
    algorithms = {"all-reduce": ("ring", "tree", "hierarchical"), "broadcast": ("ring", "tree")}.get(
        operation, ("ring",)
    )
    for algorithm in algorithms:
        steps = collective_steps(operation, algorithm, ranks)
        held = steps[-1].held
        for rank, row in enumerate(held):
            for chunk, parts in enumerate(row):
                if operation == "all-reduce":
                    assert parts == everyone
                elif operation == "all-gather":
                    assert parts == {chunk}
                elif operation == "broadcast":
                    assert parts == {0}
                elif chunk == rank:
                    assert parts == everyone
        for step in steps[1:]:
            assert len({(target, chunk) for _, target, chunk in step.sends}) == len(step.sends)
    ring = collective_steps(operation, "ring", ranks)
    sent = sum(source == 0 for step in ring for source, _, _ in step.sends) / ranks
    assert sent == pytest.approx(
        {"all-reduce": 2 * (ranks - 1) / ranks, "broadcast": 1}.get(operation, (ranks - 1) / ranks)
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pipeline_is_drawn_in_the_order_that_the_trainer_executes(schedule: Any) -> None:
    subject = subject_of(schedule=schedule, ranks="4", micro_batches="8")
    view = build_view("pipeline", subject)
    (timeline,) = figures(view, "explain", Timeline)
    order = pipeline_order(schedule, ranks=4, num_stages=4 * (1 + (schedule in ("interleaved", "zero-bubble"))),
                           micro_batches=8)  # fmt: skip
    for rank, passes in enumerate(order.passes):
        drawn = sorted((each for each in timeline.spans if each.row == rank), key=lambda each: (each.start, each.end))
        assert [(each.kind, int(each.label)) for each in drawn] == [(each.kind, each.micro_batch) for each in passes]
    if schedule in ("gpipe", "1f1b"):
        (bubble,) = view.modes["explain"].formulas
        assert bubble.value == pytest.approx(simulate_step(equal_stages(schedule, 4, 8, 2.0)).bubble)
        assert bubble.value == pytest.approx(3 / 11)
    assert most_held(order)[0] == {"gpipe": 8, "1f1b": 4}.get(schedule, most_held(order)[0])


def test_buckets_are_reduced_in_turn_and_carry_every_gradient() -> None:
    subject = subject_of("plan.mesh.dp_replicate=8", plan="llama-3.2-1b", cluster="8xH100")
    blocks = backward_blocks(subject)
    ring = ring_of(subject.cluster.levels, 8, 1)
    gradients = 4 * subject.job.outline.num_parameters
    for size in (1e6, 25e6, 1e12):
        buckets = reduce_in_buckets(blocks, size, ring)
        assert sum(each.num_bytes for each in buckets) == pytest.approx(gradients, rel=0.01)
        assert all(before.end <= after.start for before, after in pairwise(buckets))
        assert all(each.start >= each.ready for each in buckets)
        assert reduced_at(blocks, size, ring) == pytest.approx(buckets[-1].end)
    (whole,) = reduce_in_buckets(blocks, 1e12, ring)
    assert exposed_seconds(blocks, [whole]) == pytest.approx(float(all_reduce_seconds(whole.num_bytes, ring)))
    assert exposed_seconds(blocks, reduce_in_buckets(blocks, 25e6, ring)) < exposed_seconds(blocks, [whole])


@pytest.mark.parametrize("reshards", [True, False])
def test_sharded_weights_are_gathered_before_their_pass_and_as_often_as_the_formula_says(reshards: bool) -> None:
    subject = subject_of("plan.mesh.dp_shard=8", "plan.sharding=parameters", cluster="8xH100")
    units, ring = gathered_blocks(subject), ring_of(subject.cluster.levels, 8, 1)
    works = shard_step(units, ring, prefetch=1, reshards=reshards)
    moved = sum(units[each.unit].weight_bytes for each in works if each.kind == "gather") * 7 / 8
    assert moved == pytest.approx(gathered_bytes(units, 8, reshards=reshards))
    weights = {(each.kind, each.unit): each for each in works if each.kind != "gather"}
    first_gathers = {each.unit: each for each in reversed(works) if each.kind == "gather"}
    for number in range(len(units)):
        assert weights["forward", number].start >= first_gathers[number].end
        assert weights["reduce", number].start >= weights["backward", number].end
    waits = [waited_seconds(shard_step(units, ring, prefetch=each, reshards=reshards)) for each in (1, 2, 4)]
    assert waits == sorted(waits, reverse=True)


def test_offload_is_priced_as_the_planner_prices_it() -> None:
    subject = subject_of("plan.offload=optimizer", cluster="8xH100")
    seconds = figures(build_view("offload", subject), "simulate", Bars)[0]
    at = seconds.categories.index("optimizer")
    assert sum(each.values[at] for each in seconds.series) == pytest.approx(subject.prediction.step_seconds)


@pytest.mark.parametrize("mesh", [Mesh(dp_shard=8, pp=4, tp=2), Mesh(dp_replicate=2, dp_shard=2, cp=2, tp=2)])
def test_groups_are_those_of_the_device_mesh(mesh: Mesh) -> None:
    for rank in (0, mesh.world_size - 1):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=mesh.world_size)
        try:
            axes = build_mesh(mesh, device_type="cpu").axes
            for axis in ORDER:
                members = dist.get_process_group_ranks(axes.get_group(axis))
                assert members in groups_of(mesh, axis)
        finally:
            dist.destroy_process_group()


def test_a_split_that_does_not_divide_is_named() -> None:
    view = build_view("tensor", subject_of(tp="3"))
    assert any("32 heads do not divide by 3" in each for each in view.modes["explain"].sentences)
    view = build_view("tensor", subject_of(tp="4"))
    (table,) = figures(view, "explain", Table)
    rows = {row[1]: row[2:] for row in table.rows}
    assert rows["q_proj"][:3] == ("4,096 x 4,096", "columns", "4,096 x 1,024")
    assert rows["down_proj"] == ("14,336 x 4,096", "rows", "3,584 x 4,096", "a reduction over the ranks")
    assert rows["lm_head"][:3] == ("4,096 x 128,256", "columns", "4,096 x 32,064")


def test_strategies_name_the_planners_choice_and_each_plan_once(example: Subject) -> None:
    (table,) = figures(build_view("strategies", example), "simulate", Table)
    assert [row[0] for row in table.rows if row[-1] == "chosen"] == [str(example.plan)]
    assert len({row[0] for row in table.rows}) == len(table.rows)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["nothing"], "V001"),
        (["zero", "--with", "ranks=many"], "V002"),
        (["zero", "--with", "ranks=0"], "V002"),
        (["pipeline", "--with", "schedule=fast"], "V002"),
        (["zero", "--with", "ranks"], "V002"),
        (["zero", "--with", "color=red"], "V003"),
        (["zero", "--plan", "tiny", "--run", "x"], "V004"),
        (["zero", "tiny", "--plan", "tiny"], "V004"),
        (["zero", "--run", "no-such-run"], "D001"),
        (["zero", "--html", "/no/such/folder/page.html"], "A020"),
        (["zero", "--html", "README.md"], "A020"),
    ],
)
def test_mistakes_are_named(options: list[str], code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["viz", *options, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == code


def test_a_page_is_written_and_the_terminal_shows_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "need.html"
    assert main(["viz", "need", "llama-3.1-8b", "--cluster", "8xH100", "--html", str(page)]) == 0
    assert "Does it fit?" in page.read_text()
    capsys.readouterr()
    assert main(["viz", "need"]) == 0
    assert "Does it fit?" in capsys.readouterr().out
    assert main(["viz", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {short: module.NAME for short, module in SHORT_NAMES.items()}


def test_what_a_run_measured_stands_beside_the_prediction(example: Subject) -> None:
    run = RunMedians(name="x", steps=40, step_seconds=1.0, peak_bytes=float(example.prediction.peak_bytes) * 2)
    live = build_view("need", dataclasses.replace(example, run=run)).modes["live"]
    assert "off by -50.0%" in live.sentences[0]


def test_a_pipeline_is_drawn_with_the_stages_that_a_run_measured() -> None:
    subject = subject_of("plan.mesh.pp=2", "plan.mesh.dp_shard=4", cluster="8xH100")
    layers = subject.job.outline.main.layers
    times = RunMedians(name="x", steps=9, step_seconds=1.0, peak_bytes=1.0, stage_seconds=(0.1, 0.3),
                       stage_layers=(8, layers - 8))  # fmt: skip
    plan = subject.plan.model_copy(update={"pipeline": Pipeline(schedule="1f1b", stages=times.stage_layers)})
    live = build_view("pipeline", dataclasses.replace(subject, plan=plan, run=times)).modes["live"]
    (timeline,) = (each for each in live.figures if isinstance(each, Timeline))
    first = [each for each in timeline.spans if each.label == "0"]
    assert sum(each.end - each.start for each in first) == pytest.approx(0.4)
    assert "should make steps" in live.sentences[1]


def test_measured_collectives_are_drawn_over_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = [{"num_bytes": size, "seconds": size / 1e9, "median_seconds": size / 1e9, "max_seconds": size / 1e9,
               "rounds": 3} for size in (1 << 20, 1 << 24)]  # fmt: skip
    curve = {"group": "world", "collective": "all_reduce", "ranks": 8, "nodes": 1, "groups": 1, "points": points,
             "planned_gb_per_second": 3.5}  # fmt: skip
    result = {
        "device": "H100",
        "backend": "nccl",
        "dtype": "float32",
        "world_size": 8,
        "num_nodes": 1,
        "curves": [curve],
    }
    (tmp_path / "comm.json").write_text(json.dumps(result))
    given = ["--plan", "llama-3.2-1b", "--cluster", "8xH100", "--comm", str(tmp_path / "comm.json"), "--json"]
    assert main(["viz", "collectives", *given]) == 0
    live = json.loads(capsys.readouterr().out)["modes"]["live"]
    (lines,) = live["figures"]
    model, measured = lines["series"]
    ring = ring_of(subject_of(plan="llama-3.2-1b", cluster="8xH100").cluster.levels, 8, 1)
    assert model["values"] == pytest.approx([float(all_reduce_seconds(each["num_bytes"], ring)) for each in points])
    assert measured["values"] == [each["seconds"] for each in points]
    assert lines["dots"] == ["measured"]
    assert live["sentences"] == ["Group world reaches 1.75 GB/s on the bus; the planner expects 3.5 (+100%)."]
    assert main(["viz", "collectives", *given, "--with", "operation=broadcast"]) == 0
    assert "has no broadcast" in json.loads(capsys.readouterr().out)["modes"]["live"]["sentences"][0]


def test_a_run_is_compared_with_the_prediction_of_its_start(tmp_path: Path) -> None:
    subject = subject_of(plan="tiny", cluster="2xcpu")
    own = subject.prediction.model_copy(update={"step_seconds": 123.0})
    recipe = subject.question.recipe.model_copy(update={"cluster": "2xcpu"})
    run = create_run(tmp_path / "run", recipe, subject.plan.model_copy(update={"prediction": own}))
    assert read_subject(None, str(run.path), None, (), ()).prediction.step_seconds == 123.0


def test_zero_fits_from_as_many_ranks_as_the_arithmetic_says() -> None:
    assert [least_ranks(stage, 7e9, 80e9) for stage in range(4)] == [None, 2, 2, 2]
    assert [least_ranks(stage, 70e9, 80e9) for stage in range(4)] == [None, None, None, 14]
    for stage in range(1, 4):
        least = least_ranks(stage, 7e9, 40e9)
        assert least is not None
        assert sum(bytes_of(stage, 7e9, least)) <= 40e9 < sum(bytes_of(stage, 7e9, least - 1))


def test_a_slow_rank_delays_buckets_and_pipelines() -> None:
    subject = subject_of("plan.mesh.dp_replicate=8", plan="llama-3.2-1b", cluster="8xH100")
    blocks, ring = backward_blocks(subject), ring_of(subject.cluster.levels, 8, 1)
    waits = [exposed_seconds(blocks, reduce_in_buckets(slowed(blocks, factor), 25e6, ring)) for factor in (1, 1.5, 2)]
    backward = sum(each.seconds for each in blocks)
    assert waits[1] >= 0.5 * backward
    assert waits[2] - waits[1] == pytest.approx(0.5 * backward, rel=0.05)
    equal = equal_stages("1f1b", 4, 8, 2.0)
    assert simulate_step(with_slow_rank(equal, 1, 2.0)).seconds > 1.5 * simulate_step(equal).seconds
