"""Drawn shapes: the demonstration data for models that see."""

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


def pixels(drawn: drawn_shapes.Drawn) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(drawn.image)).convert("RGB")).astype(int)


def test_a_sample_is_a_function_of_its_number() -> None:
    assert [drawn_shapes.draw(number) for number in range(20)] == DRAWN[:20]
    assert len({(drawn.image, drawn.question, drawn.answer) for drawn in DRAWN}) > 500


def test_pictures_have_many_shapes_and_some_samples_have_none() -> None:
    sizes = [pixels(drawn).shape[:2] for drawn in DRAWN if drawn.image]
    assert 0.06 < 1 - len(sizes) / len(DRAWN) < 0.14
    assert {side for size in sizes for side in size} == set(drawn_shapes.SIDES)
    assert max(max(size) / min(size) for size in sizes) == 2


def test_no_answer_can_be_guessed() -> None:
    """The most frequent answer to a question, without a look at the picture, is right in less than half of them."""
    asked = [(drawn.question, drawn.answer) for drawn in DRAWN if drawn.image and drawn.question]
    by_question: dict[str, Counter[str]] = {}
    for question, answer in asked:
        by_question.setdefault(question.split(" ")[0] + question.split(" ")[1], Counter())[answer] += 1
    right = sum(answers.most_common(1)[0][1] for answers in by_question.values())
    assert right / len(asked) < 0.45
    assert all(len(answer) <= 8 for _, answer in asked)


def test_the_answer_is_in_the_picture() -> None:
    """Of every picture with one shape, the colour that is said is the one that stands out of the ground."""
    checked = 0
    for drawn in DRAWN:
        if drawn.image and not drawn.question and " and " not in drawn.answer:
            _, colour, _ = drawn.answer.split(" ")
            seen = pixels(drawn)
            far = np.abs(seen - seen[0, 0]).sum(axis=2)
            assert np.abs(seen[far > far.max() - 5].mean(axis=0) - drawn_shapes.COLOURS[colour]).max() < 20
            checked += 1
    assert checked > 10


def test_shapes_are_a_source_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawn_shapes, "NUM_SAMPLES", 1200)  # of several thousand
    rules = ImageRules(patch=8, merge=2, image_token=257)
    told: list[float] = []
    path = prepare_samples(
        DataSection(source="shapes"), rules=rules, cache=tmp_path, progress=lambda _, share: told.append(share)
    )
    index = SampleIndex.open(path)
    assert index.num_samples == 1200
    assert sorted(told) == told
    assert told[-1] > 0.99
    assert index.bad == []
    for number, drawn in enumerate(DRAWN[:50]):
        sample = index.sample(number)
        assert index.tokenizer.decode(sample.tokens[sample.targets]) == drawn.answer
        assert [index.image_bytes(each) for each in sample.images] == ([drawn.image] if drawn.image else [])
        assert np.count_nonzero(sample.tokens == 257) == len(sample.images)
