"""What a row holds is estimated from the first samples of the data, and the prediction counts it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from trimaran.app import read_question
from trimaran.core import Recipe
from trimaran.data import PackingRules, SampleIndex, estimate_rows, measure_samples, pack_samples, prepare_samples
from trimaran.models import recipe_image_rules

SEQ_LEN = 512


def write_chat(file: Path, *, side: int, num: int = 200) -> Path:
    """Write questions about images of about `side` pixels, of which every fourth has none."""
    file.parent.mkdir(exist_ok=True)
    random = np.random.default_rng(side)
    for number in range(num):
        width, height = (side * random.uniform(0.6, 1.5, 2)).astype(int).tolist()
        row: dict[str, Any] = {"messages": [
            {"role": "user", "content": "what is this? " * int(random.integers(1, 9))},
            {"role": "assistant", "content": "a picture"},
        ]}  # fmt: skip
        if number % 4:
            name = f"{side}-{number}.png"
            Image.new("RGB", (width, height)).save(file.parent / name)
            row["messages"][0]["content"] = "<image>" + row["messages"][0]["content"]
            row["images"] = [name]
        with file.open("a") as stream:
            stream.write(json.dumps(row) + "\n")
    return file


def recipe_of(**data: Any) -> Recipe:
    model = {"family": "vlm", "preset": "tiny"}
    return Recipe.model_validate({"model": model, "data": {"seq_len": SEQ_LEN} | data})


@pytest.mark.parametrize("batching", ["pack", "bucket", "pad"])
def test_the_estimate_agrees_with_the_packed_rows(tmp_path: Path, batching: Any) -> None:
    recipe = recipe_of(source="chat", path=str(write_chat(tmp_path / "chat.jsonl", side=90)),
                       samples={"batching": batching})  # fmt: skip
    rules = recipe_image_rules(recipe)
    rows = estimate_rows(recipe.data, rules)
    assert rows is not None
    assert rows.num_samples == 200
    index = SampleIndex.open(prepare_samples(recipe.data, rules=rules, cache=tmp_path / "cache"))
    sizes = measure_samples(index, rules)
    packing = pack_samples(
        index, np.arange(200), sizes, PackingRules(seq_len=SEQ_LEN, batching=batching, images=rules)
    )  # fmt: skip
    lengths, patches, pairs = (each.sum() for each in (sizes.lengths**2, sizes.patches, sizes.patch_pairs))
    rel = {"pack": 0.1, "bucket": 0.15, "pad": 1e-9}[batching]  # the last rows of so few samples are not full
    assert rows.images == pytest.approx(150 / len(packing), rel=rel)
    assert rows.patches == pytest.approx(patches / len(packing), rel=rel)
    assert rows.attended_tokens == pytest.approx(lengths / (SEQ_LEN * len(packing)), rel=rel)
    assert rows.image_patches == pytest.approx(pairs / patches)


def test_the_sources_of_a_mixture_count_by_their_weights(tmp_path: Path) -> None:
    small, large = (write_chat(tmp_path / f"{side}.jsonl", side=side) for side in (60, 150))

    def patches(**weights: float) -> float:
        mixture = [{"name": name, "source": "chat", "path": str(path), "weight": weights[name]}
                   for name, path in (("small", small), ("large", large))]  # fmt: skip
        recipe = recipe_of(mixture=mixture, samples={"batching": "pad"})
        rows = estimate_rows(recipe.data, recipe_image_rules(recipe))
        assert rows is not None
        return rows.patches

    alone, both, other = patches(small=1, large=1e-9), patches(small=1, large=1), patches(small=1e-9, large=1)
    assert 1.5 * alone < other
    assert both == pytest.approx((alone + other) / 2)


def test_the_outline_of_a_question_has_the_sizes_of_the_data(tmp_path: Path) -> None:
    path = write_chat(tmp_path / "chat.jsonl", side=90)
    settings = ["model.family=vlm", "model.preset=tiny", "data.source=chat", f"data.path={path}",
                f"data.seq_len={SEQ_LEN}", "cluster=1xcpu"]  # fmt: skip
    question = read_question(None, settings)
    assert question.rows is not None
    assert question.outline is not None
    vision, projector, language = question.outline.towers
    assert vision.positions == round(question.rows.patches)
    assert vision.segment == round(question.rows.image_patches)
    assert projector.positions == vision.positions // 4
    assert language.segment == round(question.rows.attended_tokens) < SEQ_LEN
    described = read_question(None, [*settings, "data.images_per_sample=2"])
    assert described.rows is None, "what the recipe says about images counts"
    missing = read_question(None, [*settings[:3], "data.path=nowhere.jsonl", *settings[4:]])
    assert missing.rows is None, "data that is elsewhere does not keep a plan from being made"
