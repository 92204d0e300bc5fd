"""Drawn shapes: the demonstration data for vision-language models."""

import io
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from PIL import Image

from trimaran.core import MixtureSource
from trimaran.data import SourceFiles, drawn_shapes, read_samples


@pytest.fixture(scope="module")
def drawn_samples() -> list[drawn_shapes.DrawnSample]:
    return [drawn_shapes.draw(number) for number in range(600)]


def pixels(drawn: drawn_shapes.DrawnSample) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(drawn.image)).convert("RGB")).astype(int)


def test_a_sample_depends_only_on_its_number(drawn_samples: list[drawn_shapes.DrawnSample]) -> None:
    assert [drawn_shapes.draw(number) for number in range(20)] == drawn_samples[:20]
    assert len({(drawn.image, drawn.question, drawn.answer) for drawn in drawn_samples}) > 500


def test_images_have_many_sizes_and_some_samples_have_no_image(drawn_samples: list[drawn_shapes.DrawnSample]) -> None:
    sizes = [pixels(drawn).shape[:2] for drawn in drawn_samples if drawn.image]
    assert 0.06 < 1 - len(sizes) / len(drawn_samples) < 0.14
    assert {side for size in sizes for side in size} == set(drawn_shapes.SIDES)
    assert max(max(size) / min(size) for size in sizes) == 2


def test_answers_cannot_be_guessed_without_the_image(drawn_samples: list[drawn_shapes.DrawnSample]) -> None:
    """Always giving the most frequent answer to a question is right in less than half of the samples."""
    asked = [(drawn.question, drawn.answer) for drawn in drawn_samples if drawn.image and drawn.question]
    by_question: dict[str, Counter[str]] = {}
    for question, answer in asked:
        by_question.setdefault(question.split(" ")[0] + question.split(" ")[1], Counter())[answer] += 1
    right = sum(answers.most_common(1)[0][1] for answers in by_question.values())
    assert right / len(asked) < 0.45
    assert all(len(answer) <= 8 for _, answer in asked)


def test_the_answer_matches_the_image(drawn_samples: list[drawn_shapes.DrawnSample]) -> None:
    """In every image with one shape, the colour of the caption is the one that differs most from the background."""
    checked = 0
    for drawn in drawn_samples:
        if drawn.image and not drawn.question and " and " not in drawn.answer:
            _, colour, _ = drawn.answer.split(" ")
            shown = pixels(drawn)
            distance = np.abs(shown - shown[0, 0]).sum(axis=2)
            assert np.abs(shown[distance > distance.max() - 5].mean(axis=0) - drawn_shapes.COLOURS[colour]).max() < 20
            checked += 1
    assert checked > 10


def test_shapes_are_read_like_any_other_source(drawn_samples: list[drawn_shapes.DrawnSample]) -> None:
    reader = read_samples(SourceFiles(MixtureSource(name="shapes", source="shapes"), files=[]))
    read = list(islice(reader, 600))
    assert [each.row for each in read] == list(range(1, 601))
    assert [each.fraction_read for each in read] == [number / drawn_shapes.NUM_SAMPLES for number in range(600)]
    for drawn, found in zip(drawn_samples, read, strict=True):
        assert found.images == ((drawn.image,) if drawn.image else ())
        parts = [(turn.role, part) for turn in found.turns for part in turn.parts if part is not None]
        texts = [("user", drawn.question), ("assistant", drawn.answer)] if drawn.question else [("text", drawn.answer)]
        assert parts == texts
        assert sum(part is None for turn in found.turns for part in turn.parts) == len(found.images)
