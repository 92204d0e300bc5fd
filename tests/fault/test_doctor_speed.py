"""The doctor on real slow runs: the culprit, and whether the patch helps."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.diagnosed_runs import (
    VLM_SETTINGS,
    findings,
    in_slow_network,
    measured,
    recipe_of,
    train,
    with_patch,
    write_chats,
    write_images,
)
from tests.fault.harness import SECONDS, start_module, wait_for
from tests.fault.injections import compile_each_step, forward_slowly, load_slowly, sync_slowly, wait_for_values
from trimaran.doctor import read_evidence
from trimaran.runs import RunDirectory

pytestmark = pytest.mark.chaos


def test_a_slow_loader_is_found_and_more_processes_help(tmp_path: Path) -> None:
    slowly = partial(load_slowly, 0.1)  # much longer than compute
    recipe = recipe_of(
        "cluster=1xcpu", "train.steps=17", "data.seq_len=16", "train.global_batch=4",
        "model.shape={layers: 1, hidden: 32, heads: 2, kv_heads: 2, ffn: 64}",
    )  # fmt: skip
    slow = train(recipe, tmp_path / "slow", slowly)
    found = findings(slow)["F001"]
    assert found.culprit == "the loader thread"
    assert found.evidence["data_share"] > 0.3
    assert found.patch.keys() == {"data.workers"}
    fast = train(with_patch(recipe, found), tmp_path / "fast", slowly)
    assert found.gain is not None
    assert measured(fast).step < (1 - found.gain / 2) * measured(slow).step


def test_a_slow_network_is_found_and_fewer_bytes_help(tmp_path: Path) -> None:
    recipe = recipe_of("cluster=2xcpu", "model.shape={layers: 4, hidden: 128, heads: 4, kv_heads: 4, ffn: 512}")
    slow = in_slow_network("200mbit", train, recipe, tmp_path / "slow")
    found = findings(slow)["F002"]
    assert found.culprit == "gradients on loopback"
    assert found.patch == {"plan.comm.compression": "bf16"}
    assert "slower than the plan assumed" in found.fix
    fast = in_slow_network("200mbit", train, with_patch(recipe, found), tmp_path / "fast")
    assert found.gain is not None
    assert measured(fast).step < (1 - found.gain / 2) * measured(slow).step
    assert "F002" not in findings(train(recipe, tmp_path / "healthy"))


@pytest.mark.parametrize("world", [2, 4])
def test_a_throttled_rank_is_named(tmp_path: Path, world: int) -> None:
    recipe = recipe_of(f"cluster={world}xcpu", "train.steps=17")
    found = findings(train(recipe, tmp_path / "runs", partial(forward_slowly, 0.125, rank=1)))["F005"]
    assert found.culprit == "rank 1"
    assert found.evidence["kind"] == "hardware"
    assert "as much work as the others" in found.verdict


def test_a_small_micro_batch_is_found_and_a_larger_one_helps(tmp_path: Path) -> None:
    recipe = recipe_of("cluster=1xcpu", "plan.micro_batch=1", "plan.grad_accum=16", "data.seq_len=32")
    slow = train(recipe, tmp_path / "slow")
    found = findings(slow)["F006"]
    assert found.patch == {"plan.micro_batch": 16, "plan.grad_accum": 1}
    assert measured(train(with_patch(recipe, found), tmp_path / "fast")).step < 0.9 * measured(slow).step


def test_synchronous_checkpoints_are_found_and_asynchronous_ones_help(tmp_path: Path) -> None:
    slowly = partial(sync_slowly, 0.1)
    recipe = recipe_of("cluster=1xcpu", "checkpoint.asynchronous=false", "checkpoint.every=5")
    slow = train(recipe, tmp_path / "slow", slowly)
    found = findings(slow)["F007"]
    assert found.evidence["every_steps"] == 5
    assert found.culprit == "synchronous checkpoints"
    assert found.patch == {"checkpoint.asynchronous": True}
    assert measured(train(with_patch(recipe, found), tmp_path / "fast", slowly)).step < 0.9 * measured(slow).step


def test_uneven_stages_are_found_and_an_even_split_helps(tmp_path: Path) -> None:
    slowly = partial(forward_slowly, 0.01)  # so that layers take equally long on a busy machine
    recipe = recipe_of(
        "cluster=2xcpu", "model.shape={layers: 8, hidden: 64, heads: 4, kv_heads: 2, ffn: 128}", "plan.mesh.pp=2",
        "plan.micro_batch=2", "plan.grad_accum=8", "plan.pipeline.schedule=1f1b", "plan.pipeline.stages=[7, 1]",
    )  # fmt: skip
    slow = train(recipe, tmp_path / "slow", slowly)
    found = findings(slow)["F011"]
    assert found.culprit == "stage 0"
    assert found.patch == {"plan.pipeline.stages": [4, 4]}
    assert found.evidence["stage_seconds"][0] > 3 * found.evidence["stage_seconds"][1]
    assert measured(train(with_patch(recipe, found), tmp_path / "fast", slowly)).step < 0.9 * measured(slow).step


def test_padding_is_found_and_packing_trains_more_samples_per_second(tmp_path: Path) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", lengths=[1, 2, 3, 14])
    recipe = recipe_of("cluster=1xcpu", "data.source=chat", f"data.path={chats}", "data.samples.batching=pad")
    padded = train(recipe, tmp_path / "padded")
    found = findings(padded)["F012"]
    assert found.patch == {"data.samples.batching": "pack"}
    packed = train(with_patch(recipe, found), tmp_path / "packed")
    assert "F012" not in findings(packed)
    assert samples_per_second(packed) > 1.2 * samples_per_second(padded)


def samples_per_second(run: RunDirectory) -> float:
    samples = [each["rows"]["samples"] for each in read_evidence(run).steps]
    return sum(samples) / len(samples) / measured(run).step


def test_unequal_images_are_found_and_balancing_by_cost_helps(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", sides=[16, 16, 16, 160])
    recipe = recipe_of(*VLM_SETTINGS, f"data.path={images}")
    found = findings(train(recipe, tmp_path / "in_order"))["F013"]
    assert found.culprit == "image patches"
    assert found.patch == {"data.samples.balance": True}
    even = findings(train(with_patch(recipe, found), tmp_path / "even")).get("F013")
    assert even is None or even.evidence["slowest_over_mean"] < found.evidence["slowest_over_mean"]


def test_an_injected_host_sync_is_found_in_a_profile(tmp_path: Path) -> None:
    recipe = recipe_of("cluster=1xcpu", "telemetry.profile=10:13")
    assert "F009" not in findings(train(recipe, tmp_path / "healthy"))
    found = findings(train(recipe, tmp_path / "waiting", wait_for_values))["F009"]
    assert found.culprit == "forward, after aten::max"
    assert found.evidence["waits_a_step"] == 4  # one in each layer


def test_repeated_recompilations_are_found(tmp_path: Path) -> None:
    found = findings(train(recipe_of("cluster=1xcpu"), tmp_path / "runs", compile_each_step))["F008"]
    assert "size mismatch" in found.evidence["why"]
    assert found.culprit.startswith("<lambda> (injections.py:")
    assert found.patch == {"plan.compile": False}


def test_other_processes_on_the_machine_are_named(tmp_path: Path) -> None:
    run, hogs = RunDirectory(tmp_path / "run"), []
    settings = [*TRAINED, "--set", "cluster=2xcpu", "--set", "telemetry.sample_seconds=1"]
    words = ("trimaran", "train", "--run-dir", str(run.path), *settings)
    training = start_module(*words, output=subprocess.DEVNULL)
    try:
        wait_for(run.plan.exists)  # made while no other process runs
        hogs += [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(8)]
        assert training.wait(SECONDS) == 0
    finally:
        for each in (training, *hogs):
            each.kill()
            each.wait()
    assert findings(run)["F015"].culprit == "other processes"


TRAINED = tuple(
    part
    for each in ("train.steps=16", "train.sample.tokens=0", "train.evaluate.batches=0", "train.global_batch=32")
    for part in ("--set", each)
)
# Healthy plans of many kinds.
CLEAN = {
    "one": ["cluster=1xcpu"],
    "accumulated": ["cluster=1xcpu", "plan.grad_accum=2"],
    "replicas": ["cluster=2xcpu"],
    "sharded": ["cluster=2xcpu", "plan.mesh.dp_shard=2", "plan.sharding=parameters"],
    "zero-1": ["cluster=2xcpu", "plan.mesh.dp_shard=2", "plan.sharding=optimizer"],
    "tensor": ["cluster=2xcpu", "plan.mesh.tp=2"],
    "pipeline": ["cluster=2xcpu", "plan.mesh.pp=2", "plan.pipeline.schedule=1f1b"],
    "context": ["cluster=2xcpu", "plan.mesh.cp=2"],
    "bf16": ["cluster=1xcpu", "plan.precision=bf16"],
    "zero-2": ["cluster=2xcpu", "plan.mesh.dp_shard=2", "plan.sharding=gradients"],
    "processes": ["cluster=1xcpu", "data.workers=1", "checkpoint.every=10"],
}


@pytest.mark.parametrize("plan", CLEAN)
def test_a_clean_run_has_no_finding(tmp_path: Path, plan: str) -> None:
    found = findings(train(recipe_of(*CLEAN[plan]), tmp_path / "runs"))
    assert {code: each.verdict for code, each in found.items() if code < "F050"} == {}
