"""The doctor on a GPU: a launch-bound run and the patch that helps; an injected host sync."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.environment import environment
from trimaran.core import Recipe, parse_recipe
from trimaran.doctor.diagnose import diagnose
from trimaran.doctor.evidence import read_evidence
from trimaran.doctor.predicted_gain import apply_patch
from trimaran.doctor.step_breakdown import step_breakdown
from trimaran.hardware import parse_cluster
from trimaran.models import outline_if_known, spec_of
from trimaran.planner import choose
from trimaran.run import RunDirectory, create_run

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
from trimaran.nets.decoder import Layer
from trimaran.run import open_run
from trimaran.train.process.rank_info import read_rank_info
from trimaran.train.worker import run_worker

forward = Layer.forward

def waits(self, stream, *rest, **named):
    assert stream.detach().abs().max().item() < 1e9
    return forward(self, stream, *rest, **named)

if sys.argv[2] == "wait":
    Layer.forward = waits
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
