"""DeepSpeed on a GPU: offload to pinned memory, bf16 weights, NCCL."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trimaran.core import Plan, Recipe
from trimaran.runs import create_run

pytestmark = pytest.mark.gpu

RECIPE = Recipe.model_validate({"train": {"steps": 20, "global_batch": 8, "sample": {"tokens": 8}}})


def losses(folder: Path, **fields: object) -> list[float]:
    plan = Plan.model_validate({"micro_batch": 4, "grad_accum": 2, **fields})
    run = create_run(folder / "-".join(map(str, fields.values())), RECIPE, plan)
    # A new process: one forked from a process that has initialised CUDA cannot use CUDA.
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    environment = os.environ | rank | {"TRIMARAN_CACHE": str(folder / "cache")}
    done = subprocess.run([sys.executable, "-m", "trimaran.train", run.path], env=environment, timeout=300)
    assert done.returncode == 0, run.log(0).read_text()
    assert (run.model / "model.safetensors").exists()
    return [json.loads(line)["loss"] for line in run.metrics.read_text().splitlines()]


@pytest.fixture(scope="module", autouse=True)
def deepspeed() -> None:
    pytest.importorskip("deepspeed", reason="needs the extra: pip install trimaran[deepspeed]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deepspeed-gpu")


@pytest.fixture(scope="module")
def fp32(folder: Path) -> list[float]:
    return losses(folder)


@pytest.mark.parametrize(
    ("sharding", "offload"), [("gradients", "none"), ("gradients", "optimizer"), ("parameters", "parameters")]
)
def test_fp32_matches_the_torch_engine(folder: Path, fp32: list[float], sharding: str, offload: str) -> None:
    trajectory = losses(folder, engine="deepspeed", sharding=sharding, offload=offload)
    assert trajectory == pytest.approx(fp32, rel=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_stays_close_to_fp32(folder: Path, fp32: list[float], precision: str) -> None:
    trajectory = losses(folder, engine="deepspeed", sharding="parameters", offload="parameters", precision=precision)
    assert trajectory == pytest.approx(fp32, rel=0.02)
