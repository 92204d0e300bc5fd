"""Two frames of a video share their patches: tokens, positions and logits equal those of transformers' Qwen3-VL."""

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from tests.vlm_models import CONFIGS, patches_of, perturb
from trimaran.core import DataSection, ModelSection, Recipe, SamplesSection, UserError
from trimaran.data import (
    FrameChoice,
    ImageFinder,
    PackedSample,
    SampleIndex,
    fill_patches,
    grids_of,
    join_frames,
    prepare_samples,
    read_row,
    split_frames,
    token_positions,
    upright_size,
)
from trimaran.models import recipe_image_rules, vlm_from_disk
from trimaran.nets import network_of, normalise_patches

VIDEO = 303
QUESTION = [{"role": "user", "content": "what happens?"}, {"role": "assistant", "content": "nothing"}]


def png(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def random_frames(count: int, height: int = 16, width: int = 24) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.integers(0, 256, (height, width, 3), dtype=np.uint8) for _ in range(count)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with five frames of a video."""
    (tmp_path / "video").mkdir()
    for number, pixels in enumerate(random_frames(5)):
        (tmp_path / "video" / f"{number}.png").write_bytes(png(pixels))
    return tmp_path


def test_logits_tokens_and_positions_of_a_video_equal_those_of_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(CONFIGS["qwen3-vl"], attn_implementation="sdpa").eval()
    perturb(model)
    model.save_pretrained(tmp_path)
    spec = vlm_from_disk(json.loads((tmp_path / "config.json").read_text()), where="config.json")
    rules = replace(spec.images(), frames=2, min_pixels=1)
    frames = random_frames(4)
    joined = [join_frames([png(each) for each in frames[at : at + 2]]) for at in (0, 2)]
    (grid,) = {tuple(grids_of(upright_size(each), rules)[0].tolist()) for each in joined}
    assert grid == (4, 6)
    patches = np.empty((2 * 24, 3 * 2 * 16), dtype=np.uint8)
    for number, each in enumerate(joined):
        fill_patches(each, (24, 16), rules, patches[24 * number : 24 * (number + 1)])
    # Transformers' layout: text with the time, then the tokens of a temporal patch, and again.
    text, pads = torch.tensor([5, 6, 301]), torch.full((6,), VIDEO)
    theirs = torch.cat([text, pads, torch.tensor([302, 8, 301]), pads, torch.tensor([302, 9, 10])])[None]
    pixels = normalise_patches(torch.from_numpy(patches), spec.vision.ends)
    inputs: dict[str, Any] = {
        "input_ids": theirs,
        "video_grid_thw": torch.tensor([[2, 4, 6]]),
        "mm_token_type_ids": 2 * (theirs == VIDEO).int(),
    }
    positions, _ = model.model.get_rope_index(**inputs)
    with torch.no_grad():
        wanted = model(**inputs, pixel_values_videos=pixels).logits
    ours = theirs.masked_fill(theirs == VIDEO, spec.image_token)
    grids = np.array([[4, 6], [4, 6]], dtype=np.int32)
    sample = PackedSample(ours[0].numpy(), ours[0].numpy(), (3, 12), (grids[:1], grids[1:]))
    own = torch.from_numpy(token_positions(sample, rules, ours.shape[1]))[:, None]
    assert own.equal(positions)
    network = network_of(spec)
    network.load(tmp_path)
    arrays = {"patches": torch.from_numpy(patches), "grids": torch.from_numpy(grids), "positions": own}
    logits, _ = network.forward({"tokens": ours, **arrays})
    assert (logits - wanted).abs().max() <= 1e-5 * max(1, wanted.abs().max())
    repeated = torch.from_numpy(patches).view(48, 3, 2, 16)[:, :, :1].expand(-1, -1, 2, -1).reshape(48, -1)
    other, _ = network.forward({"tokens": ours, **arrays, "patches": repeated})
    assert (other - wanted).abs().max() > 1e-3  # the second frame of a patch matters


def test_patches_hold_both_frames_and_an_image_is_repeated() -> None:
    rules = replace(vlm_from_disk(CONFIGS["qwen3-vl"].to_dict(), where="").images(), frames=2, min_pixels=1)
    first, second = random_frames(2)
    single = [patches_of(torch.from_numpy(each).permute(2, 0, 1), 4, 2).view(24, 3, 16) for each in (first, second)]
    out = np.empty((24, 96), dtype=np.uint8)
    fill_patches(join_frames([png(first), png(second)]), (24, 16), rules, out)
    np.testing.assert_array_equal(out, torch.stack(single, 2).flatten(1).numpy())
    fill_patches(png(first), (24, 16), rules, out)
    np.testing.assert_array_equal(out, torch.stack(single[:1] * 2, 2).flatten(1).numpy())
    assert split_frames(join_frames([b"ab", b"c"])) == [b"ab", b"c"]


def test_times_are_those_of_transformers_and_an_odd_frame_is_repeated(folder: Path) -> None:
    finder = ImageFinder(str(folder), FrameChoice(per_second=10, most=16, together=2))
    turns, images = read_row({"messages": QUESTION, "video": {"frames": "video", "fps": 3}}, finder)
    processor: Any = SimpleNamespace()
    times = Qwen3VLProcessor._calculate_timestamps(processor, [0, 1, 2, 3, 4], 3.0, 2)
    assert [part for part in turns[0].parts if part][:-1] == [f"<{each:.1f} seconds>" for each in times]
    assert len(images) == 3
    frames = [split_frames(each) for each in images if isinstance(each, bytes)]
    assert [len(each) for each in frames] == [2, 2, 2]
    assert frames[2][0] == frames[2][1] == (folder / "video" / "4.png").read_bytes()


def test_a_video_is_prepared_with_half_of_the_images(folder: Path) -> None:
    file = folder / "rows.jsonl"
    file.write_text(json.dumps({"messages": QUESTION, "video": {"frames": "video", "fps": 1}}) + "\n")
    rules = replace(vlm_from_disk(CONFIGS["qwen3-vl"].to_dict(), where="").images(), min_pixels=1)
    counts = []
    for together in (False, True):
        samples = SamplesSection(temporal_patches=together)
        section = DataSection(source="chat", path=str(file), seq_len=512, samples=samples)
        own = replace(rules, frames=2 if together else 1)
        index = SampleIndex.open(prepare_samples(section, cache=folder / "cache", rules=own))
        counts.append(index.image_counts.tolist())
        assert index.image_sizes.tolist() == [[24, 16]] * counts[-1][0]
    assert counts == [[5], [3]]


@pytest.mark.parametrize(
    ("preset", "time_positions"), [("qwen3-vl-4b", None), ("qwen2-vl-2b", 0), ("qwen2.5-vl-3b", 2), ("tiny-tiled", -1)]
)
def test_only_models_with_patches_of_two_frames_get_them(preset: str, time_positions: int | None) -> None:
    data = DataSection(source="chat", path="rows.jsonl", samples=SamplesSection(temporal_patches=True))
    recipe = Recipe(model=ModelSection(family="vlm", preset=preset), data=data)
    if preset == "tiny-tiled":
        with pytest.raises(UserError, match="temporal_patches") as caught:
            recipe_image_rules(recipe)
        assert caught.value.code == "M090"
    else:
        rules = recipe_image_rules(recipe)
        assert rules is not None
        assert (rules.frames, rules.time_positions) == (2, time_positions)
