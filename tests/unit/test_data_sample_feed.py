"""Batches of samples of different lengths, with and without images."""

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.mix import IMAGE_TOKEN

from tests.sample_table import Table, png
from trimaran.core import DataSection, ImageRules, RowCost, UserError
from trimaran.data import (
    IGNORED,
    Batching,
    DataShare,
    LoadedArrays,
    Loader,
    PackingRules,
    SampleFeed,
    SampleFeedOptions,
    SampleIndex,
    SampleRows,
    SampleTable,
    grid_positions,
    measure_samples,
    pack_samples,
    prepare_samples,
    sample_feeds,
)

RULES = ImageRules(patch=2, merge=2, image_token=IMAGE_TOKEN, min_pixels=16, max_pixels=12 * 12)
ALONE = DataShare(rank=0, dp=1, micro_batch=2, grad_accum=2)
COST = RowCost(token_pair=1e-3, patch=0.5)
SEQ_LEN = 32


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimaran.data.quarantine.RETRY_PAUSE_SECONDS", 0.0)


def some_table(count: int = 40, **options: Any) -> Table:
    """Return texts of 2 to 20 tokens; every third has an image in the middle, every ninth another at the start."""
    draw = np.random.default_rng(0)
    texts, sizes = [], []
    for number in range(count):
        text = [1 + number % 90] * int(draw.integers(2, 21))
        for _ in range((number % 3 == 0) + (number % 9 == 0)):
            text.insert(0 if IMAGE_TOKEN in text else len(text) // 2, IMAGE_TOKEN)
            sizes.append(tuple(draw.integers(4, 13, 2).tolist()))
        texts.append(text)
    return Table(texts, sizes, **options)


def feed_of(
    table: SampleTable,
    share: DataShare = ALONE,
    *,
    batching: Batching = "pack",
    rules: ImageRules | None = RULES,
    options: dict[str, Any] | None = None,
    **arguments: Any,
) -> SampleFeed:
    sample_sizes = measure_samples(table, rules)
    packing_rules = PackingRules(seq_len=SEQ_LEN, batching=batching, seed=5, images=rules)
    packing = pack_samples(table, np.arange(table.num_samples), sample_sizes, packing_rules)
    feed_options = SampleFeedOptions(rules=rules, cost=COST, seed=5, **(options or {}))
    return SampleFeed(SampleRows(table, packing, sample_sizes), feed_options, share=share, **arguments)


def load(feed: SampleFeed, step: int = 0) -> LoadedArrays:
    return feed.load(step, lambda _: None)


def micro(found: LoadedArrays, number: int) -> dict[str, np.ndarray]:
    """Return one micro-batch, sliced like `StepBatch.micro`."""
    offsets = found.offsets
    return {
        name: each[slice(*offsets[name][number : number + 2])] if name in offsets else each[number]
        for name, each in found.arrays.items()
    }


def documents_of(found: LoadedArrays) -> dict[tuple[int, ...], tuple[Any, ...]]:
    """Return the labels of every document by its tokens, without padding."""
    result = {}
    flat = [found.arrays[name].reshape(-1, SEQ_LEN) for name in ("tokens", "labels", "documents")]
    for tokens, labels, documents in zip(*flat, strict=True):
        for document in np.unique(documents):
            here = documents == document
            if tokens[here].any():
                result[tuple(tokens[here].tolist())] = tuple(labels[here].tolist())
    return result


def num_samples(batch: dict[str, np.ndarray]) -> int:
    """Return the number of samples of a micro-batch; the last document of a row may be padding."""
    return sum(len(np.unique(ids[tokens > 0])) for tokens, ids in zip(batch["tokens"], batch["documents"], strict=True))


def test_every_image_has_its_tokens_and_patches_in_order() -> None:
    table = some_table()
    feed = feed_of(table)
    for step in range(4):
        found = load(feed, step)
        ids = iter(feed.samples(step, [0]))
        for number in range(ALONE.grad_accum):
            batch = micro(found, number)
            assert batch["patches"].dtype == np.uint8
            assert batch["patches"].shape[1] == 3 * 2 * 2
            assert batch["grids"].prod(1).sum() == len(batch["patches"])
            assert (batch["tokens"] == IMAGE_TOKEN).sum() == len(batch["patches"]) // 4
            here = [next(ids) for _ in range(num_samples(batch))]
            colours = [each for sample in here for each in range(*table.first_image[sample : sample + 2].tolist())]
            starts = np.cumsum([0, *batch["grids"].prod(1)])
            shown = [np.unique(batch["patches"][a:b]).tolist() for a, b in pairwise(starts)]
            assert shown == [[colour] for colour in colours]


def test_labels_are_the_next_tokens_of_answers_only() -> None:
    table = Table([[1, 2, 3, 4, 5, 6], [7, 8, IMAGE_TOKEN, 9, 10, 11]], [(4, 8)])
    found = documents_of(load(feed_of(table, replace(ALONE, micro_batch=1, grad_accum=1))))
    none = IGNORED
    assert found[1, 2, 3, 4, 5, 6] == (none, 3, 4, 5, 6, none)
    image = IMAGE_TOKEN
    assert found[7, 8, image, image, 9, 10, 11] == (none, none, none, 9, 10, 11, none)


def test_a_truncated_sample_keeps_its_last_target() -> None:
    found = load(feed_of(Table([list(range(1, 41))]), replace(ALONE, micro_batch=1, grad_accum=1)))
    assert found.arrays["tokens"][0, 0].tolist() == list(range(1, 33))
    assert found.arrays["labels"][0, 0, -1] == 33


def test_padding_is_a_separate_document_and_is_counted() -> None:
    found = load(feed_of(Table([[1] * 10, [2] * 10]), replace(ALONE, micro_batch=1, grad_accum=1)))
    assert found.arrays["documents"][0, 0].tolist() == [0] * 10 + [1] * 10 + [2] * 12
    assert found.metrics["tokens"] == 20
    assert found.metrics["padding"] == 12
    assert found.num_valid == 14


PLANS = [
    DataShare(rank=0, dp=1, micro_batch=8, grad_accum=1),
    DataShare(rank=0, dp=2, micro_batch=1, grad_accum=4),
    DataShare(rank=0, dp=4, micro_batch=2, grad_accum=1),
    DataShare(rank=0, dp=8, micro_batch=1, grad_accum=1),
]


@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize("batching", ["pack", "bucket", "pad"])
def test_every_plan_trains_on_the_same_rows(batching: Batching, balance: bool) -> None:
    table = some_table()

    def rows(share: DataShare, step: int) -> Counter[bytes]:
        found: Counter[bytes] = Counter()
        for rank in range(share.dp):
            feed = feed_of(table, replace(share, rank=rank), batching=batching, balance=balance)
            arrays = load(feed, step).arrays
            parts = (arrays[name].reshape(-1, SEQ_LEN) for name in ("tokens", "labels", "documents"))
            found.update(np.stack(each).tobytes() for each in zip(*parts, strict=True))
        return found

    for step in (0, 3):
        alone = rows(PLANS[0], step)
        assert all(rows(share, step) == alone for share in PLANS[1:])


def test_a_batch_depends_only_on_the_step() -> None:
    feed = feed_of(some_table(), PLANS[1])
    for step in range(5):
        load(feed, step)
    fresh = load(feed_of(some_table(), PLANS[1]), 5)
    later = load(feed, 5)
    assert all(np.array_equal(fresh.arrays[name], later.arrays[name]) for name in fresh.arrays)
    assert fresh.offsets == later.offsets


def test_an_epoch_has_every_sample_once_and_pads_the_last_batch_with_empty_rows() -> None:
    table = some_table()
    seen: Counter[int] = Counter()
    shares = [DataShare(rank=rank, dp=2, micro_batch=2, grad_accum=1) for rank in range(2)]
    feeds = [feed_of(table, share, epochs=1) for share in shares]
    steps = feeds[0].steps_in(1)
    assert feeds[0].num_rows % 4, "the last batch has empty rows"
    assert steps == feeds[0].num_rows // 4 + 1
    loads: list[LoadedArrays] = []
    for step in range(steps + 1):
        loads = [load(feed, step) for feed in feeds]
        for feed, found in zip(feeds, loads, strict=True):
            seen.update(feed.samples(step, [feed.share.rank]))
            assert sorted(found.arrays) == ["documents", "grids", "labels", "patches", "tokens"]
            assert found.arrays["tokens"].shape == (1, 2, SEQ_LEN)
    assert sum(found.num_valid for found in loads) == 0
    assert seen == Counter(range(table.num_samples))
    assert feeds[0].steps_in(0.5) < steps < feeds[0].steps_in(2.5)


def test_a_quarantined_sample_keeps_its_row_without_targets() -> None:
    table = some_table()
    plain = feed_of(table)
    quarantined = next(each for each in plain.samples(0, [0]) if each % 9 == 0)
    feed = feed_of(table, quarantined=frozenset([quarantined]))
    without, with_it = load(feed), load(plain)
    assert feed.samples(0, [0]) == plain.samples(0, [0])
    assert feed.num_quarantined(0) == 1
    assert np.array_equal(without.arrays["documents"], with_it.arrays["documents"])
    assert np.array_equal(without.arrays["grids"], with_it.arrays["grids"])
    changed = (without.arrays["tokens"] != with_it.arrays["tokens"]) | (
        without.arrays["labels"] != with_it.arrays["labels"]
    )
    documents = {(a, b, int(without.arrays["documents"][a, b, c])) for a, b, c in np.argwhere(changed).tolist()}
    assert len(documents) == 1
    assert without.num_valid < with_it.num_valid
    assert (without.arrays["patches"] == 128).all(1).sum() > 0
    assert (without.arrays["tokens"] == IMAGE_TOKEN).sum() == (with_it.arrays["tokens"] == IMAGE_TOKEN).sum()
    assert without.bad == ()


def test_a_bad_image_is_reported_after_three_attempts_and_affects_no_other_sample() -> None:
    attempts = []

    class CountingTable(Table):
        def image_bytes(self, number: int, /) -> bytes:
            attempts.append(number)
            return super().image_bytes(number)

    intact = some_table()
    first = next(each for each in feed_of(intact).samples(0, [0]) if each % 9 == 0)
    second_image = int(intact.first_image[first]) + 1
    table = CountingTable(intact.texts, intact.images, files={second_image: png((1, 2, 3), (9, 9))[:45]})
    found, plain = load(feed_of(table)), load(feed_of(intact))
    (bad,) = found.bad
    assert bad.sample == first
    assert bad.reason.startswith(f"texts:{first}: the image cannot be read")
    assert attempts.count(second_image) == 3
    others = {tokens: labels for tokens, labels in documents_of(plain).items() if tokens[-1] != intact.texts[first][-1]}
    assert others.items() <= documents_of(found).items()
    assert found.num_valid < plain.num_valid
    assert found.arrays["patches"].shape == plain.arrays["patches"].shape


@pytest.mark.parametrize(
    ("text", "reason"),
    [([5, 5, 70, 5], "token id 70 is not one of the model's 60"), ([5, 5, 5], "its index says otherwise")],
)
def test_a_sample_that_contradicts_its_index_is_bad(text: list[int], reason: str) -> None:
    table = Table([[5] * 4, [6] * 4])
    _ = table.text_lengths
    table.texts = [text, [6] * 4]
    found = load(feed_of(table, rules=None, options={"vocabulary": 60}))
    assert any(reason in bad.reason for bad in found.bad)
    assert {bad.sample for bad in found.bad} == {0}
    assert (6, 6, 6, 6) in documents_of(found)


def test_a_text_with_fewer_image_tokens_than_images_is_bad() -> None:
    table = Table([[5, IMAGE_TOKEN, 5, 5]], [(8, 8)])
    _ = table.first_image, table.text_lengths
    table.texts = [[5, 5, 5, 5]]
    found = load(feed_of(table))
    assert "it has 1 images and 0 image tokens" in found.bad[0].reason
    assert found.num_valid == 0


def test_positions_restart_in_every_document() -> None:
    table = Table([[1, 2, IMAGE_TOKEN, 3, 4], [5, 6, 7]], [(12, 8)])
    rules = replace(RULES, positions="grid")
    found = load(feed_of(table, replace(ALONE, micro_batch=1, grad_accum=1), rules=rules))
    assert found.arrays["positions"].shape == (1, 3, 1, SEQ_LEN)
    assert found.arrays["grids"].tolist() == [[4, 6]]
    rows = {10: grid_positions(10, [(2, 2, 3)]), 3: grid_positions(3, ()), 19: grid_positions(19, ())}
    documents = found.arrays["documents"][0, 0]
    for document in range(3):
        here = documents == document
        assert np.array_equal(found.arrays["positions"][0, :, 0, here].T, rows[int(here.sum())])


def test_each_tile_of_an_image_has_a_grid() -> None:
    rules = ImageRules(patch=2, merge=2, image_token=IMAGE_TOKEN, variant="tiled", tile=4, max_tiles=4)
    found = load(feed_of(Table([[1, IMAGE_TOKEN, 2, 3]], [(8, 4)]), rules=rules))
    assert found.arrays["grids"][:3].tolist() == [[2, 2]] * 3
    assert (found.arrays["tokens"] == IMAGE_TOKEN).sum() == len(found.arrays["grids"])


def test_a_micro_batch_without_images_has_no_patches() -> None:
    found = load(feed_of(Table([[1] * 30, [2] * 30])))
    assert found.arrays["patches"].shape == (0, 12)
    assert found.arrays["grids"].shape == (0, 2)
    assert found.offsets == {"patches": (0, 0, 0), "grids": (0, 0, 0)}


def test_text_only_needs_no_image_rules() -> None:
    found = load(feed_of(Table([[1] * 20, [2] * 9]), rules=None))
    assert sorted(found.arrays) == ["documents", "labels", "tokens"]
    assert found.offsets == {}


def test_cached_features_replace_patches() -> None:
    class CachedFeatures:
        width, dtype = 3, np.dtype(np.float16)

        def image(self, number: int, /) -> np.ndarray:
            return np.full((tokens[number], 3), number, dtype=np.float16)

    table = some_table()
    tokens = measure_samples(table, RULES).image_tokens
    found, plain = load(feed_of(table, options={"features": CachedFeatures()})), load(feed_of(table))
    assert "patches" not in found.arrays
    assert found.arrays["features"].dtype == np.float16
    assert len(found.arrays["features"]) == (found.arrays["tokens"] == IMAGE_TOKEN).sum()
    assert np.array_equal(found.arrays["features"][:, 0], plain.arrays["patches"][::4, 0])
    assert found.offsets["features"] == tuple(offset // 4 for offset in plain.offsets["patches"])


def test_bucket_rows_have_slots_of_one_size() -> None:
    found = load(
        feed_of(Table([[7] * 9, [8] * 10, [9] * 8]), replace(ALONE, micro_batch=1, grad_accum=2), batching="bucket")
    )
    rows = {tuple(row.tolist()) for row in found.arrays["documents"][:, 0]}
    assert rows == {(0,) * 10 + (1,) * 10 + (2,) * 12, (0,) * 8 + (1,) * 24}


def test_tokens_carry_their_source() -> None:
    table = some_table(sources=np.arange(40, dtype=np.int8) % 2, source_names=("even", "odd"))
    found = load(feed_of(table))
    is_text = found.arrays["tokens"] > 0
    is_text &= found.arrays["tokens"] != IMAGE_TOKEN
    assert np.array_equal(found.arrays["sources"][is_text], (found.arrays["tokens"][is_text] - 1) % 2)


def test_metrics_show_how_much_slower_the_slowest_rank_is() -> None:
    loads = [load(feed_of(some_table(), replace(PLANS[2], rank=rank))) for rank in range(4)]
    cost = [found.metrics["cost"] for found in loads]
    slow = [found.metrics["slowest"] for found in loads]
    assert sum(slow) / sum(cost) == pytest.approx(max(cost) / np.mean(cost))
    plain = load(feed_of(some_table(), PLANS[2], balance=False))
    assert plain.metrics["slowest"] > slow[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_yields_the_same_batches(workers: int) -> None:
    feed = feed_of(some_table(), PLANS[1])
    with Loader(feed, start_step=2, steps=5, workers=workers) as loader:
        for batch in loader:
            wanted = load(feed, batch.step)
            assert batch.sample_ids == feed.samples(batch.step, [0])
            for number in range(4):
                ours = batch.micro(number)
                for name, each in micro(wanted, number).items():
                    assert np.array_equal(ours[name].numpy(), each), name


VLM_RULES = ImageRules(patch=8, merge=2, image_token=257, before=(258,), after=(259,), min_pixels=256)


def chat_section(folder: Path, **options: Any) -> DataSection:
    """Write 200 conversations in LLaVA's format, every other one with an image."""
    for number in range(10):
        (folder / f"{number}.png").write_bytes(png((number, 0, 0), (32 + 8 * number, 48)))
    with (folder / "chat.jsonl").open("w") as file:
        for number in range(200):
            image = {"image": f"{number % 10}.png"} if number % 2 else {}
            ask = {"from": "human", "value": ("<image>\n" if image else "") + "what is it? " * (1 + number % 7)}
            say = {"from": "gpt", "value": "a thing " * (1 + number % 5)}
            file.write(json.dumps({"id": number, "conversations": [ask, say], **image}) + "\n")
    return DataSection.model_validate({"source": "chat", "path": str(folder / "chat.jsonl"), "seq_len": 256} | options)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> SampleIndex:
    section = chat_section(tmp_path_factory.mktemp("chat"))
    return SampleIndex.open(prepare_samples(section, rules=VLM_RULES, cache=tmp_path_factory.mktemp("cache")))


def test_prepared_samples_give_training_and_holdout_batches(index: SampleIndex) -> None:
    section = DataSection(seq_len=256, holdout=0.1, epochs=1)
    options = SampleFeedOptions(rules=VLM_RULES, cost=COST, vocabulary=320)
    training, holdout = sample_feeds(section, index, options, share=ALONE)
    assert holdout is not None
    assert training.num_rows > 5 * holdout.num_rows
    seen: set[int] = set()
    for step in range(training.steps_in(1)):
        seen.update(training.samples(step, [0]))
    held = {each for step in range(holdout.steps_in(1)) for each in holdout.samples(step, [0])}
    assert not seen & held
    assert len(seen | held) == index.num_samples
    for feed in (training, holdout):
        found = load(feed)
        assert found.bad == ()
        assert found.num_valid > 50
        assert len(found.arrays["grids"]) > 2
    assert load(training).metrics["tokens"] + load(training).metrics["padding"] == 4 * 256
    assert (index.path.parent / "charts").is_dir()


def test_images_are_refused_for_a_model_that_takes_none(index: SampleIndex) -> None:
    with pytest.raises(UserError, match="this model takes no images") as caught:
        sample_feeds(DataSection(), index, SampleFeedOptions(rules=None, cost=COST), share=ALONE)
    assert caught.value.code == "T051"


def test_rows_too_short_for_any_sample_are_refused(index: SampleIndex) -> None:
    with pytest.raises(UserError, match=r"no sample is left to train on: .* times no target would be left") as caught:
        sample_feeds(DataSection(seq_len=2), index, SampleFeedOptions(rules=VLM_RULES, cost=COST), share=ALONE)
    assert caught.value.code == "T050"
