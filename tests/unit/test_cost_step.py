"""A full step: the terms add up, each axis has a cost, and totals agree with measurements."""

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.accuracy.ask import question_of

from trimaran.core import Bytes, Flops, Mesh, Plan, Prediction, Seconds, TowerPlan
from trimaran.cost import (
    Job,
    Memory,
    all_gather_seconds,
    all_reduce_seconds,
    allocator_slowdown,
    attention_seconds,
    find_stack,
    matmul_seconds,
    predict,
    rates_of,
    ring_of,
    slow_start_seconds,
    stage_inputs_of,
    stage_times_of,
    step_time_of,
)
from trimaran.machine import DEVICES, Calibration, Cluster, Link, apply_calibration, parse_cluster
from trimaran.models import PRESETS, ModelSpec, Opaque, Outline, OutlineLayer, Tower, outline_of

H200 = rates_of(DEVICES["H200"], "bf16")
MEASURED = Path(__file__).parents[2] / "benchmarks" / "h200.jsonl"


def job_of(preset: str = "llama-3.2-1b", *, seq_len: int = 2048, stack: str = "trimaran") -> Job:
    return Job(outline=outline_of(PRESETS[preset]), seq_len=seq_len, stack=find_stack(stack))


def predicted(plan: dict[str, Any], *, text: str = "8xH100", **job: Any) -> Prediction:
    return predict(job_of(**job), parse_cluster(text), Plan.model_validate({"precision": "bf16"} | plan))


def test_a_large_matmul_runs_at_the_sustained_rate() -> None:
    seconds = matmul_seconds(16384, 8192, 8192, H200)
    assert 2 * 16384 * 8192**2 / seconds / 1e12 == pytest.approx(709, rel=0.05)  # benchmarks/h200_kernels.json


def test_more_tiles_than_multiprocessors_take_a_second_wave() -> None:
    even = matmul_seconds(11 * 256, 12 * 128, 4096, H200)  # 132 tiles
    assert matmul_seconds(11 * 256 - 100, 12 * 128, 4096, H200) == even
    assert matmul_seconds(11 * 256 + 1, 12 * 128, 4096, H200) > 1.1 * even


def test_a_shallow_matmul_is_memory_bound() -> None:
    moved = 2 * (8192 * 16 + 16 * 8192 + 8192 * 8192)
    assert matmul_seconds(8192, 8192, 16, H200) == pytest.approx(moved / H200.bandwidth)


def test_attention_is_slower_on_short_sequences_and_narrow_heads() -> None:
    def forward(length: int, head_dim: int) -> float:
        return attention_seconds(1e12, length, head_dim, kernel="torch", rates=H200)[0]

    assert forward(1024, 128) > 1.2 * forward(8192, 128)
    assert 1e12 / forward(4096, 128) / 1e12 == pytest.approx(609, rel=0.05)  # h200_kernels.json
    assert 1e12 / forward(4096, 64) / 1e12 == pytest.approx(436, rel=0.05)


def test_ampere_kernels_are_slower_on_hopper() -> None:
    old, new = (attention_seconds(1e12, 4096, 128, kernel=name, rates=H200)[0] for name in ("flash-2", "torch"))
    assert old > 1.4 * new


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"cp": 2}, {"pp": 2}, {"tp": 2, "cp": 2, "pp": 2}])
def test_every_axis_shortens_a_micro_batch_but_at_most_by_its_degree(mesh: dict[str, int]) -> None:
    cluster, one, split = parse_cluster("8xH100"), Plan(precision="bf16"), Plan.model_validate({"mesh": mesh})
    rates = rates_of(cluster.device, "bf16")
    whole, part = (
        stage_times_of(stage_inputs_of(job_of("llama-3-8b", seq_len=8192), rates, cluster.levels, each)).slowest
        for each in (one, split)
    )
    busy, degree = part.forward + part.backward, split.mesh.world_size
    # Joint projections end, context parallelism copies keys and values, and Hopper's attention kernel cannot be used.
    assert (whole.forward + whole.backward) / degree < busy < 1.4 * (whole.forward + whole.backward) / degree


def test_the_bubble_of_equal_stages_matches_theory() -> None:
    layer = OutlineLayer(hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008)
    tower = Tower(name="language", runs=((layer, 32),), hidden=4096)
    plan = Plan.model_validate({"mesh": {"dp_replicate": 2, "pp": 4}, "grad_accum": 8, "precision": "bf16"})
    job, cluster = Job(outline=Outline(name="headless", towers=(tower,)), seq_len=4096), parse_cluster("8xH100")
    found = step_time_of(job, cluster, plan).terms
    busy = found["forward"] + found["backward"]
    assert found["bubble"] / (found["bubble"] + busy) == pytest.approx(plan.bubble, rel=0.05)
    assert "bubble" not in predicted({"mesh": {"dp_replicate": 8}}).time


