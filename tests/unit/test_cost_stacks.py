"""What other training systems do differently, and how sure the cost model is of a device."""

from dataclasses import replace
from typing import Any

import pytest

from trimaran.core import Bytes, Plan
from trimaran.cost import (
    GENERATIONS,
    MULTIPROCESSORS,
    RELATIVE_ERROR,
    STACKS,
    SUSTAINED_FRACTION,
    Job,
    attention_seconds,
    error_of,
    predict,
    rates_of,
    with_16_bit_gradients,
    without_sequence_parallelism,
)
from trimaran.machine import DEVICES, Cluster, find_device, parse_cluster
from trimaran.models import PRESETS, outline_of
from trimaran.planner import predict_line

GPT_175B = {
    "layers": 96, "hidden": 12288, "heads": 96, "ffn": 49152, "vocab": 51200, "seq_len": 2048, "gated": False,
    "tied": True,
}  # fmt: skip


def gpt_175b(**fields: Any) -> dict[str, Any]:
    """Return the answer for Korthikanti's run on 64 A100, changed by `fields`."""
    pipeline = {"schedule": "interleaved", "stages": [4] * 24}
    plan = {"mesh": {"tp": 8, "pp": 8}, "pipeline": pipeline, "micro_batch": 1, "global_batch": 64} | fields
    return predict_line({"model": GPT_175B, "cluster": "8x8xA100-80GB", "plan": plan, "stack": "megatron"})


def test_megatron_has_sequence_parallelism_wherever_it_has_tp_unless_it_is_switched_off() -> None:
    split, same, whole = (
        gpt_175b(recompute="selective", **more)
        for more in ({}, {"sequence_parallel": True}, {"sequence_parallel": False})
    )
    assert split == same
    assert split["fits"]
    assert not whole["fits"]
    assert split["memory"]["activations"] < 0.7 * whole["memory"]["activations"]
    assert split["time"]["forward"] < whole["time"]["forward"], "each rank computes all norms"
    # Tables 3 and 5 of arXiv 2205.05198: with sequence parallelism and selective recompute, and with neither.
    assert split["step_seconds"] == pytest.approx(13.75, rel=0.05)
    full = gpt_175b(recompute="full", sequence_parallel=False)
    assert full["step_seconds"] == pytest.approx(18.13, rel=0.08)


def test_without_tp_sequence_parallelism_changes_nothing() -> None:
    line = {"model": "llama-3.1-8b", "cluster": "8xH100", "plan": {"global_batch": 64}, "stack": "megatron"}
    off = line | {"plan": {"global_batch": 64, "sequence_parallel": False}}
    assert predict_line(line)["peak_bytes"] == predict_line(off)["peak_bytes"]
    assert predict_line(line)["step_seconds"] == predict_line(off)["step_seconds"]


def test_a_distributed_optimizer_is_megatrons_default() -> None:
    asked = {"model": "llama-3.1-8b", "cluster": "8xH100", "stack": "megatron"}
    given, sharded, replicas = (
        predict_line(asked | {"plan": {"global_batch": 64} | more})
        for more in ({}, {"sharding": "optimizer"}, {"sharding": "none"})
    )
    assert given == sharded
    assert given["memory"]["optimizer"] == pytest.approx(replicas["memory"]["optimizer"] / 8, rel=1e-6)
    others = (
        asked | {"plan": {"global_batch": 64} | more, "stack": "torchtitan"} for more in ({}, {"sharding": "none"})
    )
    given, replicas = map(predict_line, others)
    assert given == replicas


def test_16_bit_gradients_take_half_of_the_memory_and_of_the_traffic() -> None:
    asked = {"model": "llama-3.1-8b", "cluster": "2x8xA100", "stack": "megatron"}
    plan = {"global_batch": 64, "micro_batch": 1}
    wide, narrow = (predict_line(asked | {"plan": plan | {"gradient_dtype": dtype}}) for dtype in ("fp32", "bf16"))
    assert narrow["memory"]["gradients"] == pytest.approx(wide["memory"]["gradients"] / 2, rel=1e-6)
    assert narrow["step_seconds"] < wide["step_seconds"]
    once = with_16_bit_gradients(STACKS["megatron"])
    assert (once.memory.gradient_bytes, once.time.parameter_bytes.gradient) == (2, 2)
    both = without_sequence_parallelism(once)
    assert both.memory.gradient_bytes == 2
    assert not both.time.comm.splits_sequence


def test_a_plan_that_does_not_fit_takes_as_long_as_on_a_device_with_more_memory() -> None:
    job = Job(outline=outline_of(PRESETS["llama-3.1-70b"]), seq_len=4096)
    plan = Plan.model_validate({"mesh": {"dp_shard": 8}, "sharding": "parameters", "precision": "bf16"})
    cluster = parse_cluster("8xH100")
    large = replace(cluster, device=replace(cluster.device, memory_bytes=Bytes(100 * cluster.device.memory_bytes)))
    small_found, large_found = predict(job, cluster, plan), predict(job, large, plan)
    assert not small_found.fits
    assert large_found.fits
    assert small_found.step_seconds == large_found.step_seconds


