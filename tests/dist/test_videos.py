"""Videos that are one block of a sample train alike when ranks split the sequence, or read cached features."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.parity import assert_same_trajectory, plan_for, train_trajectory
from trimaran.core import Recipe


def write_videos(folder: Path) -> Path:
    """Write conversations about videos of two to seven frames, some with an image, and return their file."""
    draw, rows = np.random.default_rng(0), []
    for number in range(10):
        size = draw.integers(32, 64, 2)
        names = [f"{number}-{each}.png" for each in range(2 + number % 6)]
        for name in names:
            Image.fromarray(draw.integers(0, 256, (*size, 3), dtype=np.uint8)).save(folder / name)
        content: list[dict[str, Any]] = [{"type": "video", "video": {"frames": names, "fps": 1 + number % 3}}]
        content += [{"type": "image", "image": names[0]}] if number % 3 == 0 else []
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": f"video {number}"}]
        rows.append(json.dumps({"messages": messages}))
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return folder / "rows.jsonl"


def recipe_of(file: Path, *, cached: bool) -> Recipe:
    samples = {"temporal_patches": True, "frames_per_second": 5, "cache_features": cached}
    tree: dict[str, Any] = {
        "model": {"family": "vlm", "preset": "tiny", "freeze": ("vision",)},
        "data": {"source": "chat", "path": str(file), "seq_len": 128, "holdout": 0, "samples": samples},
        "train": {"steps": 2, "global_batch": 4, "evaluate": {"batches": 0}, "sample": {"tokens": 0},
                  "optimizer": {"eps": 1e-3}},
    }  # fmt: skip
    return Recipe.model_validate(tree)


def test_videos_train_alike_with_a_split_sequence_and_with_cached_features(tmp_path: Path) -> None:
    file, runs = write_videos(tmp_path), tmp_path / "runs"
    runs.mkdir()
    plain, cached = (recipe_of(file, cached=each) for each in (False, True))
    reference = train_trajectory(plain, plan_for(plain, grad_accum=1), runs)
    assert_same_trajectory(train_trajectory(plain, plan_for(plain, grad_accum=1, cp=2), runs), reference)
    assert_same_trajectory(train_trajectory(cached, plan_for(cached, grad_accum=1), runs), reference)
