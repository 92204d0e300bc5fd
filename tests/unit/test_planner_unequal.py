"""Plans for ranks and devices of unequal speed: their rules, their price, and what the planner chooses."""

import json
from dataclasses import replace
from typing import Any

import pytest

from trimaran.core import Mesh, Plan, Recipe, UserError, parse_recipe, show_rows
from trimaran.cost import predict
from trimaran.machine import Cluster, DeviceGroup, parse_cluster
from trimaran.models import PRESETS, outline_of
from trimaran.planner import Question, answer_line, check_micro_batches, choose, next_rung, search
from trimaran.planner.emit import EMITTERS, emit


def question_for(preset: str, cluster: str, *, batch: int, seq_len: int, plan: Any = "auto") -> Question:
    tree = {"data": {"seq_len": seq_len}, "train": {"global_batch": batch}, "plan": plan}
    spec = PRESETS[preset]
    return Question(
        recipe=Recipe.model_validate(tree), spec=spec, outline=outline_of(spec), cluster=parse_cluster(cluster)
    )


def test_the_batch_is_the_sum_of_the_rows() -> None:
    plan = Plan(mesh=Mesh(dp_replicate=3), micro_batches=(1, 2, 3), grad_accum=4)
    assert (plan.global_batch, plan.rows_at_once, plan.micro_batch) == (24, 6, 3)
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    measured = Plan(mesh=Mesh(dp_replicate=3), micro_batch=2, micro_batches="measured", grad_accum=4)
    assert (measured.global_batch, measured.rows_by_rank) == (24, ())
    assert show_rows((5, 5, 3, 3, 3)) == "2 x 5 + 3 x 3"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"micro_batches": (1, 2, 3)}, "3 numbers, but there are 2 data ranks"),
        ({"micro_batches": (1, 2), "engine": "deepspeed"}, "engine deepspeed gives every rank the same"),
        ({"micro_batches": (1, 2), "comm": {"local_steps": 4}}, "every replica counts as much"),
        ({"micro_batches": "measured", "micro_batch": 1}, "nothing to deal"),
        ({"micro_batches": "measured", "micro_batch": 4, "comm": {"compression": "int8"}}, "compression remembers"),
        ({"micro_batches": "measured", "micro_batch": 4, "mesh": {"dp_replicate": 2, "pp": 2}}, "pipeline"),
        ({"micro_batches": "measured", "micro_batch": 4, "mesh": {"dp_replicate": 2, "ep": 2}}, "experts"),
    ],
)
def test_rows_that_cannot_be_dealt_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        check_micro_batches(Plan.model_validate({"mesh": {"dp_replicate": 2}} | fields))
    assert refused.value.code == "P024"


@pytest.mark.parametrize("rows", [(0, 2), (1, 2.5), "fast"])
def test_a_recipe_with_impossible_rows_is_refused(rows: object) -> None:
    with pytest.raises(UserError):
        parse_recipe("{}", name="recipe.yaml", overrides=[f"plan.micro_batches={rows}"])


def test_pinned_rows_stay_and_the_planner_fills_in_the_rest() -> None:
    question = question_for("tiny", "2xcpu", batch=24, seq_len=64, plan={"micro_batches": [1, 5]})
    plan = choose(question.recipe, question.spec, question.cluster)
    assert (plan.rows_by_rank, plan.grad_accum, plan.mesh.dp) == ((1, 5), 4, 2)
    wrong = question_for("tiny", "2xcpu", batch=32, seq_len=64, plan={"micro_batches": [1, 5], "grad_accum": 4})
    with pytest.raises(UserError, match="micro_batches of 6 rows together") as refused:
        choose(wrong.recipe, wrong.spec, wrong.cluster)
    assert refused.value.code == "P002"


