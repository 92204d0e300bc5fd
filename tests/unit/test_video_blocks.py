"""Videos of Qwen2-VL and Qwen2.5-VL: one block of temporal patches, as transformers' models and processors have it."""

import json
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

from tests.vlm_models import CONFIGS, IMAGE, perturb
from trimaran.core import DataSection, ModelSection, Recipe, RowCost, SamplesSection
from trimaran.data import (
    ALONE,
    BadSampleError,
    DataShare,
    FrameChoice,
    SampleFeedOptions,
    SampleIndex,
    block_positions,
    grid_positions,
    prepare_samples,
    sample_feeds,
)
from trimaran.models import VLM_PRESETS, recipe_image_rules, vlm_from_disk, vlm_to_disk
from trimaran.nets import network_of, network_of_hf, normalise_patches

VIDEO, START, END = 303, 301, 302
# The number of frames, the frames of a second, and the size (rows, columns of tokens) of each video; an image has none.
SAMPLES: tuple[tuple[tuple[int, float, tuple[int, int]], ...], ...] = (
    ((4, 2.0, (2, 3)),),
    ((5, 3.0, (2, 3)), (2, 1.0, (3, 2))),
    ((3, 4.0, (3, 4)), (0, 0.0, (2, 2))),
    ((6, 1.0, (1, 2)), (2, 2.0, (2, 2))),  # its time is longer than its sides
)


def frames_of(sample: int, number: int, count: int, size: tuple[int, int]) -> np.ndarray:
    draw = np.random.default_rng([sample, number])
    return draw.integers(0, 256, (count, 8 * size[0], 8 * size[1], 3), dtype=np.uint8)


def write_samples(folder: Path) -> Path:
    """Write the samples as conversations, and their frames; return the file."""
    rows = []
    for number, parts in enumerate(SAMPLES):
        content: list[dict[str, Any]] = []
        for part, (count, rate, size) in enumerate(parts):
            names = []
            for index, pixels in enumerate(frames_of(number, part, max(1, count), size)):
                names.append(f"{number}-{part}-{index}.png")
                Image.fromarray(pixels).save(folder / names[-1])
            video = {"type": "video", "video": {"frames": names, "fps": rate}}
            content += [video if count else {"type": "image", "image": names[0]}, {"type": "text", "text": "and"}]
        turns = [{"role": "user", "content": content}, {"role": "assistant", "content": f"sample {number}"}]
        rows.append(json.dumps({"messages": turns}))
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return folder / "rows.jsonl"


