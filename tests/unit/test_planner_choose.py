"""The plan that is chosen keeps the pins, fits, and is always the same."""

import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest

from trimaran.core import GIB, DataSection, Mesh, Plan, Recipe, TrainSection, UserError
from trimaran.hardware import DEVICES, Cluster, parse_cluster
from trimaran.models import PRESETS, ModelSpec
from trimaran.planner import check_plan, choose, explain

TINY, SMALL, LARGE = PRESETS["tiny"], PRESETS["llama-3.2-1b"], PRESETS["llama-3-8b"]
TWO_CORES = Cluster(device=DEVICES["cpu"], devices_per_node=2)


def recipe(*, global_batch: int = 32, seq_len: int = 256, plan: dict[str, Any] | None = None) -> Recipe:
    return Recipe(
        data=DataSection(seq_len=seq_len),
        train=TrainSection(global_batch=global_batch),
        plan="auto" if plan is None else Plan.model_validate(plan),
    )


def refusal(wish: Recipe, spec: ModelSpec | None, cluster: Cluster) -> UserError:
    with pytest.raises(UserError) as caught:
        choose(wish, spec, cluster)
    return caught.value


def test_two_cores_become_two_replicas_with_the_whole_share_at_once() -> None:
    plan = choose(recipe(), TINY, TWO_CORES)
    assert plan.mesh == Mesh(dp_replicate=2)
    assert (plan.micro_batch, plan.grad_accum, plan.precision, plan.compile) == (16, 1, "fp32", False)


def test_gpus_compute_in_bf16_and_compiled() -> None:
    plan = choose(recipe(), TINY, parse_cluster("8xH100"))
    assert (plan.precision, plan.compile) == ("bf16", True)
    assert choose(recipe(), TINY, parse_cluster("8xV100")).precision == "fp32"  # it has no bf16 to compute in


@pytest.mark.parametrize("text", ["H100", "8xH100", "2x8xA100", "2x8xH200", "GB200"])
@pytest.mark.parametrize("spec", [TINY, SMALL])
def test_what_is_chosen_is_legal_and_fits(text: str, spec: ModelSpec) -> None:
    cluster, wish = parse_cluster(text), recipe(global_batch=64, seq_len=2048)
    plan = choose(wish, spec, cluster)
    check_plan(plan, wish, spec, cluster)
    assert plan.global_batch == 64
    assert plan.prediction is not None
    assert plan.prediction.fits


def test_parameters_are_sharded_only_when_replicas_do_not_fit() -> None:
    assert choose(recipe(), SMALL, parse_cluster("8xH100")).sharding == "none"
    plan = choose(recipe(global_batch=8, seq_len=2048), LARGE, parse_cluster("8xH100"))
    assert (plan.mesh, plan.sharding) == (Mesh(dp_shard=8), "parameters")


def test_shards_stay_inside_a_node_when_they_fit_there() -> None:
    plan = choose(recipe(global_batch=16, seq_len=2048), LARGE, parse_cluster("2x8xH100"))
    assert plan.mesh == Mesh(dp_replicate=2, dp_shard=8)


def test_shards_span_the_nodes_when_they_must() -> None:
    small = replace(DEVICES["H100"], memory_bytes=24 * GIB)
    cluster = Cluster(device=small, num_nodes=4, devices_per_node=8)
    plan = choose(recipe(global_batch=32, seq_len=1024), LARGE, cluster)
    assert plan.mesh == Mesh(dp_shard=32)


def test_the_micro_batch_is_the_largest_that_fits() -> None:
    wish = recipe(global_batch=32, seq_len=2048)
    plan = choose(wish, SMALL, parse_cluster("H100"))
    assert plan.prediction is not None
    assert plan.prediction.fits
    larger = recipe(global_batch=32, seq_len=2048, plan={"micro_batch": 2 * plan.micro_batch})
    assert refusal(larger, SMALL, parse_cluster("H100")).code == "P007"


def test_a_micro_batch_never_grows_past_what_helps() -> None:
    assert choose(recipe(global_batch=256, seq_len=64), TINY, parse_cluster("H100")).micro_batch == 64
    assert choose(recipe(global_batch=256, seq_len=2048), TINY, parse_cluster("H100")).micro_batch == 16
    assert choose(recipe(global_batch=256, seq_len=64), TINY, TWO_CORES).micro_batch == 16


@pytest.mark.parametrize(
    ("pins", "mesh", "sharding"),
    [
        ({"mesh": {"dp_shard": 4}}, Mesh(dp_replicate=2, dp_shard=4), "parameters"),
        ({"mesh": {"dp_replicate": 2}}, Mesh(dp_replicate=2, dp_shard=4), "parameters"),
        ({"mesh": {"dp_shard": 1}}, Mesh(dp_replicate=8), "none"),
        ({"sharding": "parameters"}, Mesh(dp_shard=8), "parameters"),
        ({"sharding": "none"}, Mesh(dp_replicate=8), "none"),
        ({"sharding": "parameters", "mesh": {"dp_replicate": 4}}, Mesh(dp_replicate=4, dp_shard=2), "parameters"),
    ],
)
def test_pinned_degrees_stay_and_the_rest_follows(pins: dict[str, Any], mesh: Mesh, sharding: str) -> None:
    plan = choose(recipe(plan=pins), TINY, parse_cluster("8xH100"))
    assert (plan.mesh, plan.sharding) == (mesh, sharding)


