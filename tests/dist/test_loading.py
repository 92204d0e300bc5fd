"""The loader in complete runs: its events and metrics, and samples that only some ranks can read."""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.dist.test_guard import BAD, assert_skipped, events, lines, recipe_with, run_of, watch_updates
from tests.environment import CACHE
from tests.parity import plan_for
from tests.ranks import run_ranks
from trimaran.app import main
from trimaran.core import Recipe
from trimaran.data import (
    FeatureCache,
    LoadedArrays,
    LoaderLimits,
    SampleFeed,
    SampleIndex,
    Sequences,
    TokenSample,
    loader_tuner,
)
from trimaran.runs import RunDirectory
from trimaran.train import loader_wait, read_rank_info, run_worker
from trimaran.train.features import vision_features
from trimaran.train.inputs import training_data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for runs, beside one with ten images of many shapes and their captions."""
    (folder := tmp_path_factory.mktemp("loading") / "runs").mkdir()
    (images := folder.parent / "pictures").mkdir()
    draw = np.random.default_rng(0)
    for number in range(10):
        height, width = draw.integers(32, 64, 2)
        file = images / f"{number:02d}.png"
        Image.fromarray(draw.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(file)
        file.with_suffix(".txt").write_text(f"image {number}, {width} by {height}")
    return folder


def vlm_recipe(folder: Path, **model: Any) -> Recipe:
    """Return a recipe for a vision-language model with the folder's images."""
    tree = recipe_with().model_dump(exclude={"model", "plan", "cluster"})
    data = {"source": "image-folder", "path": str(folder.parent / "pictures"), "seq_len": 64, "holdout": 0}
    kept = {"samples": {"cache_features": bool(model)}}
    return Recipe.model_validate(tree | {"model": {"family": "vlm", "preset": "tiny"} | model, "data": data | kept})


def work(path: Path) -> int:
    return run_worker(RunDirectory(path), read_rank_info(os.environ), cache=CACHE)


def train_with_failing_disk(path: Path) -> tuple[int, list[tuple[bool, bool]]]:
    """Train where only rank 1 cannot read the images of the bad step. Also returns the result of `watch_updates`."""
    load, read, at = SampleFeed.load, SampleIndex.image_bytes, [0]

    def loading(feed: SampleFeed, step: int, options: Any) -> LoadedArrays:
        at[0] = step + 1
        return load(feed, step, options)

    def reading(index: SampleIndex, number: int) -> bytes:
        if at[0] == BAD and os.environ["RANK"] == "1":
            raise OSError("the disk does not answer")
        return read(index, number)

    SampleFeed.load, SampleIndex.image_bytes = loading, reading  # pyrefly: ignore[bad-assignment]
    found = watch_updates()
    return work(path), found


@pytest.mark.parametrize(
    "fields", [pytest.param({"tp": 2}, marks=pytest.mark.slow), {"pp": 2, "grad_accum": 2}], ids=str
)
def test_a_step_is_refused_if_ranks_that_share_a_batch_loaded_different_samples(
    folder: Path, fields: dict[str, Any]
) -> None:
    recipe = vlm_recipe(folder)
    run = run_of(folder, recipe, plan_for(recipe, **({"grad_accum": 1} | fields)))
    data = assert_skipped(run, run_ranks(2, train_with_failing_disk, run.path))
    assert data["reason"] == "ranks that share a batch disagree on which samples are usable"
    assert (data["sample_ids"], data["action"]) == ([], "skip")
    assert not events(run, "bad_sample", 0)
    (*_, last) = events(run, "bad_sample", 1)
    assert last["step"] == BAD
    assert "the disk does not answer" in last["data"]["reason"]
    assert lines(run.metrics)[BAD - 1]["loss"] is None


