"""Low precision on a GPU: fp8 matmuls, fp16 with its loss scale, and updates without synchronization."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from trimaran.core import Mesh, Plan, Recipe
from trimaran.models import PRESETS
from trimaran.nets import Network, decoder_network, initialise
from trimaran.parallel import RankMesh, TrainedParameters, apply_fp8, autocast, build_mesh, override_precision
from trimaran.runs import create_run
from trimaran.train import Updater, join_process_group, read_rank_info

pytestmark = pytest.mark.gpu

SHAPE = {"layers": 2, "hidden": 512, "heads": 8, "kv_heads": 8, "head_dim": 64, "ffn": 1024}
SPEC = replace(PRESETS["tiny"], **SHAPE)
PLANS = {
    "fp32": Plan(micro_batch=8),
    "bf16": Plan(micro_batch=8, precision="bf16"),
    "fp16": Plan(micro_batch=4, grad_accum=2, precision="fp16"),
    "fp8": Plan(micro_batch=8, precision="fp8"),
    "fp8-compiled": Plan(micro_batch=8, precision="fp8", compile=True),
    "fp8-sharded": Plan(micro_batch=8, precision="fp8", sharding="parameters"),
}


def run_metrics(name: str, folder: Path, **train: object) -> list[dict[str, float]]:
    """Return the metrics of a run in a new process: a process that has used the GPU must not be forked."""
    recipe = Recipe.model_validate(
        {
            "model": {"preset": "tiny", "shape": SHAPE},
            "train": {"steps": 20, "global_batch": 8, "save": False, "sample": {"tokens": 0}} | train,
        }
    )
    run = create_run(folder / name, recipe, PLANS[name])
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "1", "TRIMARAN_CACHE": str(folder / "cache")}
    done = subprocess.run([sys.executable, "-m", "trimaran.train", run.path], env=environment, timeout=300)
    assert done.returncode == 0, run.events(0).read_text() + run.log(0).read_text()
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


def losses(name: str, folder: Path) -> list[float]:
    return [line["loss"] for line in run_metrics(name, folder)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("precision")


@pytest.fixture(scope="module")
def bf16(folder: Path) -> list[float]:
    return losses("bf16", folder)


@pytest.mark.parametrize("name", ["fp8", "fp8-compiled", "fp8-sharded"])
def test_fp8_follows_bf16_within_two_percent(folder: Path, bf16: list[float], name: str) -> None:
    ours = losses(name, folder)
    assert ours == pytest.approx(bf16, rel=0.02)
    assert ours != bf16
    assert ours[-1] < 0.7 * ours[0]


def test_fp16_follows_fp32_and_reports_its_loss_scale(folder: Path) -> None:
    ours, reference = run_metrics("fp16", folder), losses("fp32", folder)
    assert [line["loss"] for line in ours] == pytest.approx(reference, rel=0.01)
    assert all(line["loss_scale"] == 2.0**16 for line in ours)


@pytest.fixture
def ranks() -> Iterator[RankMesh]:
    join_process_group(read_rank_info({}))
    yield build_mesh(Mesh(), device_type="cuda")
    dist.destroy_process_group()


def network_on_gpu(**patterns: str) -> Network:
    network = decoder_network(SPEC)
    initialise(network.module, seed=0, spec=SPEC)
    network.module.to("cuda")
    override_precision(network, patterns, torch.device("cuda"))
    return network


def gradients(network: Network, plan: Plan) -> None:
    tokens = torch.randint(0, SPEC.vocab, (2, 128), generator=torch.Generator().manual_seed(7)).cuda()
    with autocast(plan, torch.device("cuda")):
        logits, _ = network.forward({"tokens": tokens})
    F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()


def test_every_large_layer_of_the_blocks_uses_fp8(ranks: RankMesh) -> None:
    plan = PLANS["fp8"]
    network = network_on_gpu()
    names = [name for name, _ in network.module.named_parameters()]
    apply_fp8(network, plan, ranks)
    assert [name for name, _ in network.module.named_parameters()] == names
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        gradients(network, plan)
    (products,) = [each.count for each in profile.key_averages() if each.key == "aten::_scaled_mm"]
    # Four attention and three feed-forward matmuls per layer: forward and two gradients.
    assert products == 3 * 7 * SPEC.layers
    assert all(each.grad is not None and each.grad.dtype == torch.float32 for each in network.module.parameters())


def test_an_fp32_head_is_fp32_on_a_gpu() -> None:
    network = network_on_gpu(lm_head="fp32")
    with autocast(PLANS["bf16"], torch.device("cuda")):
        logits, _ = network.forward({"tokens": torch.zeros(1, 16, dtype=torch.int64, device="cuda")})
    assert logits.dtype == torch.float32


def test_a_bf16_update_never_synchronizes(ranks: RankMesh) -> None:
    network = network_on_gpu()
    parameters = list(network.module.parameters())
    trained, optimizer = TrainedParameters({"language": parameters}), torch.optim.AdamW(parameters, fused=True)
    updater = Updater(optimizer, ranks, trained=trained, clip_norm=1.0)
    loss = torch.ones((), device="cuda")
    for mode in ("default", "error"):  # the first step initializes NCCL and the optimizer
        gradients(network, PLANS["bf16"])
        torch.cuda.set_sync_debug_mode(mode)
        try:
            norm, refused = updater.update(1e-3, loss, updater.measure_gradients())
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert norm.isfinite()
    assert not refused
