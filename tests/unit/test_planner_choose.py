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
    larger = recipe(global_batch=32, seq_len=2048, plan={"micro_batch": 2 * plan.micro_batch, "recompute": "none"})
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
        ({"sharding": "optimizer"}, Mesh(dp_shard=8), "optimizer"),
        ({"sharding": "gradients"}, Mesh(dp_shard=8), "gradients"),
        ({"mesh": {"tp": 2}}, Mesh(dp_replicate=4, tp=2), "none"),
        ({"mesh": {"tp": 2, "pp": 2}}, Mesh(dp_replicate=2, tp=2, pp=2), "none"),
        ({"mesh": {"tp": 2, "pp": 4}}, Mesh(dp_replicate=1, dp_shard=1, tp=2, pp=4), "none"),
        ({"mesh": {"cp": 4}, "sharding": "parameters"}, Mesh(dp_shard=2, cp=4), "parameters"),
        ({"mesh": {"cp": 8}, "sharding": "parameters"}, Mesh(cp=8), "parameters"),
        ({"mesh": {"tp": 2, "dp_shard": 2}}, Mesh(dp_replicate=2, dp_shard=2, tp=2), "parameters"),
        ({"offload": "parameters"}, Mesh(dp_shard=8), "parameters"),
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
        ({"mesh": {"tp": 3}}, "P001"),
        ({"mesh": {"tp": 4}}, "P008"),
        ({"mesh": {"ep": 2}}, "P010"),
        ({"mesh": {"pp": 8}}, "P011"),
        ({"mesh": {"pp": 2}, "micro_batch": 8}, "P012"),
        ({"comm": {"local_steps": 4}, "mesh": {"dp_shard": 8}}, "P003"),
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


def test_a_fix_that_offloads_was_predicted_to_fit() -> None:
    error = refusal(recipe(seq_len=2048), LARGE, parse_cluster("H100"))
    assert error.code == "P007"
    assert "set plan.offload to optimizer" in error.fix
    assert choose(recipe(seq_len=2048, plan={"offload": "optimizer"}), LARGE, parse_cluster("H100")).prediction
    pinned = refusal(recipe(seq_len=2048, plan={"offload": "none"}), LARGE, parse_cluster("H100"))
    assert "offload" not in pinned.fix


def test_sharded_gradients_that_accumulate_fit_as_well() -> None:
    plan = choose(recipe(global_batch=32, seq_len=4096), LARGE, parse_cluster("8xH100"))
    assert (plan.mesh, plan.sharding, plan.recompute) == (Mesh(dp_shard=8), "parameters", "none")
    assert plan.grad_accum > 1


def test_layers_are_computed_again_only_when_nothing_fits_otherwise() -> None:
    wish, cluster = recipe(global_batch=64, seq_len=4096), parse_cluster("4x8xH100")
    plan = choose(wish, PRESETS["llama-3-70b"], cluster)
    assert (plan.mesh, plan.recompute) == (Mesh(dp_shard=32), "full")
    pinned = recipe(global_batch=64, seq_len=4096, plan={"recompute": "none"})
    assert refusal(pinned, PRESETS["llama-3-70b"], cluster).code == "P007"


def test_shards_over_the_parts_of_a_sequence_come_when_replicas_do_not_fit() -> None:
    wish = {"mesh": {"cp": 8}}
    assert choose(recipe(plan=wish), TINY, parse_cluster("8xH100")).sharding == "none"
    plan = choose(recipe(global_batch=8, seq_len=8192, plan=wish), LARGE, parse_cluster("8xH100"))
    assert (plan.mesh, plan.sharding) == (Mesh(cp=8), "parameters")


def test_shards_stay_inside_a_node_beside_the_slices() -> None:
    wish = recipe(global_batch=32, seq_len=4096, plan={"mesh": {"tp": 2}, "sharding": "parameters"})
    plan = choose(wish, LARGE, parse_cluster("2x8xH100"))
    assert plan.mesh == Mesh(dp_replicate=2, dp_shard=4, tp=2)