def train_with_slow_samples(path: Path) -> int:
    """Train on sequences that load slowly, with a loader that may start two processes."""
    get = Sequences.__getitem__

    def slowly(sequences: Sequences, index: int) -> TokenSample:
        time.sleep(0.02)
        return get(sequences, index)

    Sequences.__getitem__ = slowly  # pyrefly: ignore[bad-assignment]
    loader_tuner.WINDOW_SECONDS = 0.1
    limits = LoaderLimits(cores=2, free_bytes=1 << 30)
    training_data.rank_loader_limits = lambda _: limits  # pyrefly: ignore[bad-assignment]
    return work(path)


def test_each_change_of_the_loader_is_an_event_and_its_waits_are_in_the_metrics(folder: Path) -> None:
    recipe = recipe_with(train={"steps": 30})
    run = run_of(folder, recipe, plan_for(recipe, grad_accum=1))
    assert run_ranks(1, train_with_slow_samples, run.path) == [0]
    first, *more = events(run, "loader")
    assert first["data"]["workers"] == 2
    assert first["data"].keys() == {"workers", "depth", "pinned", "reason"}
    assert "spent waiting for batches" in first["data"]["reason"]
    steps = [each["step"] for each in (first, *more)]
    assert steps == sorted(set(steps))
    waits: list[Any] = [line.get("loader") for line in lines(run.metrics)]
    assert waits[0] is None  # the first batch cannot be loaded ahead
    waited = [(each, line["phases"]["data"]) for each, line in zip(waits, lines(run.metrics), strict=True) if each]
    assert (waited[0][0]["workers"], waited[0][0]["depth"]) == (0, 2)
    assert max(each["waited"] for each, _ in waited) > 0.02
    assert all(each["waited"] <= in_data for each, in_data in waited)


@pytest.mark.parametrize(
    ("waited_seconds", "data_seconds", "other_seconds", "is_reported"),
    [
        (0.05, 0.06, 0.94, True),
        (0.05, 0.001, 0.999, False),  # the device was busy
        (0.01, 0.02, 0.98, False),  # a hundredth of the time
        (0.0004, 0.0005, 0.0005, False),  # the usual cost of passing a batch
    ],
)
def test_only_waits_that_cost_time_are_in_the_metrics(
    waited_seconds: float, data_seconds: float, other_seconds: float, is_reported: bool
) -> None:
    stats = {"workers": 3, "depth": 5, "last_seconds": waited_seconds}
    found = loader_wait(stats, {"data": data_seconds, "forward": other_seconds})
    assert found == ({"loader": {"workers": 3, "depth": 5, "waited": waited_seconds}} if is_reported else {})


def train_with_small_parts(path: Path) -> tuple[int, int]:
    """Train on cached features, in parts of one image. Also returns how often the rank reported progress on them."""
    reports: list[int] = []
    vision_features.FeatureCache = partial(FeatureCache, part_bytes=1)  # pyrefly: ignore[bad-assignment]
    vision_features.build_feature_cache = partial(_cache_and_count, vision_features.build_feature_cache, reports)
    cache = path.parents[1] / "cache"  # without the features of an earlier test
    return run_worker(RunDirectory(path), read_rank_info(os.environ), cache=cache), len(reports)


def _cache_and_count(
    build_cache: Callable[..., Any], reports: list[int], *args: Any, report_progress: Callable[[], None]
) -> Any:
    def report() -> None:
        reports.append(1)
        report_progress()

    return build_cache(*args, report_progress=report)


def test_each_part_of_the_features_reports_progress_on_all_ranks(folder: Path) -> None:
    recipe = vlm_recipe(folder, freeze=["vision"])
    run = run_of(folder, recipe, plan_for(recipe, grad_accum=1, dp_shard=2))
    assert run_ranks(2, train_with_small_parts, run.path) == [(0, 5), (0, 5)]


def test_features_of_a_trained_tower_are_refused_before_any_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRIMARAN_CACHE", str(tmp_path / "cache"))
    command = ["train", "--run-dir", str(tmp_path / "run"), "--set", "model={family: vlm, preset: tiny}"]
    sets = ["data={source: shapes, seq_len: 256, samples: {cache_features: true}}", "cluster=1xcpu"]
    assert main([*command, *(word for each in sets for word in ("--set", each))]) == 2
    assert "T062: the vision tower is trained" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