def test_interleaved_stages_of_megatron_hide_messages_and_gradients() -> None:
    stages = {"schedule": "interleaved", "stages": [10] * 8}
    asked = {"model": "llama-3.1-70b", "cluster": "8x8xH100"}
    mesh = {"tp": 4, "pp": 4}
    plan = {"mesh": mesh, "pipeline": stages, "sharding": "optimizer", "micro_batch": 1, "global_batch": 64}
    ours, megatron = (predict_line(asked | {"plan": plan, "stack": stack}) for stack in ("trimaran", "megatron"))
    assert "between stages on InfiniBand" in ours["exposed"]
    assert "between stages on InfiniBand" not in megatron["exposed"]
    assert megatron["exposed"]["gradients on InfiniBand"] < ours["exposed"]["gradients on InfiniBand"]


def test_the_attention_of_llm_foundry_does_not_use_hoppers_instructions() -> None:
    a100, h100 = (rates_of(DEVICES[name], "bf16") for name in ("A100-80GB", "H100"))
    old, new = (attention_seconds(1e15, 65536, 128, kernel="flash-1", rates=rates) for rates in (a100, h100))
    clock_and_size = 132 * 1.755 / (108 * 1.41)
    assert old[0] / new[0] == pytest.approx(clock_and_size, rel=0.02)
    assert old[1] / new[1] == pytest.approx(clock_and_size, rel=0.02)
    assert new > attention_seconds(1e15, 65536, 128, kernel="flash-2", rates=h100)
    assert new > attention_seconds(1e15, 65536, 128, kernel="torch", rates=h100)


def test_llm_foundry_on_512_gpus_is_nearly_as_fast_as_on_64() -> None:
    shape = {"layers": 32, "hidden": 4096, "heads": 32, "ffn": 16384, "vocab": 50368, "seq_len": 2048, "gated": False}
    few, many = (
        predict_line({
            "model": shape, "cluster": f"{nodes}x8xH100", "stack": "llm-foundry",
            "plan": {"sharding": "parameters", "micro_batch": 6, "global_batch": 48 * nodes},
        })["tokens_per_second_per_gpu"]
        for nodes in (8, 64)
    )  # fmt: skip
    assert 0.9 * few < many < few


@pytest.mark.parametrize("compiled", [True, False])
def test_torchtitan_in_fp8_gathers_one_byte_and_saves_less(compiled: bool) -> None:
    asked = {"model": {"preset": "llama-3-8b", "seq_len": 8192}, "cluster": "8xH200", "stack": "torchtitan"}
    plan = {"sharding": "parameters", "micro_batch": 1, "global_batch": 8, "compile": compiled}
    wide, narrow = (predict_line(asked | {"plan": plan | {"precision": each}}) for each in ("bf16", "fp8"))
    assert narrow["peak_bytes"] / 2**30 == pytest.approx(47, rel=0.02)
    assert narrow["memory"]["activations"] < 0.7 * wide["memory"]["activations"]
    kept = {"comm": {"reshard": "never"}}
    wide, narrow = (predict_line(asked | {"plan": plan | kept | {"precision": each}}) for each in ("bf16", "fp8"))
    assert narrow["memory"]["gathered"] < 0.7 * wide["memory"]["gathered"]


def test_every_blackwell_device_has_its_rates() -> None:
    assert find_device("GB300-NVL72").name == "GB300"
    for name in ("B200", "B300", "GB200", "GB300"):
        assert name in SUSTAINED_FRACTION
        assert name in MULTIPROCESSORS
        assert GENERATIONS[name] == "blackwell"
        assert rates_of(DEVICES[name], "bf16").generation == "blackwell"
    gb300 = DEVICES["GB300"]
    assert gb300.memory_bytes > DEVICES["GB200"].memory_bytes
    assert (gb300.peak("bf16"), gb300.peak("fp8"), gb300.node_size) == (2.5e15, 5e15, 72)


def test_a_device_without_published_steps_has_a_wider_error_bar() -> None:
    job = Job(outline=outline_of(PRESETS["llama-3.1-8b"]), seq_len=4096)
    plan = Plan(precision="bf16")

    def error(name: str, **reached: float) -> float:
        device = DEVICES[name]
        return error_of(job, Cluster(device=replace(device, reached={**device.reached, **reached})), plan)

    for name in ("MI300X", "B200", "GB300", "RTX4090"):
        assert error(name) == RELATIVE_ERROR["unknown rate"] > error("H100")
        assert error(name, bf16=4e14) < error(name), "a measured rate needs no assumption"
    assert error("GB200") == error("H100")
