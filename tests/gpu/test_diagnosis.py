"""The doctor on a GPU: a launch-bound run and the patch that helps; an injected host sync."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from tests.environment import environment
from trimaran.core import Recipe, parse_recipe
from trimaran.doctor import apply_patch, diagnose, read_evidence, steady_steps, step_breakdown
from trimaran.machine import parse_cluster
from trimaran.models import outline_if_known, spec_of
from trimaran.planner import choose
from trimaran.runs import RunDirectory, create_run

pytestmark = pytest.mark.gpu

SMALL = (
    "model.shape={layers: 12, hidden: 512, heads: 8, kv_heads: 8, ffn: 1536}",
    "cluster=auto",
    "data.seq_len=256",
    "train.steps=30",
    "train.global_batch=32",
    "train.sample.tokens=0",
    "train.evaluate.batches=0",
    "train.save=false",
)
# Every layer reads a scalar, as a careless check would.
WAITS = """
import os, sys
from pathlib import Path
from trimaran.data import cache_folder
from trimaran.nets.decoder.decoder import DecoderLayer
from trimaran.runs import open_run
from trimaran.train.process.rank_setup import read_rank_info
from trimaran.train.worker import run_worker

forward = DecoderLayer.forward

def waits(self, stream, *rest, **named):
    assert stream.detach().abs().max().item() < 1e9
    return forward(self, stream, *rest, **named)

if sys.argv[2] == "wait":
    DecoderLayer.forward = waits
sys.exit(run_worker(open_run(Path(sys.argv[1])), read_rank_info(os.environ), cache=cache_folder(os.environ)))
"""


def train(recipe: Recipe, folder: Path, *, waits: bool = False) -> RunDirectory:
    cluster = parse_cluster(recipe.cluster)
    cluster = replace(cluster, num_nodes=1, devices_per_node=1)
    plan = choose(recipe, spec_of(recipe.model), cluster, outline_if_known(recipe.model, recipe.data))
    run = create_run(folder / f"run-{len(list(folder.iterdir()))}", recipe, plan)
    ours = environment(RANK="0", WORLD_SIZE="1", TRIMARAN_CACHE=str(folder.parent / "cache"))
    command = [sys.executable, "-c", WAITS, str(run.path), "wait" if waits else "train"]
    assert subprocess.run(command, env=ours, timeout=300).returncode == 0, run.log(0).read_text()
    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


@pytest.mark.whole_gpu
def test_small_kernels_are_found_and_the_patch_shortens_the_step(folder: Path) -> None:
    pins = ("plan.micro_batch=1", "plan.grad_accum=32", "plan.precision=bf16", "plan.compile=false")
    recipe = parse_recipe("", name="test", overrides=[*SMALL, *pins])
    slow = read_evidence(train(recipe, folder))
    found = {each.code: each for each in diagnose(slow)}["F003"]
    assert found.patch["plan.micro_batch"] > 1
    fast = read_evidence(train(apply_patch(recipe, found.patch), folder))
    before, after = step_breakdown(slow), step_breakdown(fast)
    assert before is not None
    assert after is not None
    assert found.gain is not None
    assert after.step < (1 - found.gain / 2) * before.step


def test_an_injected_host_sync_is_found_in_a_trace_and_a_healthy_run_has_none(folder: Path) -> None:
    recipe = parse_recipe("", name="test", overrides=[*SMALL, "telemetry.profile=10:13", "plan.compile=false"])
    healthy = {each.code for each in diagnose(read_evidence(train(recipe, folder)))}
    assert "F009" not in healthy
    found = {each.code: each for each in diagnose(read_evidence(train(recipe, folder, waits=True)))}["F009"]
    assert found.culprit.startswith("forward")
    assert found.evidence["waits_a_step"] >= 12


@pytest.mark.whole_gpu
def test_the_metrics_say_whether_the_host_is_the_limit(folder: Path) -> None:
    pins = ("plan.precision=bf16", "plan.compile=false", "plan.cuda_graphs=false", "plan.grad_accum=1")
    large = "model.shape={layers: 4, hidden: 4096, heads: 32, kv_heads: 32, ffn: 12288}"
    runs = [(*SMALL, *pins, "train.global_batch=2"), (*SMALL, *pins, large, "data.seq_len=2048")]
    small, busy = (read_evidence(train(parse_recipe("", name="test", overrides=each), folder)) for each in runs)
    limited, not_limited = (fmean("host_bound" in step for step in steady_steps(each)) for each in (small, busy))
    assert limited > 0.9
    assert not_limited < 0.1
    assert {"F003", "F016"} & {each.code for each in diagnose(small)}
    assert not {"F003", "F016"} & {each.code for each in diagnose(busy)}
    for step in steady_steps(busy):
        assert 0 < step["host_seconds"] < step["step_seconds"]