def test_an_expensive_stage_slows_the_whole_pipeline() -> None:
    even = {"mesh": {"dp_replicate": 4, "pp": 2}, "grad_accum": 4, "micro_batch": 4}
    uneven = even | {"pipeline": {"stages": (1, 15)}}
    assert predicted(uneven).step_seconds > 1.2 * predicted(even).step_seconds


def test_two_stages_per_rank_halve_the_bubble_and_send_twice() -> None:
    layer = OutlineLayer(hidden=2048, heads=32, kv_heads=8, head_dim=64, ffn=8192)
    tower = Tower(name="language", runs=((layer, 16),), hidden=2048)
    job = Job(outline=Outline(name="headless", towers=(tower,)), seq_len=2048)
    # The micro-batch is large enough that no device waits for its host.
    wanted = {"mesh": {"dp_replicate": 2, "pp": 4}, "micro_batch": 8, "grad_accum": 8, "precision": "bf16"}
    plain, rounds = (
        predict(job, parse_cluster("8xH100"), Plan.model_validate(wanted | {"pipeline": {"schedule": each}}))
        for each in ("1f1b", "interleaved")
    )
    assert rounds.time["bubble"] == pytest.approx(plain.time["bubble"] / 2, rel=0.01)
    key = "between stages on NVLink"
    assert rounds.exposed[key] == pytest.approx(2 * plain.exposed[key])


def test_recompute_takes_most_of_a_forward_and_saves_memory() -> None:
    wanted = {"mesh": {"dp_replicate": 8}, "micro_batch": 4}
    none, selective, full = (predicted(wanted | {"recompute": each}) for each in ("none", "selective", "full"))
    assert full.peak_bytes < selective.peak_bytes < none.peak_bytes
    assert none.time["backward"] < selective.time["backward"] < full.time["backward"]
    again = full.time["backward"] - none.time["backward"]
    assert 0.4 * full.time["forward"] < again < full.time["forward"]  # the head belongs to no layer
    fourth = predicted(wanted | {"recompute": 4}).time["backward"]
    assert fourth == pytest.approx(none.time["backward"] + again / 4, rel=0.01)


def test_tp_communicates_in_every_layer_and_cp_in_every_attention() -> None:
    replicas = predicted({"mesh": {"dp_replicate": 8}, "micro_batch": 4})
    slices = predicted({"mesh": {"tp": 8}, "micro_batch": 32})
    pieces = predicted({"mesh": {"cp": 8}, "micro_batch": 32})
    assert slices.time["comm"] > pieces.time["comm"] > replicas.time["comm"]
    assert slices.exposed["tensor slices on NVLink"] == slices.time["comm"]
    assert "parts of the sequence on NVLink" in pieces.exposed


def test_tp_across_nodes_is_slower_than_inside_one() -> None:
    inside = predicted({"mesh": {"tp": 8, "dp_replicate": 2}, "micro_batch": 16}, text="2x8xH100", preset="llama-2-7b")
    across = predicted({"mesh": {"tp": 16}, "micro_batch": 32}, text="2x8xH100", preset="llama-2-7b")
    assert across.exposed["tensor slices on InfiniBand"] > 2 * inside.exposed["tensor slices on NVLink"]


def test_exchanging_heads_moves_less_than_gathering_keys_of_many_heads() -> None:
    wanted = {"mesh": {"cp": 8}, "micro_batch": 8}
    gather, exchange = (
        predicted(wanted | {"comm": {"context": each}}, preset="llama-2-7b") for each in ("gather", "exchange")
    )
    assert exchange.time["comm"] < gather.time["comm"]


def test_ep_communicates_and_its_ranks_are_imbalanced() -> None:
    whole = predicted({"mesh": {"dp_replicate": 8}, "micro_batch": 4}, preset="qwen3-30b-a3b")
    spread = predicted({"mesh": {"dp_replicate": 8, "ep": 8}, "micro_batch": 4}, preset="qwen3-30b-a3b")
    assert "experts on NVLink" in spread.exposed
    assert "experts on NVLink" not in whole.exposed
    assert spread.time["forward"] > 0.9 * whole.time["forward"]


