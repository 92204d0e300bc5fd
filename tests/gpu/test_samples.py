"""Images and scenes on a GPU: complete runs, and batches in pinned memory."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.parity import plan_for
from trimaran.core import Recipe
from trimaran.data import DataShare, LoadedArrays, Loader, LoaderLimits
from trimaran.runs import create_run

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
STEPS = 12
DATA: dict[str, dict[str, Any]] = {"vlm": {"source": "shapes", "seq_len": 256}, "perception": {"source": "scenes"}}
FAMILIES = pytest.mark.parametrize("family", DATA)


def recipe_for(family: str, *, workers: int = 0, freeze: Sequence[str] = (), **samples: Any) -> Recipe:
    tree: dict[str, Any] = {
        "model": {"family": family, "preset": "tiny", "freeze": freeze},
        "data": {"workers": workers, **DATA[family]} | ({"samples": samples} if samples else {}),
        "train": {"steps": STEPS, "global_batch": 8, "lr": 2e-3, "evaluate": {"batches": 2}},
        "checkpoint": {"every": 0},
    }
    return Recipe.model_validate(tree)


def run_metrics(folder: Path, recipe: Recipe, **plan: Any) -> list[dict[str, Any]]:
    """Return the metrics of a complete run in a new process, as in `test_one_gpu`."""
    run = create_run(folder / f"run-{len(list(folder.iterdir()))}", recipe, plan_for(recipe, grad_accum=2, **plan))
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "1", "TRIMARAN_CACHE": str(folder / "cache")}
    done = subprocess.run([sys.executable, "-m", "trimaran.train", run.path], env=environment, timeout=300)
    events = [json.loads(line) for line in run.events(0).read_text().splitlines()]
    assert done.returncode == 0, events[-1]
    accuracy = [each["data"]["accuracy"] for each in events if each["kind"] == "evaluation"]
    assert all(0 <= share <= 1 for each in accuracy for share in each.values())
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return lines


def losses(lines: list[dict[str, Any]]) -> list[float]:
    return [line["loss"] for line in lines]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("samples")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Callable[[str], list[dict[str, Any]]]:
    """Return a function that runs a family in fp32 with a loading thread, once."""
    made: dict[str, list[dict[str, Any]]] = {}

    def of(family: str) -> list[dict[str, Any]]:
        if family not in made:
            made[family] = run_metrics(folder, recipe_for(family))
        return made[family]

    return of


@FAMILIES
def test_a_complete_run_learns(plain: Callable[[str], list[dict[str, Any]]], family: str) -> None:
    lines = plain(family)
    assert np.mean(losses(lines)[-3:]) < 0.9 * losses(lines)[0]
    assert all(line["rows"].get("bad", 0) == 0 for line in lines)
    assert all(norm["grad_norm"] > 0 for norm in lines[0]["towers"].values())


@FAMILIES
def test_loader_processes_change_nothing(
    folder: Path, plain: Callable[[str], list[dict[str, Any]]], family: str
) -> None:
    lines = run_metrics(folder, recipe_for(family, workers=2))
    assert [line["rows"] for line in lines] == [line["rows"] for line in plain(family)]
    assert losses(lines) == pytest.approx(losses(plain(family)), rel=1e-2)


@FAMILIES
def test_bf16_follows_fp32(folder: Path, plain: Callable[[str], list[dict[str, Any]]], family: str) -> None:
    lines = run_metrics(folder, recipe_for(family), precision="bf16")
    assert losses(lines) == pytest.approx(losses(plain(family)), rel=0.1)
    assert losses(lines)[0] == pytest.approx(losses(plain(family))[0], rel=0.02)


def test_cached_features_replace_a_frozen_tower(folder: Path) -> None:
    frozen, kept = (
        run_metrics(folder, recipe_for("vlm", freeze=["vision"], cache_features=cached)) for cached in (False, True)
    )
    assert losses(kept) == pytest.approx(losses(frozen), rel=1e-2)
    assert losses(kept)[0] == pytest.approx(losses(frozen)[0], rel=1e-5)


class RaggedFeed:
    """A feed whose batches differ in size; some are empty."""

    share = DataShare(rank=0, dp=1, micro_batch=2, grad_accum=1)

    def load(self, step: int, at: Callable[[int], None]) -> LoadedArrays:
        at(step)
        draw = np.random.default_rng(step)
        patches = draw.integers(0, 255, (step**3 % 1000, 48), dtype=np.uint8)
        arrays = {"tokens": draw.integers(0, 9, (1, 2, 8)), "patches": patches}
        return LoadedArrays(arrays=arrays, num_valid=16, offsets={"patches": (0, len(patches))})

    def samples(self, step: int, data_ranks: Sequence[int]) -> tuple[int, ...]:
        return (step,)

    def num_quarantined(self, step: int) -> int:
        return 0


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_use_pinned_memory_and_arrive_complete(workers: int) -> None:
    torch.zeros(1, device=GPU)  # the workers are forked from a process that has used the GPU
    limits = LoaderLimits(cores=4, free_bytes=1 << 30, pin_memory=GPU.type == "cuda")
    there = []
    with Loader(RaggedFeed(), steps=40, workers=workers, limits=limits) as loader:
        for batch in loader:
            assert all(each.is_pinned() == limits.pin_memory for each in batch.arrays.values() if each.numel())
            there.append(batch.to(GPU))  # all copies are in flight: memory that is reused too early would show
    assert len(there) == 40
    for step, batch in enumerate(there):
        wanted = RaggedFeed().load(step, lambda _: None).arrays
        for name, each in batch.arrays.items():
            assert np.array_equal(each.cpu().numpy(), wanted[name]), (step, name)