def test_measured_rows_need_a_micro_batch_to_deal_from() -> None:
    question = question_for("tiny", "2xcpu", batch=24, seq_len=64, plan={"micro_batches": "measured"})
    plan = choose(question.recipe, question.spec, question.cluster)
    assert plan.micro_batches == "measured"
    assert plan.micro_batch > 1
    pins = {"micro_batches": "measured", "mesh": {"dp_replicate": 2}}
    few = question_for("tiny", "2xcpu", batch=2, seq_len=64, plan=pins)
    with pytest.raises(UserError, match="nothing to deal"):
        choose(few.recipe, few.spec, few.cluster)


def test_the_most_rows_decide_on_equal_devices() -> None:
    question = question_for("tiny", "2xcpu", batch=12, seq_len=64)
    fields: dict[str, Any] = {"mesh": Mesh(dp_replicate=2), "grad_accum": 2}
    unequal = predict(question.job, question.cluster, Plan(**fields, micro_batches=(1, 5)))
    largest = predict(question.job, question.cluster, Plan(**fields, micro_batch=5))
    assert (unequal.step_seconds, unequal.peak_bytes) == (largest.step_seconds, largest.peak_bytes)
    assert unequal.tokens_per_second == pytest.approx(largest.tokens_per_second * 12 / 20)


@pytest.mark.parametrize("tool", EMITTERS)
def test_no_other_tool_gets_unequal_rows(tool: str) -> None:
    question = question_for("llama-3.2-1b", "2xH100", batch=8, seq_len=1024)
    with pytest.raises(UserError, match="different numbers of rows") as refused:
        emit(tool, Plan(mesh=Mesh(dp_replicate=2), micro_batches=(1, 3), grad_accum=2), question)
    assert refused.value.code == "P061"


def test_after_an_oom_every_rank_gets_fewer_rows() -> None:
    plan = Plan(mesh=Mesh(dp_replicate=2), micro_batches=(2, 6), grad_accum=2)
    rung = next_rung(plan)
    assert rung is not None
    assert (rung[0].rows_by_rank, rung[0].grad_accum) == ((1, 3), 4)
    assert rung[0].global_batch == plan.global_batch


def two_groups_of(device: str, nodes: int = 1) -> Cluster:
    """Return a cluster of two groups of the same device, which no text names."""
    equal = parse_cluster(f"{2 * nodes}x4x{device}")
    group = DeviceGroup(device=equal.device, num_nodes=nodes)
    return replace(equal, groups=(group, group))


@pytest.mark.parametrize(
    "fields",
    [
        {"mesh": Mesh(dp_shard=8), "sharding": "parameters", "micro_batch": 2, "grad_accum": 2},
        {"mesh": Mesh(dp_shard=4, tp=2), "sharding": "parameters", "micro_batch": 4, "grad_accum": 2},
        {"mesh": Mesh(dp_replicate=2, pp=4), "micro_batch": 1, "grad_accum": 16, "recompute": "full"},
    ],
    ids=["fsdp", "tp", "pp"],
)
def test_groups_of_the_same_device_cost_what_equal_devices_cost(fields: dict[str, Any]) -> None:
    question = question_for("llama-3.2-1b", "2x4xH100", batch=32, seq_len=4096)
    plan = Plan(precision="bf16", **fields)
    equal = predict(question.job, question.cluster, plan)
    groups = predict(question.job, two_groups_of("H100"), plan)
    assert groups.step_seconds == pytest.approx(equal.step_seconds, rel=1e-9)
    assert groups.device_bytes == equal.device_bytes
    assert groups.mfu == pytest.approx(equal.mfu)
    assert [kind.ranks for kind in groups.kinds] == [4, 4]


MIXED = "4xA100-80GB+4xL40S"