def test_sharded_gradients_are_reduced_per_micro_batch_and_zero_1_once() -> None:
    wanted = {"mesh": {"dp_shard": 16}, "grad_accum": 8}
    once, each = (predicted(wanted | {"sharding": stage}, text="2x8xA100") for stage in ("optimizer", "gradients"))
    assert each.time["comm"] > 2 * once.time["comm"]


def test_only_a_gather_longer_than_a_layer_is_exposed() -> None:
    wanted = {"mesh": {"dp_shard": 64}, "sharding": "parameters"}
    short, long = (predicted(wanted | {"micro_batch": num}, text="8x8xA100", preset="llama-2-7b") for num in (1, 8))
    key = "all-gather of weights on InfiniBand"
    assert short.exposed[key] > 3 * long.exposed[key]
    assert long.exposed["computing slowed by collectives"] > 0


def test_nothing_hides_the_last_reduction() -> None:
    cluster, layer = parse_cluster("2x8xA100"), outline_of(PRESETS["llama-2-7b"]).main.runs[0][0].parameters
    wanted = {"mesh": {"dp_shard": 16}, "sharding": "parameters", "micro_batch": 16}
    found = predicted(wanted, text="2x8xA100", preset="llama-2-7b")
    alone = all_gather_seconds(4 * layer, ring_of(cluster.levels, 16, 1))
    assert found.exposed["gradients on InfiniBand"] == pytest.approx(alone, rel=0.01)


def comm_of(**comm: Any) -> Mapping[str, float]:
    wanted = {"mesh": {"dp_replicate": 64}, "comm": comm}
    return predicted(wanted, text="8x8xA100", preset="llama-2-7b", seq_len=256).exposed


def test_compression_and_local_steps_reduce_gradient_traffic() -> None:
    key = "gradients on InfiniBand"
    assert comm_of(compression="bf16")[key] < comm_of()[key]
    assert key not in comm_of(local_steps=4)


def test_replicas_with_local_steps_exchange_their_weights_once_in_so_many_steps() -> None:
    key = "weights of replicas on InfiniBand"
    ring = ring_of(parse_cluster("8x8xA100").levels, 64, 1)
    once = all_reduce_seconds(4 * PRESETS["llama-2-7b"].num_parameters, ring)
    assert comm_of(local_steps=4)[key] == pytest.approx(once / 4, rel=0.01)
    settings: dict[str, Any] = {"steps": 50, "outer": {"optimizer": "nesterov"}}
    exact, small, hidden = (
        comm_of(local_steps=settings | more)[key]
        for more in ({}, {"compression": "int8"}, {"fragments": 5, "overlap_steps": 9})
    )
    assert exact == pytest.approx(once / 50, rel=0.01)
    assert small < 0.6 * exact
    assert hidden < 0.01 * exact


def test_a_link_of_a_long_round_trip_delays_every_collective(tmp_path: Path) -> None:
    """Gloo needs a round trip for each message: the gradients take two, and so do the sums of a step."""
    found = []
    for round_trip in (0.002, 0.1):
        link = {"name": "internet", "gb_per_second": 0.125, "latency_us": 1e6 * round_trip / 2}
        path = tmp_path / f"{round_trip}.yaml"
        path.write_text(json.dumps({"device": "cpu", "num_nodes": 2, "devices_per_node": 1, "links": [link]}))
        found.append(
            predicted(
                {"mesh": {"dp_replicate": 2}, "precision": "fp32"}, text=str(path), preset="tiny", seq_len=64
            ).exposed
        )
    near, far = (each["sums of the step on internet"] for each in found)
    assert far == pytest.approx(2 * 0.1, rel=0.1)
    assert near == pytest.approx(2 * 0.002, rel=0.1)


def test_after_a_pause_tcp_begins_with_a_small_window() -> None:
    link = Link(name="internet", devices=2, bandwidth=12.5e6, latency=Seconds(0.025))
    levels = (replace(link, name="near", devices=1), link)
    ring = ring_of(levels, 2, 1)
    short, long = (slow_start_seconds(each, ring) for each in (10_000, 100_000_000))
    assert short == 0  # it fits into the first window
    assert long == pytest.approx(5.4 * 0.0525, rel=0.05)  # until 600 kB are on their way
    assert slow_start_seconds(1e8, ring_of(parse_cluster("8x8xA100").levels, 64, 1)) == 0