@pytest.mark.parametrize(
    ("text", "pins"),
    [
        ("2xcpu", {"mesh": {"tp": 2}}),
        ("2xcpu", {"mesh": {"pp": 2}}),
        ("2xcpu", {"mesh": {"cp": 2}}),
        ("2xcpu", {"recompute": "full"}),
        ("2xcpu", {"recompute": "selective"}),
        ("2xcpu", {"offload": "optimizer"}),
        ("2xcpu", {"engine": "deepspeed"}),
        ("1xcpu", {"engine": "deepspeed"}),
        ("1xcpu", {"offload": "parameters"}),
        ("8xH100", {"mesh": {"tp": 2, "pp": 2}}),
        ("8xH100", {"mesh": {"tp": 2, "pp": 2, "cp": 2}, "recompute": 2}),
        ("8xH100", {"mesh": {"pp": 2}, "pipeline": {"schedule": "zero-bubble"}, "offload": "activations"}),
        ("8xH100", {"engine": "deepspeed"}),
        ("H100", {"offload": "optimizer", "precision": "fp16"}),
    ],
)
def test_pins_of_every_kind_become_a_legal_predicted_plan(text: str, pins: dict[str, Any]) -> None:
    wish, cluster = recipe(plan=pins), parse_cluster(text)
    plan = choose(wish, TINY, cluster)
    check_plan(plan, wish, TINY, cluster)
    assert plan.prediction is not None
    assert all(row.meaning for rows in (explain(plan).memory, explain(plan).time) for row in rows)


def test_a_pipeline_is_cut_by_cost_and_says_so() -> None:
    wish = recipe(seq_len=4096, plan={"mesh": {"pp": 4}})
    assert choose(wish, LARGE, parse_cluster("8xH100")).pipeline.stages == (9, 9, 8, 6)
    by_hand = recipe(plan={"mesh": {"pp": 2}, "pipeline": {"stages": (3, 1)}})
    assert choose(by_hand, TINY, TWO_CORES).pipeline.stages == (3, 1)
    assert choose(recipe(), TINY, TWO_CORES).pipeline.stages == ()


@pytest.mark.parametrize(
    ("global_batch", "micro_batch", "grad_accum"), [(32, 8, 4), (6, 1, 6), (4, 1, 4), (2, 1, 2), (3, 1, 3)]
)
def test_a_pipeline_gets_micro_batches_that_keep_it_full(global_batch: int, micro_batch: int, grad_accum: int) -> None:
    plan = choose(recipe(global_batch=global_batch, plan={"mesh": {"pp": 2}}), TINY, TWO_CORES)
    assert (plan.micro_batch, plan.grad_accum) == (micro_batch, grad_accum)


def test_what_a_backward_cut_in_two_cannot_do_is_not_chosen() -> None:
    pins = {"mesh": {"pp": 2}, "pipeline": {"schedule": "zero-bubble"}}
    plan = choose(recipe(plan=pins), TINY, parse_cluster("8xH100"))
    assert (plan.compile, plan.recompute, plan.num_stages) == (False, "none", 4)


def test_small_optimizer_states_are_predicted_small() -> None:
    exact = choose(recipe(), SMALL, parse_cluster("8xH100"))
    small = Recipe.model_validate({"train": {"global_batch": 32, "optimizer": {"states": "8bit"}}})
    packed = choose(small, SMALL, parse_cluster("8xH100"))
    assert exact.prediction is not None
    assert packed.prediction is not None
    assert packed.prediction.memory["optimizer"] < 0.3 * exact.prediction.memory["optimizer"]


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


def test_a_way_that_the_pins_rule_out_is_passed_over() -> None:
    # Sixteen experts' ranks do not lie inside a node of eight, but all sixteen devices together do for them.
    wish = recipe(seq_len=4096, plan={"mesh": {"ep": 16}})
    assert choose(wish, PRESETS["qwen3-30b-a3b"], parse_cluster("2x8xH100")).mesh.ep == 16
    # Replicas gather nothing, so this pin means shards.
    plan = choose(recipe(plan={"comm": {"reshard": 4}}), TINY, parse_cluster("8xH100"))
    assert (plan.mesh, plan.sharding) == (Mesh(dp_shard=8), "parameters")


def test_a_way_that_is_ruled_out_does_not_hide_that_the_others_are_too_big() -> None:
    wish = recipe(plan={"mesh": {"tp": 2}, "compile": True})
    assert refusal(wish, PRESETS["llama-3-70b"], TWO_CORES).code == "P007"


@pytest.mark.parametrize(("offload", "sharding"), [("optimizer", "optimizer"), ("parameters", "parameters")])
def test_deepspeed_offloads_from_one_gpu_in_bf16(offload: str, sharding: str) -> None:
    plan = choose(recipe(plan={"engine": "deepspeed", "offload": offload}), SMALL, parse_cluster("H100"))
    assert (plan.sharding, plan.precision) == (sharding, "bf16")
