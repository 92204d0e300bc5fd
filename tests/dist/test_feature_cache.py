"""Cached features of a frozen vision tower: the same training without running the tower."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.modules.module import register_module_forward_pre_hook

from tests.parity import Trajectory, assert_same_trajectory, plan_for, trajectory_of
from tests.ranks import run_ranks
from trimaran.core import Plan, Recipe, UserError
from trimaran.data import BF16, BadSampleError, FeatureCache
from trimaran.nets import VisionTower
from trimaran.runs import RunDirectory, create_run
from trimaran.train import read_rank_info, run_worker
from trimaran.train.features.vision_features import refuse_trained_tower


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fourteen images of many shapes with captions; one of them is truncated."""
    folder = tmp_path_factory.mktemp("pictures")
    draw = np.random.default_rng(0)
    for number in range(14):
        height, width = draw.integers(32, 96, 2)
        file = folder / f"{number:02d}.png"
        Image.fromarray(draw.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(file)
        file.with_suffix(".txt").write_text(f"image {number}, {width} by {height}")
    truncated = folder / "05.png"
    truncated.write_bytes(truncated.read_bytes()[:2000])
    return folder


def recipe_of(images: Path, *, cached: bool, freeze: tuple[str, ...] = ("vision",)) -> Recipe:
    samples = {"cache_features": cached, "max_bad": 0.5}
    tree: dict[str, Any] = {
        "model": {"family": "vlm", "preset": "tiny", "freeze": freeze},
        "data": {"source": "image-folder", "path": str(images), "seq_len": 128, "holdout": 0, "samples": samples},
        "train": {"steps": 4, "global_batch": 4, "evaluate": {"batches": 0}, "sample": {"tokens": 0}},
    }
    return Recipe.model_validate(tree)


def without_key_biases(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory without key biases.

    A key bias adds the same value to all attention scores of a row. Its gradient is only rounding, which AdamW
    amplifies.
    """
    weights = {name: each for name, each in trajectory.weights.items() if not name.endswith("k_proj.bias")}
    return replace(trajectory, weights=weights)


def work(path: Path, cache: Path) -> int:
    """Train, and return how often the tower was run."""
    calls: list[int] = []
    hook = register_module_forward_pre_hook(
        lambda module, _: calls.append(1) if isinstance(module, VisionTower) else None
    )
    assert run_worker(RunDirectory(path), read_rank_info(os.environ), cache=cache) == 0
    hook.remove()
    return len(calls)


def train(folder: Path, recipe: Recipe, plan: Plan) -> tuple[Trajectory, int]:
    """Return the trajectory of a run, and how often its ranks ran the tower."""
    run = create_run(folder / f"run-{len(list(folder.iterdir()))}", recipe, plan)
    calls = run_ranks(plan.mesh.world_size, work, run.path, folder / "cache")
    return without_key_biases(trajectory_of(run)), sum(calls)


def test_training_on_cached_features_is_the_same_and_never_runs_the_tower(images: Path, tmp_path: Path) -> None:
    plain, cached = (recipe_of(images, cached=each) for each in (False, True))
    reference, calls = train(tmp_path, plain, plan_for(plain, grad_accum=1))
    assert calls >= plain.train.steps
    first, calls = train(tmp_path, cached, plan_for(cached, grad_accum=1, dp_shard=2))
    assert calls > 0, "the features are computed first"
    assert_same_trajectory(first, reference)
    (folder,) = (tmp_path / "cache" / "features").iterdir()
    files = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert "part-000000.bin" in files
    again, calls = train(tmp_path, cached, plan_for(cached, grad_accum=2))
    assert calls == 0
    assert_same_trajectory(again, reference)
    assert files == {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}


def test_the_features_of_a_trained_tower_cannot_be_cached(images: Path) -> None:
    with pytest.raises(UserError, match="T062: the vision tower is trained"):
        refuse_trained_tower(recipe_of(images, cached=True, freeze=("language",)))
    with pytest.raises(UserError, match="T062: only the family vlm can cache image features"):
        refuse_trained_tower(Recipe())


def filled_cache(folder: Path, tokens: np.ndarray, features: np.ndarray) -> FeatureCache:
    cache = FeatureCache(folder, tokens, width=4, dtype=np.dtype(np.float32), part_bytes=100)
    first = np.concatenate([[0], np.cumsum(tokens)])
    for part in cache.missing():
        numbers = cache.images(part)
        bad = {number: "torn" for number in numbers if number == 3}
        cache.write(part, features[first[numbers.start] : first[numbers.stop]], bad)
    return cache


def test_features_are_read_by_part_and_missing_parts_are_written_again(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(1, 9, 20)
    features = np.random.default_rng(1).random((tokens.sum(), 4), dtype=np.float32)
    cache = filled_cache(tmp_path / "a", tokens, features)
    assert cache.num_parts > 5
    assert not cache.missing()
    assert not cache.verify()
    ends = np.cumsum(tokens)
    for number in range(20):
        if number != 3:
            assert np.array_equal(cache.image(number), features[ends[number] - tokens[number] : ends[number]])
    with pytest.raises(BadSampleError, match="torn"):
        cache.image(3)
    (tmp_path / "a" / "part-000002.json").unlink()
    (tmp_path / "a" / "part-000004.bin").write_bytes(b"short")
    again = FeatureCache(tmp_path / "a", tokens, width=4, dtype=np.dtype(np.float32), part_bytes=100)
    assert again.missing() == [2, 4]
    assert not filled_cache(tmp_path / "a", tokens, features).verify()
    corrupted = tmp_path / "a" / "part-000001.bin"
    corrupted.write_bytes(bytes(len(corrupted.read_bytes())))
    assert FeatureCache(tmp_path / "a", tokens, width=4, dtype=np.dtype(np.float32), part_bytes=100).verify() == [1]


def test_bf16_features_are_stored_bit_by_bit(tmp_path: Path) -> None:
    features = torch.randn(6, 4).bfloat16()
    cache = FeatureCache(tmp_path, np.array([2, 4]), width=4, dtype=BF16)
    cache.write(0, features.view(torch.uint16).numpy(), {})
    back = torch.from_numpy(cache.image(1).copy()).view(torch.bfloat16)
    assert torch.equal(back, features[2:])