def test_top_k_traffic_grows_with_the_number_of_ranks() -> None:
    wanted = {"comm": {"compression": "topk"}}
    few, many = (
        predicted(wanted | {"mesh": {"dp_replicate": 8 * num}}, text=f"{num}x8xA100", preset="llama-2-7b", seq_len=256)
        for num in (2, 16)
    )
    assert many.exposed["gradients on InfiniBand"] > 4 * few.exposed["gradients on InfiniBand"]


def test_an_unsharded_tower_reduces_and_gathers_its_gradients() -> None:
    plan = Plan(mesh=Mesh(dp_shard=16), sharding="gradients", precision="bf16", micro_batch=1)
    whole = plan.model_copy(update={"towers": {"vision": TowerPlan(sharding="none")}})
    job, cluster = Job(outline=two_towers(frozen=False), seq_len=256), parse_cluster("2x8xA100")
    key = "gradients on InfiniBand"
    shared, own = (step_time_of(job, cluster, each) for each in (plan, whole))
    assert own.exposed[key] > shared.exposed[key]
    assert own.terms["optimizer"] > 2 * shared.terms["optimizer"]


def test_caches_do_not_mix_measured_and_catalogue_rates() -> None:
    paper = parse_cluster("8xH100")
    slow = apply_calibration(paper, Calibration(bf16_tflops=300, memory_gb_per_second=1000))
    plan = Plan(mesh=Mesh(dp_replicate=8), precision="bf16")
    before, measured, after = (step_time_of(job_of(), each, plan).terms for each in (paper, slow, paper))
    assert before == after
    assert measured["forward"] > 1.5 * before["forward"]


def test_variants_use_the_rates_of_their_family_and_unknown_devices_count_as_ampere() -> None:
    assert rates_of(DEVICES["H100-96GB"], "bf16").matmul_flops < rates_of(DEVICES["H100"], "bf16").matmul_flops
    assert rates_of(DEVICES["GH200"], "bf16")[0] == rates_of(DEVICES["H20"], "bf16")[0] == "hopper"
    assert rates_of(replace(DEVICES["T4"], name="GeForce GTX 1080"), "fp16").generation == "ampere"


def test_small_micro_batches_wait_for_the_host() -> None:
    plan = {"cuda_graphs": False}
    small, large = (predicted(plan | {"micro_batch": num}, text="H100", seq_len=256) for num in (1, 2))
    assert small.step_seconds > 0.9 * large.step_seconds
    captured = predicted({}, text="H100", seq_len=256)
    assert captured.time["forward"] < 0.7 * small.time["forward"]


def test_offload_costs_the_copies_and_nothing_on_a_cpu() -> None:
    moments = predicted({"offload": "optimizer"}, text="H100")
    both_ways = 8 * PRESETS["llama-3.2-1b"].num_parameters / (0.73 * 63e9)
    assert moments.time["offload"] + moments.time["optimizer"] == pytest.approx(both_ways)
    weights = predicted({"offload": "parameters", "sharding": "parameters"}, text="H100")
    assert weights.time["optimizer"] > 10 * moments.time["optimizer"]  # the host updates the weights
    assert predicted({"offload": "activations", "micro_batch": 8}, text="H100").time["offload"] > 0
    cpu = predict(job_of("tiny", seq_len=128), parse_cluster("1xcpu"), Plan(offload="optimizer"))
    assert "offload" not in cpu.time


def test_fp16_runs_like_bf16_and_fp8_only_speeds_up_matmuls() -> None:
    wanted = {"mesh": {"dp_replicate": 8}, "micro_batch": 4}
    half, brain, eight = (
        predicted(wanted | {"precision": each}, preset="llama-3-8b") for each in ("fp16", "bf16", "fp8")
    )
    assert half.time == brain.time
    assert 0.5 * brain.time["forward"] < eight.time["forward"] < brain.time["forward"]
    bf16, fp8 = (rates_of(DEVICES["H100"], each) for each in ("bf16", "fp8"))
    assert fp8.head_matmul_flops == bf16.head_matmul_flops == bf16.matmul_flops < fp8.matmul_flops


def test_a_nearly_full_device_slows_a_step() -> None:
    def slowdown(occupancy: float, text: str) -> float:
        cluster = parse_cluster(text)
        taken = Bytes(int(occupancy * cluster.device.memory_bytes))
        return allocator_slowdown(Memory({}, taken, taken, taken, Bytes(0)), cluster, job_of())

    assert slowdown(0.87, "H100") == 0 < slowdown(0.97, "H100") < slowdown(1.0, "H100")
    assert slowdown(1.0, "1xcpu") == 0
    assert slowdown(1.01, "H100") == 0, "a plan that does not fit takes as long as on a larger device"
    full, over = (predicted({"micro_batch": size}, text="H200", seq_len=4096) for size in (11, 13))
    assert full.fits
    assert full.device_bytes > 0.89 * DEVICES["H200"].memory_bytes
    assert full.time["allocator"] > 0
    assert not over.fits
    assert "allocator" not in over.time


