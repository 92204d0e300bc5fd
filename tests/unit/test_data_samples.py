"""Samples on disk: tokens, targets, mixtures, damage and concurrent preparation."""

import io
import json
import multiprocessing
import os
import shutil
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from PIL import Image
from tokenizers import decoders, models, pre_tokenizers, trainers

from trimaran.core import DataSection, ImageRules, UserError
from trimaran.data import (
    TEMPLATES,
    BadSampleError,
    SampleIndex,
    check_vocabulary,
    prepare_samples,
    repeat_ids,
    repeats_per_epoch,
)

RULES = ImageRules(patch=8, merge=2, image_token=257)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
TALK = [("system", "Be brief."), ("user", "Who is there? "), ("assistant", "Nobody, but thé cat."), ("user", "And?"),
        ("assistant", "A dog.")]  # fmt: skip


def conversation(*turns: tuple[str, str], image: Any = None) -> dict[str, Any]:
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    return row if image is None else row | {"image": image}


def chat(folder: Path, rows: list[Any], name: str = "rows.jsonl", **fields: Any) -> DataSection:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataSection.model_validate({"source": "chat", "path": str(folder / name), **fields})


def index_of(cache: Path, data: DataSection, rules: ImageRules | None = None) -> SampleIndex:
    return SampleIndex.open(prepare_samples(data, rules=rules, cache=cache))