@pytest.mark.parametrize(
    ("pins", "micro_batch", "grad_accum"),
    [
        ({"micro_batch": 2}, 2, 2),
        ({"grad_accum": 4}, 1, 4),
        ({"micro_batch": 1, "grad_accum": 4}, 1, 4),
        ({}, 4, 1),
    ],
)
def test_pinned_batches_stay_and_the_rest_follows(pins: dict[str, Any], micro_batch: int, grad_accum: int) -> None:
    plan = choose(recipe(plan=pins), TINY, parse_cluster("8xH100"))
    assert (plan.micro_batch, plan.grad_accum) == (micro_batch, grad_accum)


def test_other_pins_stay_as_they_are() -> None:
    pins = {"precision": "fp32", "compile": False, "comm": {"bucket_mb": 50}}
    plan = choose(recipe(plan=pins), TINY, parse_cluster("8xH100"))
    assert (plan.precision, plan.compile, plan.comm.bucket_mb) == ("fp32", False, 50)


@pytest.mark.parametrize(
    ("pins", "code"),
    [
        ({"mesh": {"dp_shard": 3}}, "P001"),
        ({"mesh": {"dp_replicate": 2}, "sharding": "none"}, "P001"),
        ({"mesh": {"dp_shard": 4}, "sharding": "none"}, "P004"),
        ({"micro_batch": 3}, "P002"),
        ({"grad_accum": 3}, "P002"),
        ({"mesh": {"tp": 2, "dp_replicate": 4}}, "P003"),
    ],
)
def test_pins_that_cannot_run_are_refused(pins: dict[str, Any], code: str) -> None:
    assert refusal(recipe(plan=pins), TINY, parse_cluster("8xH100")).code == code


def test_sharding_on_one_device_is_refused() -> None:
    assert refusal(recipe(plan={"sharding": "parameters"}), TINY, parse_cluster("H100")).code == "P004"


@pytest.mark.parametrize(("global_batch", "fix"), [(30, "24 or 32"), (4, "set it to 8, or use 4 of the devices")])
def test_a_batch_that_does_not_split_comes_back_with_numbers_that_work(global_batch: int, fix: str) -> None:
    error = refusal(recipe(global_batch=global_batch), TINY, parse_cluster("8xH100"))
    assert error.code == "P006"
    assert fix in error.fix


def test_nothing_fits_says_how_much_is_missing() -> None:
    error = refusal(recipe(global_batch=8, seq_len=1024), PRESETS["llama-3-70b"], parse_cluster("8xH100"))
    assert error.code == "P007"
    assert "GiB too big for the 79.1 GiB of H100, the most for" in error.what
    assert "add devices" in error.fix


def test_a_batch_that_only_accumulation_makes_too_big_comes_back_with_one_that_fits() -> None:
    cluster, spec = parse_cluster("8xH100"), PRESETS["llama-3-8b"]
    error = refusal(recipe(global_batch=32, seq_len=4096), spec, cluster)
    assert error.code == "P007"
    assert "set train.global_batch to 8" in error.fix
    assert choose(recipe(global_batch=8, seq_len=4096), spec, cluster).grad_accum == 1


def test_a_foreign_model_gets_replicas_and_no_prediction() -> None:
    plan = choose(recipe(seq_len=4096), None, parse_cluster("8xH100"))
    assert (plan.mesh, plan.micro_batch, plan.prediction) == (Mesh(dp_replicate=8), 4, None)
    assert explain(plan).memory == explain(plan).time == ()


@pytest.mark.parametrize("global_batch", [5040, 42 * 10**15])
def test_choosing_is_quick_and_always_ends_the_same(global_batch: int) -> None:
    wish, cluster = recipe(global_batch=global_batch, seq_len=2048), parse_cluster("6x7xH100")
    start = time.perf_counter()
    first = choose(wish, SMALL, cluster)
    assert time.perf_counter() - start < 0.05
    assert choose(wish, SMALL, cluster) == first


def test_an_explanation_ranks_the_terms_and_says_what_they_are() -> None:
    for plan in (
        choose(recipe(), TINY, TWO_CORES),
        choose(recipe(global_batch=8, seq_len=2048), LARGE, parse_cluster("8xH100")),
    ):
        told = explain(plan)
        assert plan.prediction is not None
        assert {row.term: row.value for row in told.memory} == plan.prediction.memory
        for rows in (told.memory, told.time):
            assert sum(row.share for row in rows) == pytest.approx(1)
            assert [row.value for row in rows] == sorted((row.value for row in rows), reverse=True)
            assert all(row.meaning for row in rows)


def test_the_planner_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, trimaran.planner; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