def test_unmeasured_configurations_have_a_larger_error() -> None:
    assert (
        predicted({}, text="H200").error
        < predicted({}, text="H100").error
        < predicted({"offload": "optimizer"}, text="H200").error
    )
    assert predicted({"mesh": {"pp": 2}, "grad_accum": 2}, text="2xH100").error > predicted({}, text="H100").error


def two_towers(*, frozen: bool) -> Outline:
    vision_layer = OutlineLayer(hidden=1024, heads=16, kv_heads=16, head_dim=64, ffn=4096, gated=False, causal=False)
    language_layer = OutlineLayer(hidden=2048, heads=16, kv_heads=16, head_dim=128, ffn=8192)
    vision = Tower(name="vision", runs=((vision_layer, 24),), hidden=1024, positions=4096, segment=1024, frozen=frozen)
    language = Tower(name="language", runs=((language_layer, 24),), hidden=2048, vocab=32000, outputs=32000)
    return Outline(name="vlm", towers=(vision, language))


def test_a_frozen_first_tower_has_no_backward_and_towers_recompute_separately() -> None:
    cluster, plan = parse_cluster("8xH100"), Plan(mesh=Mesh(dp_replicate=8), precision="bf16", micro_batch=4)
    thawed, frozen = (
        step_time_of(Job(outline=two_towers(frozen=each), seq_len=2048), cluster, plan).terms for each in (False, True)
    )
    assert frozen["forward"] == pytest.approx(thawed["forward"], rel=0.01)
    assert frozen["backward"] < 0.8 * thawed["backward"]
    assert frozen["optimizer"] < thawed["optimizer"]
    flops = [
        predict(Job(outline=two_towers(frozen=each), seq_len=2048), cluster, plan).flops_per_step
        for each in (False, True)
    ]
    assert flops[0] - flops[1] == pytest.approx(
        2 * 32 * 24 * two_towers(frozen=True).towers[0].runs[0][0].flops(4096, 1024)
    )
    own = plan.model_copy(update={"towers": {"vision": TowerPlan(recompute="full")}})
    job = Job(outline=two_towers(frozen=False), seq_len=2048)
    partly, whole = (
        step_time_of(job, cluster, each).terms["backward"]
        for each in (own, plan.model_copy(update={"recompute": "full"}))
    )
    assert thawed["backward"] < partly < whole


def test_an_opaque_block_is_bound_by_flops_or_by_bytes() -> None:
    def forward(flops: float, moved: int) -> float:
        block = Opaque(
            name="block",
            parameters=10,
            sample_flops=Flops(flops),
            saved_bytes=Bytes(0),
            moved_bytes=Bytes(moved),
            output_bytes=Bytes(8),
        )
        job = Job(outline=Outline(name="net", towers=(Tower(name="net", runs=((block, 3),), hidden=8),)), seq_len=1)
        return step_time_of(job, parse_cluster("H200"), Plan(precision="bf16", micro_batch=2)).terms["forward"]

    assert forward(1e12, 0) == pytest.approx(6 * 1e12 / H200.matmul_flops, rel=0.01)
    assert forward(0, 10**10) == pytest.approx(6 * 1e10 / H200.bandwidth, rel=0.01)


@pytest.mark.parametrize("text", ["H100", "2x8xH100", "2xcpu"])
@pytest.mark.parametrize("sharding", ["none", "parameters"])
def test_terms_add_up_to_the_total(text: str, sharding: str) -> None:
    cluster = parse_cluster(text)
    axis = "dp_shard" if sharding == "parameters" else "dp_replicate"
    plan = Plan.model_validate({"mesh": {axis: cluster.world_size}, "sharding": sharding, "grad_accum": 2})
    found = predict(job_of("tiny", seq_len=128), cluster, plan)
    assert sum(found.time.values()) == pytest.approx(found.step_seconds)
    assert sum(found.exposed.values()) == pytest.approx(found.time["comm"])
    assert found.tokens_per_second == pytest.approx(plan.global_batch * 128 / found.step_seconds)
    assert 0 < found.mfu < 1 if cluster.device.kind == "cuda" else found.mfu == 0
    assert found.mfu_is_known == (cluster.device.kind == "cuda") == (not found.no_mfu)