def their_patches(frames: np.ndarray) -> tuple[Tensor, list[int]]:
    """Return the patches u8 and the grid (t, h, w) of a video, cut as in transformers' Qwen2VLVideoProcessor."""
    video = torch.from_numpy(frames).permute(0, 3, 1, 2)
    video = torch.cat([video, video[-1:]]) if len(video) % 2 else video
    time, height, width = len(video) // 2, video.shape[2] // 4, video.shape[3] // 4
    split = video.reshape(time, 2, 3, height // 2, 2, 4, width // 2, 2, 4).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return split.reshape(time * height * width, -1), [time, height, width]


def their_inputs(number: int, tokens: Tensor, ends: Any) -> dict[str, Any]:
    """Return transformers' inputs of a sample: its own tokens, with those of videos in the places of ours."""
    kinds = [("video" if count else "image", rate) for count, rate, _ in SAMPLES[number]]
    cut = [
        their_patches(frames_of(number, part, max(1, each[0]), each[2])) for part, each in enumerate(SAMPLES[number])
    ]
    ids = tokens.clone()
    runs = [[at for at, _ in run] for is_image, run in groupby(enumerate(ids.tolist()), lambda each: each[1] == IMAGE)
            if is_image]  # fmt: skip
    for run, (kind, _), (_, (time, height, width)) in zip(runs, kinds, cut, strict=True):
        assert len(run) == time * height * width // 4
        assert [ids[run[0] - 1], ids[run[-1] + 1]] == [START, END]
        ids[run] = VIDEO if kind == "video" else IMAGE
    inputs: dict[str, Any] = {"input_ids": ids[None], "mm_token_type_ids": ((ids == IMAGE) + 2 * (ids == VIDEO))[None]}
    for kind, pixels, grids in (("video", "pixel_values_videos", "video_grid_thw"),
                                ("image", "pixel_values", "image_grid_thw")):  # fmt: skip
        mine = [each for each, (own, _) in zip(cut, kinds, strict=True) if own == kind]
        if mine:
            inputs[pixels] = normalise_patches(torch.cat([patches for patches, _ in mine]), ends)
            inputs[grids] = torch.tensor([grid for _, grid in mine])
    inputs["second_per_grid_ts"] = torch.tensor([2 / rate for kind, rate in kinds if kind == "video"])
    return inputs


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl"])
def test_tokens_positions_and_logits_of_packed_videos_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(CONFIGS[name], attn_implementation="sdpa").eval()
    perturb(model)
    model.save_pretrained(tmp_path)
    samples = SamplesSection(temporal_patches=True, min_pixels=1, frames_per_second=10)
    section = DataSection(source="chat", path=str(write_samples(tmp_path)), seq_len=384, holdout=0, samples=samples)
    recipe = Recipe(model=ModelSection(family="vlm", path=str(tmp_path)), data=section)
    rules = recipe_image_rules(recipe)
    assert rules is not None
    assert rules.time_positions == {"qwen2-vl": 0, "qwen2.5-vl": 4}[name]
    index = SampleIndex.open(prepare_samples(section, cache=tmp_path / "cache", rules=rules))
    share = DataShare(rank=0, dp=1, micro_batch=1, grad_accum=1)
    feed, _ = sample_feeds(section, index, SampleFeedOptions(rules=rules, cost=RowCost()), share=share)
    assert feed.num_rows == 1
    row = {key: torch.from_numpy(each) for key, each in feed.load(0, lambda _: None).arrays.items()}
    row |= {key: row[key][0] for key in ("tokens", "labels", "documents", "positions")}
    spec = vlm_from_disk(json.loads((tmp_path / "config.json").read_text()), where="config.json")
    assert IMAGE not in row.pop("labels")
    wanted = torch.zeros(row["tokens"].shape[1], spec.vocab)
    for document, number in enumerate(feed.samples(0, [0])):
        used = row["documents"][0] == document
        theirs = their_inputs(number, row["tokens"][0][used], spec.vision.ends)
        wanted[used], positions = their_logits(model, theirs, has_seconds=name == "qwen2.5-vl")
        assert row["positions"][:, 0, used].equal(positions)
    network = network_of(spec)
    network.load(tmp_path)
    used = row["documents"][0] < len(SAMPLES)
    for each in (network, network_of_hf(model, spec)):
        logits, _ = each.forward(row)
        assert (logits[0, used] - wanted[used]).abs().max() <= 1e-5 * wanted.abs().max()


def their_logits(model: Any, inputs: dict[str, Any], *, has_seconds: bool) -> tuple[Tensor, Tensor]:
    """Return transformers' logits [T, vocabulary] and positions [3, T] of a sample.

    Since version 5 `get_rope_index` lets the text after a video continue after the larger side of a frame, although
    what is generated continues after the largest position. Here all text does, as in Qwen's code and in version 4.
    """
    seconds, kinds = inputs.pop("second_per_grid_ts"), inputs["mm_token_type_ids"][0].tolist()
    named = {key: each for key, each in inputs.items() if not key.startswith("pixel")}
    positions, _ = model.model.get_rope_index(**named, **({"second_per_grid_ts": seconds} if has_seconds else {}))
    for at in range(1, len(kinds)):
        if kinds[at - 1] == 2 and kinds[at] != 2:
            positions[:, 0, at:] += positions[:, 0, :at].max() + 1 - positions[0, 0, at]
    with torch.no_grad():
        return model(**inputs, position_ids=positions).logits[0], positions[:, 0]


@pytest.mark.parametrize("rate", [0, 2, 25])
def test_time_positions_are_those_of_transformers(rate: int) -> None:
    model: Any = CONFIGS["qwen2.5-vl"]
    times = [number / 3 for number in range(9)]
    choice = FrameChoice(together=2, time_positions=rate)
    step = rate * torch.tensor(2 / 3) if rate else 1
    theirs = Qwen2_5_VLModel.get_vision_position_ids(model, 0, torch.tensor([5, 1, 1]), time_interval=step)
    assert block_positions(times, choice) == tuple(theirs[0].tolist())
    assert block_positions([0.0], choice) == (0,)


def test_uneven_times_count_with_their_mean_interval() -> None:
    choice = FrameChoice(together=2, time_positions=2)
    assert block_positions([0, 0.1, 0.2, 3.0], choice) == block_positions([0, 1, 2, 3], choice) == (0, 4)
    with pytest.raises(BadSampleError, match="too long"):
        block_positions([0, 1e9, 2e9], choice)


def test_text_continues_after_the_time_of_a_long_video() -> None:
    found = grid_positions(6, [(1, 1, 1), (2, 1, 1), (3, 1, 1)], [ALONE, 4, 8])
    assert found.tolist() == [[0, 1, 5, 9, 10, 11], [0, 1, 1, 1, 10, 11], [0, 1, 1, 1, 10, 11]]


def test_frames_of_other_sizes_get_the_size_of_the_first_and_only_blocks_have_times(tmp_path: Path) -> None:
    for number, size in enumerate([(24, 16), (24, 16), (50, 90), (50, 90)]):
        Image.new("RGB", size).save(tmp_path / f"{number}.png")
    names = [f"{number}.png" for number in range(4)]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"caption": "a video", "video": {"frames": names, "fps": 1}}))
    rules = vlm_from_disk(CONFIGS["qwen2.5-vl"].to_dict(), where="").images()
    section = DataSection(source="chat", path=str(file), seq_len=512, samples=SamplesSection(temporal_patches=True))
    for rate, has_times in ((None, False), (4, True)):
        own = replace(rules, frames=2, time_positions=rate)
        assert own.facts() == replace(rules, frames=2).facts()
        index = SampleIndex.open(prepare_samples(section, cache=tmp_path / "cache", rules=own))
        assert (index.parts[0].path / "times").exists() == has_times
        assert index.image_times.tolist() == ([ALONE, 8] if has_times else [ALONE, ALONE])
        assert index.image_sizes.tolist() == [[24, 16], [24, 16] if has_times else [50, 90]]
        image = [rules.before[0], IMAGE, rules.after[0]]
        block = [rules.before[0], IMAGE, IMAGE, rules.after[0]]
        assert index.sample(0).tokens.tolist()[:6][: 4 if has_times else 6] == (block if has_times else image * 2)


def test_the_time_positions_of_a_second_survive_export() -> None:
    spec = VLM_PRESETS["qwen2.5-vl-3b"]
    config = vlm_to_disk(spec)
    assert config["vision_config"]["tokens_per_second"] == 2
    assert vlm_from_disk(config, where="config.json").vision == spec.vision
