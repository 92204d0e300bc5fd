"""Drawn shapes: the demonstration data for vision-language models."""

import io
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from trimaran.core import DataSection, ImageRules
from trimaran.data import drawn_shapes
from trimaran.data.samples import SampleIndex, prepare_samples

DRAWN = [drawn_shapes.draw(number) for number in range(600)]


def pixels(drawn: drawn_shapes.DrawnSample) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(drawn.image)).convert("RGB")).astype(int)


def test_a_sample_depends_only_on_its_number() -> None:
    assert [drawn_shapes.draw(number) for number in range(20)] == DRAWN[:20]
    assert len({(drawn.image, drawn.question, drawn.answer) for drawn in DRAWN}) > 500


def test_images_have_many_sizes_and_some_samples_have_no_image() -> None:
    sizes = [pixels(drawn).shape[:2] for drawn in DRAWN if drawn.image]
    assert 0.06 < 1 - len(sizes) / len(DRAWN) < 0.14
    assert {side for size in sizes for side in size} == set(drawn_shapes.SIDES)
    assert max(max(size) / min(size) for size in sizes) == 2


def test_answers_cannot_be_guessed_without_the_image() -> None:
    """Always giving the most frequent answer to a question is right in less than half of the samples."""
    asked = [(drawn.question, drawn.answer) for drawn in DRAWN if drawn.image and drawn.question]
    by_question: dict[str, Counter[str]] = {}
    for question, answer in asked:
        by_question.setdefault(question.split(" ")[0] + question.split(" ")[1], Counter())[answer] += 1
    right = sum(answers.most_common(1)[0][1] for answers in by_question.values())
    assert right / len(asked) < 0.45
    assert all(len(answer) <= 8 for _, answer in asked)


def test_the_answer_matches_the_image() -> None:
    """In every image with one shape, the colour of the caption is the one that differs most from the background."""
    checked = 0
    for drawn in DRAWN:
        if drawn.image and not drawn.question and " and " not in drawn.answer:
            _, colour, _ = drawn.answer.split(" ")
            shown = pixels(drawn)
            distance = np.abs(shown - shown[0, 0]).sum(axis=2)
            assert np.abs(shown[distance > distance.max() - 5].mean(axis=0) - drawn_shapes.COLOURS[colour]).max() < 20
            checked += 1
    assert checked > 10


def test_shapes_are_prepared_like_any_other_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawn_shapes, "NUM_SAMPLES", 1200)  # of several thousand
    rules = ImageRules(patch=8, merge=2, image_token=257)
    reported: list[float] = []
    path = prepare_samples(
        DataSection(source="shapes"),
        rules=rules,
        cache=tmp_path,
        progress=lambda _, fraction: reported.append(fraction),
    )
    index = SampleIndex.open(path)
    assert index.num_samples == 1200
    assert sorted(reported) == reported
    assert reported[-1] > 0.99
    assert index.bad == []
    for number, drawn in enumerate(DRAWN[:50]):
        sample = index.sample(number)
        assert index.tokenizer.decode(sample.tokens[sample.targets]) == drawn.answer
        assert [index.image_bytes(each) for each in sample.images] == ([drawn.image] if drawn.image else [])
        assert np.count_nonzero(sample.tokens == 257) == len(sample.images)