def test_data_ranks_get_rows_by_the_speed_of_their_device() -> None:
    pins = {"mesh": {"tp": 1, "pp": 1, "cp": 1, "ep": 1}, "sharding": "parameters"}
    question = question_for("llama-3.2-1b", MIXED, batch=288, seq_len=4096, plan=pins)
    answer = search(question)
    plan = answer.ranked[0]
    assert plan.prediction is not None
    assert plan.global_batch == 288
    fast, slow = plan.prediction.kinds
    assert (fast.device, slow.device, fast.ranks, slow.ranks) == ("A100-80GB", "L40S", 4, 4)
    assert fast.rows > slow.rows
    assert set(plan.rows_by_rank[:4]) <= {fast.rows, fast.rows - 1}
    assert max(plan.rows_by_rank[4:]) == slow.rows
    assert all(kind.device_bytes <= kind.memory_bytes for kind in plan.prediction.kinds)
    equal = [
        plan.model_copy(update={"micro_batches": (), "micro_batch": size, "grad_accum": 36 // size})
        for size in (1, 2, 3, 4, 6, 9, 12)
    ]
    fitting = [each for plan in equal if (each := predict(question.job, question.cluster, plan)).fits]
    assert fitting
    assert plan.prediction.step_seconds < min(each.step_seconds for each in fitting)


def test_a_pipeline_has_fewer_layers_on_the_slower_device() -> None:
    pins = {"mesh": {"pp": 2, "tp": 1, "cp": 1}, "pipeline": {"schedule": "1f1b"}}
    question = question_for("llama-3.2-1b", "4xH100+4xA100-40GB", batch=64, seq_len=4096, plan=pins)
    plan = search(question).ranked[0]
    assert plan.prediction is not None
    first, second = plan.pipeline.stages
    assert first > second
    assert first + second == 16
    given = {"pipeline": {"schedule": "1f1b", "stages": [8, 8]}}
    even = predict(question.job, question.cluster, Plan.model_validate(plan.model_dump() | given))
    assert plan.prediction.step_seconds < even.step_seconds


def test_a_plan_must_fit_on_every_kind_of_device() -> None:
    plan = Plan(mesh=Mesh(dp_replicate=8), micro_batch=1, precision="bf16", recompute="full")
    job = question_for("llama-3-8b", MIXED, batch=8, seq_len=4096).job
    roomy = predict(job, parse_cluster("4xB300+4xB200"), plan)
    tight = predict(job, parse_cluster("4xB300+4xL40S"), plan)
    assert roomy.fits
    assert not tight.fits
    assert tight.memory_limit == tight.kinds[1].memory_bytes


def test_the_precision_must_suit_every_kind_of_device() -> None:
    question = question_for("llama-3.2-1b", "1xA100-40GB+1xV100-32GB", batch=16, seq_len=1024)
    assert search(question).ranked[0].precision == "fp16"
    pinned = replace(question, recipe=question.recipe.model_copy(update={"plan": Plan(precision="bf16")}))
    with pytest.raises(UserError, match="V100-32GB does not support bf16"):
        search(pinned)


def test_other_goals_need_equal_devices() -> None:
    question = question_for("llama-3.2-1b", MIXED, batch=64, seq_len=1024)
    with pytest.raises(UserError, match="equal devices") as refused:
        search(replace(question, goal="cost"))
    assert refused.value.code == "C012"


def test_if_nothing_fits_on_several_kinds_the_answer_says_so() -> None:
    answer = search(question_for("llama-3-70b", "1xL4+1xA10", batch=8, seq_len=8192))
    assert not answer.ranked
    assert answer.missing


def test_given_plans_with_unequal_rows_are_predicted_in_bulk() -> None:
    line = {"id": "a", "model": {"preset": "llama-3.2-1b", "seq_len": 1024}, "cluster": "1xH100+1xL40S"}
    rows = {"micro_batches": [3, 1], "global_batch": 16}
    lines = [line | {"plan": rows}, line | {"id": "b", "plan": {"micro_batches": [1, 2, 3]}}]
    good, bad = (answer_line(json.dumps(each).encode(), number) for number, each in enumerate(lines, 1))
    assert good["fits"]
    assert bad["error"]["code"] == "P024"