def test_one_gpu_does_not_communicate() -> None:
    assert predicted({}, text="H100").time["comm"] == 0


def test_sharding_trades_bytes_for_seconds() -> None:
    replicas = predicted({"mesh": {"dp_replicate": 16}}, text="2x8xA100", seq_len=512)
    shards = predicted({"mesh": {"dp_shard": 16}, "sharding": "parameters"}, text="2x8xA100", seq_len=512)
    assert shards.peak_bytes < replicas.peak_bytes
    assert shards.time["comm"] > replicas.time["comm"]


def test_cached_plans_are_timed_thousands_per_second() -> None:
    job, cluster = job_of("llama-3-70b", seq_len=4096), parse_cluster("16x8xH100")
    plan = Plan.model_validate({"mesh": {"tp": 8, "pp": 8, "dp_shard": 2}, "sharding": "parameters", "grad_accum": 32})
    step_time_of(job, cluster, plan)
    start = time.process_time()
    for _ in range(1000):
        step_time_of(job, cluster, plan)
    assert time.process_time() - start < 0.5


def test_steps_of_one_h200_are_predicted_as_measured() -> None:
    errors = {}
    for line in MEASURED.read_text().splitlines():
        row = json.loads(line)
        if "step_seconds" in row:
            job, plan = question_of(row)
            seconds = sum(step_time_of(job, parse_cluster("H200"), plan).terms.values())
            errors[row["name"]] = seconds / row["step_seconds"] - 1
    assert {name: error for name, error in errors.items() if abs(error) > 0.10} == {}
    assert sum(map(abs, errors.values())) / len(errors) < 0.03


# Two gloo ranks with a thread each on two Xeon cores (torch 2.13): milliseconds of a step.
@pytest.mark.parametrize(
    ("shape", "seq_len", "milliseconds"),
    [
        ((4, 128, 4, 2, 32, 384, 320), 256, 471),
        ((4, 256, 8, 4, 32, 768, 320), 256, 1251),
        ((4, 128, 4, 2, 32, 384, 320), 512, 1101),
    ],
)
def test_two_cores_are_predicted_as_measured(shape: tuple[int, ...], seq_len: int, milliseconds: float) -> None:
    names = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")
    fields: dict[str, Any] = dict(zip(names, shape, strict=True))
    spec = ModelSpec(name="measured", max_seq_len=8192, **fields)
    core = replace(
        DEVICES["cpu"], peak_flops={"fp32": Flops(140e9)}
    )  # `cpu_flops` measures 94e9 to 163e9, depending on other processes
    plan = Plan(micro_batch=16, mesh=Mesh(dp_replicate=2))
    found = predict(Job(outline=outline_of(spec), seq_len=seq_len), Cluster(device=core, devices_per_node=2), plan)
    assert found.step_seconds * 1000 == pytest.approx(milliseconds, rel=0.15)


# The Ultra-Scale Playbook's nanotron runs of 1B, tokens a second of one H100: replicas, tp bound by the host,
# tp bound by communication, and a pipeline.
@pytest.mark.parametrize(
    ("gpus", "mesh", "micro_batch", "grad_accum", "published"),
    [
        (8, {"dp_replicate": 8}, 1, 32, 39273),
        (128, {"dp_replicate": 128}, 1, 2, 24494),
        (8, {"tp": 8}, 1, 256, 6907),
        (16, {"tp": 8, "dp_replicate": 2}, 16, 8, 27851),
        (8, {"dp_replicate": 2, "pp": 4}, 1, 128, 36910),
    ],
)
def test_published_runs_are_predicted(
    gpus: int, mesh: dict[str, int], micro_batch: int, grad_accum: int, published: float
) -> None:
    layer = OutlineLayer(hidden=2048, heads=32, kv_heads=32, head_dim=64, ffn=8192, extras=4096)
    tower = Tower(name="language", runs=((layer, 16),), hidden=2048, vocab=131072, outputs=131072, tied=True)
    job = Job(outline=Outline(name="1B", towers=(tower,)), seq_len=4096, stack=find_stack("nanotron"))
    plan = Plan.model_validate(
        {"mesh": mesh, "micro_batch": micro_batch, "grad_accum": grad_accum, "precision": "bf16"}
    )
    found = predict(job, parse_cluster(f"{gpus}xH100"), plan)
    assert found.tokens_per_second / gpus == pytest.approx(published, rel=0.15)
