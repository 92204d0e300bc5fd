"""Videos: the frames that are chosen become images after their times; bad videos are bad samples."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from trimaran.core import DataSection, ImageRules, SamplesSection
from trimaran.data import (
    BadSampleError,
    FrameChoice,
    ImageFinder,
    ImageLocation,
    SampleIndex,
    choose_frames,
    estimate_rows,
    prepare_samples,
    read_row,
)

RULES = ImageRules(patch=4, merge=2, image_token=257, min_pixels=64, max_pixels=1024)
QUESTION = [{"role": "user", "content": "what happens?"}, {"role": "assistant", "content": "nothing"}]


@pytest.fixture
def frames(tmp_path: Path) -> Path:
    """Return a folder with the six frames of a video."""
    folder = tmp_path / "video"
    folder.mkdir()
    for number in range(6):
        pixels = np.full((16, 16, 3), 40 * number, dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:03d}.png")
    (folder / "notes.txt").write_text("no frame")
    return tmp_path


def parse(row: dict[str, Any], root: Path, choice: FrameChoice | None = None) -> tuple[list[Any], list[str]]:
    """Return the parts of the first turn, and the names of the images."""
    turns, images = read_row(row, ImageFinder(str(root), choice or FrameChoice()))
    return list(turns[0].parts), [Path(each.file).name for each in images if isinstance(each, ImageLocation)]


@pytest.mark.parametrize(
    ("times", "choice", "expected"),
    [
        ([0, 0.5, 1, 1.5, 2], FrameChoice(per_second=1), [0, 2, 4]),
        ([0, 0.5, 1, 1.5, 2], FrameChoice(per_second=10), [0, 1, 2, 3, 4]),
        ([3, 3.1, 9.8], FrameChoice(per_second=0.5), [0, 1, 2]),
        (list(range(100)), FrameChoice(per_second=1, most=3), [0, 50, 99]),
        ([5.0], FrameChoice(), [0]),
        ([2, 2, 2], FrameChoice(), [0]),
    ],
)
def test_frames_are_chosen_by_rate_and_maximum(times: list[float], choice: FrameChoice, expected: list[int]) -> None:
    assert choose_frames(times, choice) == expected


def test_the_frames_of_a_folder_become_images_after_their_times(frames: Path) -> None:
    row = {"messages": QUESTION, "video": {"frames": "video", "fps": 2}}
    parts, images = parse(row, frames)
    assert images == ["000.png", "002.png", "004.png"]
    assert parts == ["<0.0 seconds>", None, "<1.0 seconds>", None, "<2.0 seconds>", None, "what happens?"]
    beside = {"messages": QUESTION, "video": "video", "fps": 2}
    assert parse(beside, frames) == (parts, images)


def test_markers_times_and_lists_of_frames(frames: Path) -> None:
    listed = [f"video/{number:03d}.png" for number in range(3)]
    video = {"frames": listed, "times": [10.0, 10.5, 12.25]}
    question = [{"role": "user", "content": "in <video> and <video>?"}, QUESTION[1]]
    parts, images = parse({"messages": question, "videos": [video, video]}, frames, FrameChoice(per_second=0.5, most=2))
    assert images == ["000.png", "002.png"] * 2
    one = ["<0.0 seconds>", None, "<2.2 seconds>", None]
    assert parts == ["in ", *one, " and ", *one, "?"]
    content = [{"type": "video", "video": video}, {"type": "text", "text": "what?"}]
    parts, images = parse({"messages": [{"role": "user", "content": content}, QUESTION[1]]}, frames)
    assert len(images) == 3
    assert parts[-1] == "what?"


def test_a_caption_is_learnt_without_times(frames: Path) -> None:
    parts, images = parse({"caption": "a video", "video": {"frames": "video", "fps": 1}}, frames)
    assert parts == [None] * 6 + ["a video"]
    assert len(images) == 6


@pytest.mark.parametrize(
    ("video", "reason"),
    [
        ({"frames": "nothing", "fps": 1}, "the frames of a video cannot be read"),
        ({"frames": [], "fps": 1}, "a video has no frames"),
        ({"frames": "video"}, "neither 'times' nor a positive number 'fps'"),
        ({"frames": "video", "fps": 0}, "neither 'times' nor a positive number 'fps'"),
        ({"frames": "video", "times": [0, 1]}, "a video has 6 frames and 2 times"),
        ({"frames": "video", "times": [0, 1, 2, 1.5, 3, 4]}, "the times of a video go backwards: 1.5 after 2"),
        ({"frames": "video", "times": [0, 1, 2, 3, 4, float("nan")]}, "not a list of numbers"),
        ({"frames": "../secret", "fps": 1}, "the path leaves the image folder"),
        (7, "a video is not an object"),
    ],
)
def test_videos_that_cannot_be_used_are_bad_samples(video: Any, reason: str, frames: Path) -> None:
    with pytest.raises(BadSampleError, match=reason):
        parse({"messages": QUESTION, "video": video}, frames)


def test_videos_are_prepared_counted_and_estimated_as_their_frames(frames: Path) -> None:
    rows = [{"messages": QUESTION, "video": {"frames": "video", "fps": 1}} for _ in range(9)]
    broken = {"messages": QUESTION, "video": {"frames": "video", "times": [3, 2, 1, 0, 0, 0]}}
    (frames / "unreadable").mkdir()
    (frames / "unreadable" / "0.png").write_bytes(b"no image")
    unreadable = {"messages": QUESTION, "video": {"frames": "unreadable", "fps": 1}}
    file = frames / "videos.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in [*rows, broken, unreadable]))
    samples = SamplesSection(max_frames=4, max_bad=0.5)
    section = DataSection(source="chat", path=str(file), seq_len=512, samples=samples)
    index = SampleIndex.open(prepare_samples(section, cache=frames / "cache", rules=RULES))
    assert index.num_samples == 9
    assert index.parts[0].meta.num_bad == 2
    assert index.image_counts.tolist() == [4] * 9
    more = section.model_copy(update={"samples": samples.model_copy(update={"max_frames": 2})})
    again = SampleIndex.open(prepare_samples(more, cache=frames / "cache", rules=RULES))
    assert again.image_counts.tolist() == [2] * 9
    sizes = estimate_rows(section, RULES)
    assert sizes is not None
    assert sizes.image_patches == pytest.approx(16)
