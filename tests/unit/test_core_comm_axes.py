"""The axes of communication, and the prediction's terms for each."""

from typing import Any

import pytest

from trimaran.core import Plan, comm_axes, data_axis, predicted_comm
from trimaran.cost import Job, find_stack, predict
from trimaran.machine import parse_cluster
from trimaran.models import PRESETS, outline_of

NOT_WAITED = "computing slowed by collectives"  # a run measures it as forward and backward


def plan_of(text: str = "8xH100", preset: str = "llama-3.2-1b", **fields: Any) -> Plan:
    plan = Plan.model_validate({"precision": "bf16"} | fields)
    job = Job(outline=outline_of(PRESETS[preset]), seq_len=2048, stack=find_stack("trimaran"))
    return plan.model_copy(update={"prediction": predict(job, parse_cluster(text), plan)})


@pytest.mark.parametrize(
    ("mesh", "sharding", "axis"),
    [
        ({"dp_replicate": 8}, "none", "dp_replicate"),
        ({"dp_shard": 8}, "parameters", "dp_shard"),
        ({"dp_replicate": 2, "dp_shard": 4}, "parameters", "dp_shard"),
        ({"dp_replicate": 2, "cp": 4}, "parameters", "cp"),
        ({"cp": 8}, "none", "cp"),
        ({"tp": 8}, "none", "world"),
    ],
)
def test_gradients_count_for_the_first_axis_that_they_cross(mesh: dict[str, int], sharding: str, axis: str) -> None:
    assert data_axis(Plan.model_validate({"mesh": mesh, "sharding": sharding})) == axis


def test_a_single_rank_has_no_axis() -> None:
    assert comm_axes(Plan()) == ()
    assert comm_axes(Plan.model_validate({"mesh": {"tp": 2, "pp": 2}})) == ("tp", "pp", "world")


@pytest.mark.parametrize(
    "fields",
    [
        {"mesh": {"dp_replicate": 8}},
        {"mesh": {"dp_shard": 8}, "sharding": "parameters"},
        {"mesh": {"dp_replicate": 2, "dp_shard": 4}, "sharding": "parameters"},
        {"mesh": {"tp": 4, "dp_shard": 2}, "sharding": "optimizer"},
        {"mesh": {"cp": 4, "dp_shard": 2}, "sharding": "parameters"},
        {"mesh": {"pp": 4, "tp": 2}, "grad_accum": 8},
        {"mesh": {"dp_shard": 8, "ep": 4}, "sharding": "parameters", "preset": "tiny-moe"},
        {"mesh": {"dp_replicate": 16}, "text": "2x8xH100"},
        {"mesh": {"dp_replicate": 2, "dp_shard": 8}, "text": "2x8xH100", "comm": {"local_steps": 8}},
        {"mesh": {"dp_replicate": 4}, "text": "4xcpu"},
    ],
)
def test_every_predicted_wait_has_its_axis(fields: dict[str, Any]) -> None:
    plan = plan_of(**fields)
    assert plan.prediction is not None
    found, time = predicted_comm(plan), plan.prediction.time
    assert tuple(found) == comm_axes(plan)
    expected = time["comm"] + time.get("bubble", 0.0) - plan.prediction.exposed.get(NOT_WAITED, 0.0)
    assert sum(found.values()) == pytest.approx(expected)


def test_without_a_prediction_nothing_is_expected() -> None:
    assert predicted_comm(Plan.model_validate({"mesh": {"tp": 2}})) == {}