def train_tokenizer(path: Path, special: list[str], *, hidden: list[str] | None = None) -> tokenizers.Tokenizer:
    """Write a byte-level BPE tokenizer; the `hidden` tokens are added without being marked as special."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([f" {content}" for _, content in TALK] * 3, trainer)
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(hidden or [])
    tokenizer.save(str(path))
    return tokenizer


def make_image(path: Path) -> str:
    Image.new("RGB", (16, 16)).save(path)
    return path.name


# Templates


@pytest.mark.parametrize(
    ("special", "written", "target_texts"),
    [
        (
            SPECIAL,
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho is there? <|im_end|>\n"
            "<|im_start|>assistant\nNobody, but thé cat.<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n"
            "<|im_start|>assistant\nA dog.<|im_end|>\n",
            ["Nobody, but thé cat.<|im_end|>", "A dog.<|im_end|>"],
        ),
        (
            ["<|end_of_text|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nWho is there? <|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nNobody, but thé cat.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nAnd?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nA dog.<|eot_id|>",
            ["Nobody, but thé cat.<|eot_id|>", "A dog.<|eot_id|>"],
        ),
        (
            ["<s>", "</s>"],
            "<s>Be brief. USER: Who is there?  ASSISTANT: Nobody, but thé cat.</s>USER: And? ASSISTANT: A dog.</s>",
            [" Nobody, but thé cat.</s>", " A dog.</s>"],  # the space is part of the first token
        ),
    ],
    ids=["chatml", "llama3", "vicuna"],
)  # fmt: skip
def test_a_conversation_uses_the_template_of_its_tokenizer_and_only_answers_are_targets(
    special: list[str], written: str, target_texts: list[str], tmp_path: Path
) -> None:
    tokenizer = train_tokenizer(tmp_path / "tokenizer.json", special)
    data = chat(tmp_path, [conversation(*TALK)], tokenizer=str(tmp_path / "tokenizer.json"))
    sample = index_of(tmp_path / "cache", data).sample(0)
    # Other libraries tokenize the full text at once, including special tokens.
    assert sample.tokens.tolist() == tokenizer.encode(written, add_special_tokens=False).ids
    answers = np.split(sample.tokens, np.flatnonzero(np.diff(sample.targets, prepend=False)))[1::2]
    assert [tokenizer.decode(each.tolist(), skip_special_tokens=False) for each in answers] == target_texts


def test_every_template_can_be_chosen_and_works_with_bytes(tmp_path: Path) -> None:
    for name in TEMPLATES:
        data = chat(tmp_path, [conversation(("user", "Who?"), ("assistant", "I."))], samples={"template": name})
        sample = index_of(tmp_path / "cache", data).sample(0)
        target_text = bytes(sample.tokens[sample.targets & (sample.tokens < 256)].tolist()).decode()
        assert target_text.startswith("I.")


@pytest.mark.parametrize("hidden", [False, True], ids=["marked special", "not marked special"])
def test_user_text_never_becomes_a_special_token(hidden: bool, tmp_path: Path) -> None:
    markers = "".join(SPECIAL[1:])
    train_tokenizer(
        tmp_path / "tokenizer.json", SPECIAL[:1] if hidden else SPECIAL, hidden=SPECIAL[1:] if hidden else []
    )
    image = make_image(tmp_path / "a.png")
    rows = [conversation(("user", markers), ("assistant", markers), image=image), {"text": f"{markers}<|endoftext|>"}]
    data = chat(tmp_path, rows, tokenizer=str(tmp_path / "tokenizer.json"))
    plain = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    start, end, begin, finish, pad = (plain.token_to_id(each) for each in SPECIAL[1:])
    assert pad is not None
    rules = ImageRules(patch=8, merge=2, image_token=pad)
    index = index_of(tmp_path / "cache", data, rules)
    counts = Counter(index.sample(0).tokens.tolist())
    assert [counts[each] for each in (start, end, begin, finish, pad)] == [2, 2, 1, 1, 1]  # only those of the template
    text = index.sample(1).tokens
    special: list[Any] = [plain.token_to_id(each) for each in SPECIAL]
    assert not np.isin(text[:-1], special).any()
    assert plain.decode(text[:-1].tolist(), skip_special_tokens=False) == f"{markers}<|endoftext|>"


def test_an_image_token_that_is_an_ordinary_token_is_refused(tmp_path: Path) -> None:
    train_tokenizer(tmp_path / "tokenizer.json", SPECIAL)
    data = chat(tmp_path, [{"text": "a"}], tokenizer=str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="is the image token") as refused:
        index_of(tmp_path / "cache", data, RULES)
    assert refused.value.code == "T036"
    assert "<|image_pad|> is " in refused.value.fix


def test_the_vocabulary_includes_the_image_token(tmp_path: Path) -> None:
    index = index_of(tmp_path / "cache", chat(tmp_path, [{"text": "a"}]), RULES)
    assert index.vocab_size == 258
    check_vocabulary(index.vocab_size, 258)
    with pytest.raises(UserError, match="258 token ids, the model has 257"):
        check_vocabulary(index.vocab_size, 257)


# Mixtures


def test_an_epoch_follows_the_weights_and_contains_every_source_completely() -> None:
    assert repeats_per_epoch([100, 10], [1.0, 1.0], [None, None]) == [1, 10]
    assert repeats_per_epoch([100, 300], [0.5, 1.5], [None, None]) == [1, 1]
    weights, epochs = [1.0, 1.0, None, None], [None, None, 2.5, None]
    assert repeats_per_epoch([100, 10, 7, 7], weights, epochs) == [1, 10, Fraction(5, 2), 1]
    with pytest.raises(UserError, match="one epoch of the mixture has") as refused:
        repeats_per_epoch([1_000_000, 10], [0.001, 0.999], [None, None])
    assert refused.value.code == "T038"


def test_the_seed_chooses_the_samples_of_a_fractional_epoch() -> None:
    samples = np.arange(100, 200)
    counts = Counter(repeat_ids(samples, Fraction(9, 4), seed=1).tolist())
    assert counts.keys() == set(range(100, 200))
    assert sorted(counts.values()) == [2] * 75 + [3] * 25
    again, other = (repeat_ids(samples, Fraction(1, 4), seed) for seed in (1, 2))
    assert len(again) == len(set(again.tolist())) == 25
    assert again.tolist() == repeat_ids(samples, Fraction(1, 4), 1).tolist() != other.tolist()


def mixture(folder: Path, **weights: dict[str, float]) -> DataSection:
    sources = []
    for number, (name, fields) in enumerate(weights.items()):
        rows = [{"text": f"{name} {each}"} for each in range(10 * (number + 1))]
        sources.append({"name": name, "source": "chat", "path": chat(folder, rows, f"{name}.jsonl").path, **fields})
    return DataSection.model_validate({"mixture": sources})


def test_samples_of_every_source_are_held_out_and_never_trained_on(tmp_path: Path) -> None:
    index = index_of(tmp_path / "cache", mixture(tmp_path, a={"epochs": 2}, b={}, c={"epochs": 0.5}))
    held_out = index.holdout_mask(0.1, seed=3)
    assert Counter(index.sources[held_out].tolist()) == {0: 1, 1: 2, 2: 3}
    assert (held_out == index.holdout_mask(0.1, seed=3)).all()
    assert not index.holdout_mask(0.0, seed=3).any()
    counts = Counter(index.mixed(3, keep=~held_out).tolist())
    assert not counts.keys() & set(np.flatnonzero(held_out).tolist())
    assert Counter(index.sources[list(counts.elements())].tolist()) == {0: 18, 1: 18, 2: 14}  # round(13.5) is even
    assert Counter(index.mixed(3).tolist()).total() == 20 + 20 + 15


def test_another_mixture_reuses_the_prepared_sources(tmp_path: Path) -> None:
    first = index_of(tmp_path / "cache", mixture(tmp_path, a={}, b={}))
    stats = {part.path: part.path.stat().st_ino for part in first.parts}
    reported: list[str] = []
    data = mixture(tmp_path, a={"epochs": 3}, b={})
    for name in "ab":
        os.utime(tmp_path / f"{name}.jsonl", ns=(1, 1))
    first = index_of(tmp_path / "cache", data)  # the files have changed, so they are read again
    assert {part.path for part in first.parts}.isdisjoint(stats)
    sources = [*data.mixture, data.mixture[0].model_copy(update={"name": "c", "weight": 2.0, "epochs": None})]
    path = prepare_samples(
        DataSection(mixture=tuple(sources)),
        rules=None,
        cache=tmp_path / "cache",
        progress=lambda what, _: reported.append(what),
    )
    assert reported == []
    assert [part.path for part in SampleIndex.open(path).parts[:2]] == [part.path for part in first.parts]
    assert SampleIndex.open(path).digest != first.digest


# On disk


def test_images_and_samples_are_numbered_across_sources(tmp_path: Path) -> None:
    sources, files = [], []
    for name in "ab":
        folder = tmp_path / name
        folder.mkdir()
        for number in range(2):
            Image.new("RGB", (16 + number, 20), (number, 0, ord(name))).save(folder / f"{number}.png")
            files.append((folder / f"{number}.png").read_bytes())
        rows = [{"text": "no image"}, {"image": ["0.png", "1.png"], "caption": f"two in {name}"}]
        sources.append({"name": name, "source": "chat", "path": chat(folder, rows).path})
    index = index_of(tmp_path / "cache", DataSection.model_validate({"mixture": sources}), RULES)
    assert index.first_image.tolist() == [0, 0, 2, 2, 4]
    assert [index.image_bytes(number) for number in range(4)] == files
    assert index.image_sizes.tolist() == [[16, 20], [17, 20]] * 2
    assert index.sample(3).images == range(2, 4)
    assert index.sample(3).source == 1
    assert index.origin(3) == f"{tmp_path / 'b' / 'rows.jsonl'}:2"
    assert index.tokenizer.decode(index.sample(3).tokens) == "two in b"


def test_a_changed_image_file_is_a_bad_sample(tmp_path: Path) -> None:
    image = make_image(tmp_path / "a.png")
    index = index_of(tmp_path / "cache", chat(tmp_path, [{"image": image, "caption": "black"}]), RULES)
    (tmp_path / "a.png").write_bytes(b"longer than before, and no longer an image" * 15)
    with pytest.raises(BadSampleError, match=r"a\.png has changed"):
        index.image_bytes(0)
    (tmp_path / "a.png").unlink()
    with pytest.raises(OSError, match=r"a\.png"):
        index.image_bytes(0)


def test_the_digest_depends_on_the_content_and_not_on_paths(tmp_path: Path) -> None:
    image = make_image(tmp_path / "a.png")
    data = chat(tmp_path / "here", [{"image": image, "caption": "black"}], samples={"images": str(tmp_path)})
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    moved = data.model_copy(update={"path": str(tmp_path / "there" / "rows.jsonl")})
    other = chat(tmp_path / "other", [{"image": image, "caption": "blank"}], samples={"images": str(tmp_path)})
    digests = [index_of(tmp_path / "cache", each, RULES).digest for each in (data, moved, other)]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("name", ["tokens", "targets", "ends", "sizes", "mixture.json", "meta.json"])
def test_damage_is_detected(name: str, tmp_path: Path) -> None:
    index = index_of(
        tmp_path / "cache", chat(tmp_path, [{"image": make_image(tmp_path / "a.png"), "caption": "b"}]), RULES
    )
    file = (index.path if name == "mixture.json" else index.parts[0].path) / name
    data = file.read_bytes()
    file.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(UserError, match=r"T033|T034"):
        SampleIndex.open(index.path).verify()
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match=r"T033|T034"):
        SampleIndex.open(index.path)


def test_concurrent_processes_prepare_the_same_samples(tmp_path: Path) -> None:
    data = chat(tmp_path, [{"text": f"row {number}"} for number in range(3000)])
    context = multiprocessing.get_context("fork")
    others = [context.Process(target=prepare_samples, args=(data,), kwargs={"rules": None, "cache": tmp_path / "cache"})
              for _ in range(3)]  # fmt: skip
    for process in others:
        process.start()
    index = index_of(tmp_path / "cache", data)
    for process in others:
        process.join()
    assert [process.exitcode for process in others] == [0, 0, 0]
    index.verify()
    assert len(list((tmp_path / "cache").iterdir())) == 2  # the folders of the source and the mixture, and no draft


def test_a_cache_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("where a folder should be")
    with pytest.raises(UserError) as mistake:
        index_of(tmp_path / "file" / "cache", chat(tmp_path, [{"text": "a"}]))
    assert mistake.value.code == "T037"


def test_forks_read_images_from_a_shared_file_descriptor(tmp_path: Path) -> None:
    """All forks share one open file: reads that move its position would return wrong bytes."""
    images = []
    for number in range(40):
        file = io.BytesIO()
        Image.new("RGB", (10 + number, 10), (number, 0, 0)).save(file, "PNG")
        images.append(file.getvalue())
    rows = {"image": [{"bytes": each, "path": None} for each in images], "text": ["a"] * 40}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    index = index_of(tmp_path / "cache", DataSection(source="parquet", path=str(tmp_path / "rows.parquet")), RULES)
    assert index.image_bytes(0) == images[0]  # opens the file before the forks

    def read() -> None:
        for _ in range(20):
            assert [index.image_bytes(number) for number in range(40)] == images

    forks = [multiprocessing.get_context("fork").Process(target=read) for _ in range(3)]
    for fork in forks:
        fork.start()
    for fork in forks:
        fork.join()
    assert [fork.exitcode for fork in forks] == [0, 0, 0]
