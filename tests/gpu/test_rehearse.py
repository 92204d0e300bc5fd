"""Ranks of multi-GPU plans, rehearsed on one GPU. Skipped elsewhere; run on the H200 before a release."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from trimaran.core import Plan

pytestmark = pytest.mark.gpu

SHAPE = "model.shape={layers: 4, hidden: 1024, heads: 16, kv_heads: 8, head_dim: 64, ffn: 2816, vocab: 32000}"
PLANS = {
    "zero-3": "{mesh: {dp_shard: 8}, sharding: parameters, compile: true, micro_batch: 4}",
    "zero-1": "{mesh: {dp_shard: 8}, sharding: optimizer, micro_batch: 2, grad_accum: 2}",
    "captured replicas": "{mesh: {dp_replicate: 4}, comm: {overlap: false}, micro_batch: 4}",
    "tp": "{mesh: {tp: 4}, micro_batch: 4}",
    "pp": "{mesh: {pp: 4}, pipeline: {schedule: 1f1b}, micro_batch: 2, grad_accum: 8}",
    "interleaved": "{mesh: {pp: 2}, pipeline: {schedule: interleaved}, micro_batch: 2, grad_accum: 4}",
    "zero-bubble": "{mesh: {pp: 2}, pipeline: {schedule: zero-bubble}, micro_batch: 2, grad_accum: 4}",
    "cp": "{mesh: {dp_shard: 2, cp: 2}, sharding: parameters, micro_batch: 4}",
    "product": "{mesh: {dp_shard: 2, tp: 2, pp: 2}, pipeline: {schedule: 1f1b}, sharding: optimizer, micro_batch: 2, "
    "grad_accum: 4, recompute: full}",
}


def rehearsed(plan: str, cluster: str, folder: Path, *settings: str, layers: int = 0) -> dict[str, Any]:
    words = ["rehearse", "--cluster", cluster, "--steps", "3", "--json", "--layers", str(layers), "--seq-len", "1024"]
    words += [word for each in (f"plan={plan}", *settings) for word in ("--set", each)]
    environment = os.environ | {"TRIMARAN_CACHE": str(folder)}
    command = [sys.executable, "-m", "trimaran", *words]
    done = subprocess.run(command, env=environment, timeout=600, check=False, capture_output=True, text=True)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rehearsals")


@pytest.mark.parametrize("name", PLANS)
def test_ranks_of_every_axis_run_alone_on_one_gpu(name: str, folder: Path) -> None:
    plan = PLANS[name].replace("{mesh", "{precision: bf16, mesh", 1)
    parsed = Plan.model_validate(yaml.safe_load(plan))
    batch = f"train.global_batch={parsed.global_batch}"
    answer = rehearsed(plan, f"{parsed.mesh.world_size}xH200", folder, SHAPE, batch)
    for rank in answer["ranks"]:
        assert rank["status"] == "measured", rank["message"]
        measured, predicted = rank["measured"], rank["predicted"]
        assert measured["num_refused"] == 0
        assert measured["reserved_bytes"] >= measured["peak_bytes"] >= measured["steady_peak_bytes"] > 0
        assert 0.5 < predicted["peak_bytes"] / measured["peak_bytes"] < 2
        assert sum(measured["phases"].values()) == pytest.approx(measured["step_seconds"], rel=0.3)
    assert answer["step"]["seconds"] > 0


def test_fewer_layers_extrapolate_to_all(folder: Path) -> None:
    plan = "{precision: bf16, mesh: {dp_shard: 8}, sharding: parameters, micro_batch: 4}"
    settings = (SHAPE.replace("layers: 4", "layers: 8"), "train.global_batch=32")
    whole = rehearsed(plan, "8xH200", folder, *settings)["ranks"][0]["measured"]
    fewer = rehearsed(plan, "8xH200", folder, *settings, layers=2)["ranks"][0]["measured"]
    assert fewer["peak_bytes"] == pytest.approx(whole["peak_bytes"], rel=0.03)
