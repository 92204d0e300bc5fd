"""Video files: frames are chosen by their times and decoded when samples are prepared."""

import importlib.util
import io
import json
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from trimaran.core import DataSection, ImageRules, SamplesSection, UserError
from trimaran.data import BadSampleError, FrameChoice, ImageFinder, SampleIndex, prepare_samples, read_row

needs_av = pytest.mark.skipif(importlib.util.find_spec("av") is None, reason="needs the extra video")
QUESTION = [{"role": "user", "content": "what happens?"}, {"role": "assistant", "content": "nothing"}]
RULES = ImageRules(patch=4, merge=2, image_token=257, min_pixels=64, max_pixels=1024)


def write_video(path: Path, times: list[float], brightness: list[int]) -> None:
    """Write an .mp4 file with one grey frame at each time."""
    import av  # noqa: PLC0415

    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=30)
        stream.width, stream.height, stream.pix_fmt = 32, 16, "yuv420p"
        stream.codec_context.time_base = stream.time_base = Fraction(1, 1000)
        for time, grey in zip(times, brightness, strict=True):
            frame = av.VideoFrame.from_ndarray(np.full((16, 32, 3), grey, dtype=np.uint8), format="rgb24")
            frame.pts, frame.time_base = round(1000 * time), Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def parse(video: Any, root: Path, choice: FrameChoice) -> tuple[list[Any], list[np.ndarray]]:
    """Return the parts of the question, and its images."""
    turns, images = read_row({"messages": QUESTION, "video": video}, ImageFinder(str(root), choice))
    assert all(isinstance(each, bytes) for each in images)
    return list(turns[0].parts), [
        np.asarray(Image.open(io.BytesIO(each))) for each in images if isinstance(each, bytes)
    ]


@needs_av
@pytest.mark.parametrize("reference", ["film.mp4", {"path": "film.mp4"}])
def test_the_frames_of_a_file_are_chosen_by_their_own_times(tmp_path: Path, reference: Any) -> None:
    times = [0.0, 0.4, 1.1, 1.9, 2.2, 3.0]  # not evenly spaced
    write_video(tmp_path / "film.mp4", times, [20, 60, 100, 140, 180, 220])
    parts, images = parse(reference, tmp_path, FrameChoice(per_second=1))
    assert [part for part in parts if part] == [
        "<0.0 seconds>", "<1.1 seconds>", "<1.9 seconds>", "<3.0 seconds>", "what happens?"
    ]  # fmt: skip
    assert [each.shape for each in images] == [(16, 32, 3)] * 4
    np.testing.assert_allclose([each.mean() for each in images], [20, 100, 140, 220], atol=4)


@needs_av
def test_video_files_are_prepared_as_images_in_the_index(tmp_path: Path) -> None:
    write_video(tmp_path / "film.mp4", [number / 4 for number in range(9)], [25 * number for number in range(9)])
    (tmp_path / "broken.mp4").write_bytes(b"no video at all")
    rows = [{"messages": QUESTION, "video": name} for name in ("film.mp4", "broken.mp4", "missing.mp4")]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    section = DataSection(source="chat", path=str(file), seq_len=512, samples=SamplesSection(max_bad=0.9))
    index = SampleIndex.open(prepare_samples(section, cache=tmp_path / "cache", rules=RULES))
    assert index.num_samples == 1
    assert index.parts[0].meta.num_bad == 2
    assert index.image_counts.tolist() == [3]
    assert index.image_sizes.tolist() == [[32, 16]] * 3
    (tmp_path / "film.mp4").unlink()  # no longer needed
    assert Image.open(io.BytesIO(index.image_bytes(2))).size == (32, 16)


@needs_av
def test_a_file_without_video_is_a_bad_sample(tmp_path: Path) -> None:
    (tmp_path / "text.mp4").write_text("hello")
    with pytest.raises(BadSampleError, match="a video cannot be decoded"):
        parse("text.mp4", tmp_path, FrameChoice())


def test_without_the_package_the_error_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "trimaran.data.samples.videos", raising=False)
    with pytest.raises(UserError, match=r"pip install 'trimaran\[video\]'") as caught:
        parse("film.mp4", tmp_path, FrameChoice())
    assert caught.value.code == "T013"
