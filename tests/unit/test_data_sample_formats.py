"""All supported formats give the same samples; bad samples are reported and skipped."""

import base64
import csv
import gzip
import io
import json
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from trimaran.core import DataSection, ImageRules, UserError
from trimaran.data import (
    CAPTIONS,
    CONVERSATIONS,
    QUESTIONS,
    BadSampleError,
    ImageFinder,
    SampleIndex,
    prepare_samples,
    read_row,
)
from trimaran.data import IMAGES as IMAGE_FIELDS

RULES = ImageRules(patch=8, merge=2, image_token=257)
IMAGE = 257
ASKED = "what is it?"
FIELDS = [
    *CONVERSATIONS, *CAPTIONS, *IMAGE_FIELDS, *(name for pair in QUESTIONS for name in pair),
    "texts", "from", "value", "role", "content", "type", "image_url", "url", "path", "bytes", "input", "user",
]  # fmt: skip


def png(width: int, height: int, colour: str = "red", kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(file, kind, **options)
    return file.getvalue()


IMAGES = [png(40, 24), png(16, 64, "blue"), png(33, 17, "green", "JPEG")]
ANSWERS = ["a red bar", "a blue bar", "ein grüner Fleck"]
# The text of each sample, without image and end tokens.
CHAT = [f"{ASKED}\n{answer}" for answer in ANSWERS]


def section(source: str, path: Path | None = None, **fields: Any) -> DataSection:
    where = {} if path is None else {"path": str(path)}
    return DataSection.model_validate({"source": source, **where, **fields})


def indexed(cache: Path, data: DataSection, rules: ImageRules | None = RULES) -> SampleIndex:
    index = SampleIndex.open(prepare_samples(data, rules=rules, cache=cache))
    index.verify()
    return index


def texts_of(index: SampleIndex) -> list[str]:
    return [index.tokenizer.decode(index.sample(number).tokens) for number in range(index.num_samples)]


def target_text(index: SampleIndex, number: int) -> str:
    sample = index.sample(number)
    return index.tokenizer.decode(sample.tokens[sample.targets])


def save_images(folder: Path) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(IMAGES):
        (folder / f"{number}.png").write_bytes(data)  # the first bytes decide the format, not the name
    return [f"{number}.png" for number in range(len(IMAGES))]


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def write_llava(folder: Path) -> DataSection:
    names = save_images(folder / "images")
    rows = [
        {
            "image": name,
            "conversations": [{"from": "human", "value": f"<image>{ASKED}"}, {"from": "gpt", "value": answer}],
        }
        for name, answer in zip(names, ANSWERS, strict=True)
    ]
    (folder / "llava.json").write_text(json.dumps(rows, indent=1))  # one list, like LLaVA's own files
    return section("chat", folder / "llava.json", samples={"images": str(folder / "images")})


def write_mixed_lines(folder: Path) -> DataSection:
    """Write one line of each format; the fields of a line decide which it is."""
    names = save_images(folder)
    inline = "data:image/jpeg;base64," + base64.b64encode(IMAGES[2]).decode()
    rows = [
        {"images": [names[0]], "conversations": [{"from": "human", "value": ASKED},
                                                 {"from": "gpt", "value": ANSWERS[0]}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "image": names[1]},
                                                   {"type": "text", "text": ASKED}]},
                      {"role": "assistant", "content": ANSWERS[1]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": inline}}, ASKED]},
                      {"role": "assistant", "content": [{"type": "text", "text": ANSWERS[2]}]}]},
    ]  # fmt: skip
    return section("chat", write_lines(folder / "lines.jsonl", rows))


def write_tars(folder: Path) -> DataSection:
    for shard, numbers in enumerate([(0, 1), (2,)]):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in numbers:
                turns = [{"from": "human", "value": ASKED}, {"from": "gpt", "value": ANSWERS[number]}]
                members = {"jpg": IMAGES[number], "json": json.dumps({"conversations": turns, "image": "x"}).encode()}
                for kind, data in members.items():
                    member = tarfile.TarInfo(f"some/{number:04d}.{kind}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return section("webdataset", folder)


def write_parquet(folder: Path) -> DataSection:
    messages = [[{"role": "user", "content": ASKED}, {"role": "assistant", "content": answer}] for answer in ANSWERS]
    images = [{"bytes": data, "path": None} for data in IMAGES]
    pq.write_table(pa.table({"picture": images, "messages": messages}), folder / "rows.parquet")
    return section("parquet", folder)


def write_saved(folder: Path) -> DataSection:
    import datasets  # noqa: PLC0415  it imports pandas and pyarrow

    features = datasets.Features(
        {
            "images": datasets.List(datasets.Image()),
            "question": datasets.Value("string"),
            "answer": datasets.Value("string"),
        }
    )
    rows = {
        "images": [[{"bytes": data, "path": None}] for data in IMAGES],
        "question": [ASKED] * 3,
        "answer": ANSWERS,
    }
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(folder / "saved")
    return section("datasets", folder / "saved")


def as_chat(write: Callable[[Path], DataSection]) -> Callable[[Path], DataSection]:
    """Return `write` with the source chat, which finds out the kind of the files."""

    def write_for_chat(folder: Path) -> DataSection:
        return section("chat", Path(write(folder).path or ""))

    return write_for_chat


@pytest.mark.parametrize(
    "write",
    [
        write_llava,
        write_mixed_lines,
        write_tars,
        write_parquet,
        write_saved,
        pytest.param(as_chat(write_parquet), id="parquet as chat"),
        pytest.param(as_chat(write_saved), id="saved dataset as chat"),
    ],
)
def test_every_format_gives_the_same_samples(write: Callable[[Path], DataSection], tmp_path: Path) -> None:
    index = indexed(tmp_path / "cache", write(tmp_path))
    assert texts_of(index) == CHAT
    assert [target_text(index, number) for number in range(3)] == ANSWERS
    assert [index.image_bytes(number) for number in range(index.num_images)] == IMAGES
    assert index.image_sizes.tolist() == [[40, 24], [16, 64], [33, 17]]
    assert index.image_counts.tolist() == [1, 1, 1]
    for number in range(3):
        sample = index.sample(number)
        assert sample.tokens[0] == IMAGE  # no text comes before it
        assert not sample.targets[0]
        assert sample.tokens[-1] == index.tokenizer.end_id  # the end is a target
        assert sample.targets[-1]
        assert sample.images == range(number, number + 1)
    assert index.text_lengths.tolist() == [len(text.encode()) + 2 for text in CHAT]
    assert index.bad == []


def test_images_stay_in_files_and_tars_and_are_copied_from_tables(tmp_path: Path) -> None:
    for write, copied in ((write_llava, 0), (write_tars, 0), (write_parquet, sum(map(len, IMAGES)))):
        folder = tmp_path / write.__name__
        folder.mkdir()
        (part,) = indexed(folder / "cache", write(folder)).parts
        assert sum(file.stat().st_size for file in part.path.glob("pictures-*")) == copied


def test_an_image_folder_takes_captions_from_lists_and_from_files_of_the_same_name(tmp_path: Path) -> None:
    folder = tmp_path / "album"
    save_images(folder / "deep")
    (folder / "deep" / "0.txt").write_text("a red bar\n")
    (folder / "deep" / "1.json").write_text(json.dumps({"caption": "a blue bar", "image": "elsewhere.png"}))
    write_lines(folder / "metadata.jsonl", [{"file_name": "deep/2.png", "text": "ein grüner Fleck"}])
    (folder / "alone.png").write_bytes(png(8, 8))
    index = indexed(tmp_path / "cache", section("image-folder", folder, samples={"max_bad": 0.5}))
    assert sorted(texts_of(index)) == sorted(ANSWERS)
    assert all(index.sample(number).targets[1:].all() for number in range(3))  # every caption token is a target
    assert [entry["where"] for entry in index.bad] == [str(folder / "alone.png")]
    assert "no caption" in index.bad[0]["reason"]


def test_tars_hold_captions_and_classes_and_a_truncated_one_keeps_the_samples_before(tmp_path: Path) -> None:
    path = tmp_path / "shard.tar"
    members = {
        "a.png": IMAGES[0],
        "a.txt": b"a red bar\n",
        "b.cls": b"7",
        "b.png": IMAGES[1],
        "c.png": IMAGES[2] * 9,
    }
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    path.write_bytes(path.read_bytes()[:5000])  # inside the last image
    index = indexed(tmp_path / "cache", section("webdataset", path, samples={"max_bad": 0.9}))
    assert texts_of(index) == ["a red bar", "7"]
    assert [index.image_bytes(number) for number in (0, 1)] == IMAGES[:2]
    assert any("truncated" in entry["reason"] for entry in index.bad)


def test_texts_and_text_columns_are_documents_and_all_tokens_are_targets(tmp_path: Path) -> None:
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "one.txt").write_text("three hulls")
    (tmp_path / "books" / "two.txt").write_bytes(b"\xff\xfe")
    lines = write_lines(tmp_path / "lines.jsonl", [{"body": "one boat"}])
    pq.write_table(pa.table({"data": [{"body": "drei Rümpfe"}]}), tmp_path / "rows.parquet")
    mixture = [
        {"name": "books", "source": "text", "path": str(tmp_path / "books")},
        {"name": "lines", "source": "jsonl", "path": str(lines), "text_field": "body"},
        {"name": "rows", "source": "parquet", "path": str(tmp_path / "rows.parquet"), "text_field": "data.body"},
    ]
    index = indexed(tmp_path / "cache", section("text", mixture=mixture, samples={"max_bad": 0.5}), rules=None)
    assert texts_of(index) == ["three hulls", "one boat", "drei Rümpfe"]
    assert all(index.sample(number).targets.all() for number in range(3))
    assert index.sources.tolist() == [0, 1, 2]
    assert index.source_names == ("books", "lines", "rows")
    assert [entry["source"] for entry in index.bad] == ["books"]


PAIRS = [("Who, then?", 'the "cat"'), ("two\nlines", "drei Rümpfe")]


@pytest.mark.parametrize(("delimiter", "name"), [(",", "a.csv"), (";", "a.CSV"), ("\t", "a.tsv"), (",", "a.csv.gz")])
def test_the_columns_of_a_csv_file_are_the_fields_of_its_rows(tmp_path: Path, delimiter: str, name: str) -> None:
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter).writerows([("instruction", "output"), *PAIRS])
    data = text.getvalue().encode("utf-8-sig")
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    index = indexed(tmp_path / "cache", section("chat", tmp_path / name))
    assert texts_of(index) == ["\n".join(pair) for pair in PAIRS]
    assert [target_text(index, number) for number in range(2)] == [answer for _, answer in PAIRS]
    assert [index.origin(number) for number in range(2)] == [f"{tmp_path / name}:2", f"{tmp_path / name}:3"]


def test_rows_of_a_csv_file_that_do_not_fit_its_first_line_are_bad(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('prompt,completion\na,b\nc,d,e\nf\n\ng,h\n"open,i\n')
    index = indexed(tmp_path / "cache", section("chat", path, samples={"max_bad": 0.6}))
    assert texts_of(index) == ["a\nb", "g\nh"]
    assert [entry["where"] for entry in index.bad] == [f"{path}:{line}" for line in (3, 4, 7)]
    assert "it has 3 values, and the first line has 2 names" in index.bad[0]["reason"]
    assert "the rest of the file cannot be read" in index.bad[2]["reason"]
    path.write_text("prompt,prompt\na,b\n")
    with pytest.raises(UserError, match="two columns have the same name"):
        indexed(tmp_path / "cache", section("chat", path))


def test_a_folder_of_chats_is_read_in_one_format_without_the_files_about_it(tmp_path: Path) -> None:
    folder = tmp_path / "chats"
    folder.mkdir()
    (folder / "dataset_infos.json").write_text("{}")
    (folder / "rows.csv").write_text("prompt,completion\ncsv,b\n")
    assert texts_of(indexed(tmp_path / "cache", section("chat", folder))) == ["csv\nb"]
    pq.write_table(pa.Table.from_pylist([{"prompt": "parquet", "completion": "b"}]), folder / "rows.parquet")
    assert texts_of(indexed(tmp_path / "cache", section("chat", folder))) == ["parquet\nb"]
    write_lines(folder / "rows.jsonl", [{"prompt": "lines", "completion": "b"}])
    assert texts_of(indexed(tmp_path / "cache", section("chat", folder))) == ["lines\nb"]


def test_preference_data_is_refused_unless_the_answer_is_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "dpo.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 3)
    for field in ("text", "rejected"):
        with pytest.raises(UserError, match="preference data") as refused:
            indexed(tmp_path / "cache", section("chat", path, text_field=field))
        assert (refused.value.code, refused.value.where) == ("T077", f"{path}:1")
    index = indexed(tmp_path / "cache", section("chat", path, text_field="chosen"))
    assert texts_of(index) == ["a\nb"] * 3
    assert target_text(index, 0) == "b"


def test_what_was_prepared_by_other_rules_is_prepared_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = section("chat", write_lines(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b"}]))
    index = indexed(tmp_path / "cache", data)
    monkeypatch.setattr(sys.modules[prepare_samples.__module__], "READING_RULES", 1)
    assert indexed(tmp_path / "cache", data).parts[0].path != index.parts[0].path


def test_a_long_document_is_split_without_losing_a_target(tmp_path: Path) -> None:
    text = "".join(chr(97 + number % 26) for number in range(50))
    (tmp_path / "book.txt").write_text(text)
    index = indexed(tmp_path / "cache", section("text", tmp_path / "book.txt", seq_len=16))
    parts = [index.sample(number).tokens for number in range(index.num_samples)]
    assert max(map(len, parts)) == 16
    targets = np.concatenate([part[1:] for part in parts])  # tokens with an input before them in the same part
    assert targets.tolist() == [*text.encode()[1:], 256]


def test_markers_place_images_and_are_text_without_images(tmp_path: Path) -> None:
    names = save_images(tmp_path)
    turns = [{"from": "human", "value": "left <image>, right <image>?"}, {"from": "gpt", "value": "<image> is a word"}]
    rows = [
        {"image": names[:2], "conversations": [turns[0], {"from": "gpt", "value": "yes"}]},
        {"conversations": turns},
        {"image": names[:1], "conversations": [{"from": "system", "value": "be brief"},
                                               {"from": "human", "value": "who?"}, {"from": "gpt", "value": "she"}]},
    ]  # fmt: skip
    index = indexed(tmp_path / "cache", section("chat", write_lines(tmp_path / "rows.jsonl", rows)))
    first, second, third = (index.sample(number).tokens.tolist() for number in range(3))
    assert first == [*b"left ", 257, *b", right ", 257, *b"?\nyes", 256]
    assert second == [*b"left <image>, right <image>?\n<image> is a word", 256]
    assert third == [*b"be brief\n", 257, *b"who?\nshe", 256]


def test_a_bad_row_is_skipped_with_its_position_and_reason(tmp_path: Path) -> None:
    names = save_images(tmp_path / "images")
    (tmp_path / "images" / "cut.png").write_bytes(IMAGES[0][:12])
    (tmp_path / "secret.png").write_bytes(IMAGES[0])
    (tmp_path / "images" / "strip.png").write_bytes(png(2000, 2))
    answer = {"from": "gpt", "value": "yes"}

    def question_row(image: Any, value: str = "and?") -> dict[str, Any]:
        return {"image": image, "conversations": [{"from": "human", "value": value}, answer]}

    cases = {
        '{"broken': "not JSON",
        "[1, 2]": "not an object",
        '{"x": "\ufffd"}': "none of its fields",
        json.dumps(question_row("gone.png")): "No such file",
        json.dumps(question_row("cut.png")): "damaged",
        json.dumps(question_row("strip.png")): "2000 x 2",
        json.dumps(question_row("../secret.png")): "leaves the image folder",
        json.dumps(question_row(str(tmp_path / "secret.png"))): "leaves the image folder",
        json.dumps(question_row("https://example.org/a.png")): "not downloaded",
        json.dumps(question_row(7)): "is a int",
        json.dumps(question_row(names[0], "<image><image>")): "2 image markers, but 1",
        json.dumps({"conversations": [{"from": "human", "value": "hello?"}]}): "no answer",
        json.dumps({"conversations": [{"from": "ghost", "value": "hu"}, answer]}): "ghost",
        json.dumps({"conversations": [{"from": "human", "value": "\ud800"}, answer]}): "surrogate",
        json.dumps({"conversations": "yes"}): "not a list",
        "[" * 100_000: "not JSON",
    }
    rows = [line for case in cases for line in (case, json.dumps(question_row(str(tmp_path / "images" / names[0]))))]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    data = section("chat", path, samples={"images": str(tmp_path / "images"), "max_bad": 0.6})
    index = indexed(tmp_path / "cache", data)
    assert index.num_samples == len(cases)
    assert [entry["where"] for entry in index.bad] == [f"{path}:{2 * number + 1}" for number in range(len(cases))]
    for entry, reason in zip(index.bad, cases.values(), strict=True):
        assert reason in entry["reason"]
    assert index.origin(1) == f"{path}:4"


def test_too_many_bad_samples_raise_with_a_report_and_leave_no_files(tmp_path: Path) -> None:
    rows = [{"text": "fine"}] * 7 + [{"image": f"{number}.png", "caption": "gone"} for number in range(7)]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    with pytest.raises(UserError, match=r"7 of 14 samples of chat are bad") as stopped:
        indexed(tmp_path / "cache", section("chat", path))
    assert stopped.value.code == "T031"
    assert f"{path}:8: the image cannot be read: No such file" in stopped.value.what
    assert "and 2 more" in stopped.value.what
    assert list((tmp_path / "cache").iterdir()) == []
    for number in range(7):
        (tmp_path / f"{number}.png").write_bytes(IMAGES[0])
    assert indexed(tmp_path / "cache", section("chat", path)).num_samples == 14  # corrected, nothing to delete


def test_a_damaged_table_does_not_affect_the_others(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing else")
    pq.write_table(pa.table({"text": ["whole"]}), tmp_path / "b.parquet")
    index = indexed(tmp_path / "cache", section("parquet", tmp_path, samples={"max_bad": 0.5}), rules=None)
    assert texts_of(index) == ["whole"]
    assert index.bad[0]["where"] == f"{tmp_path / 'a.parquet'}:1"


def test_a_rotated_image_is_measured_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "side.jpg").write_bytes(png(40, 24, kind="JPEG", exif=exif))
    (tmp_path / "side.txt").write_text("a bar")
    assert indexed(tmp_path / "cache", section("image-folder", tmp_path)).image_sizes.tolist() == [[24, 40]]


def test_a_model_without_images_skips_samples_with_images_unless_there_are_too_many(tmp_path: Path) -> None:
    data = write_llava(tmp_path)
    with pytest.raises(
        UserError, match="3 of 3 samples of chat have images, and this model takes no images"
    ) as stopped:
        indexed(tmp_path / "cache", data, rules=None)
    assert (stopped.value.code, stopped.value.where) == ("T051", "model.family")
    rows = [*json.loads((tmp_path / "llava.json").read_text()), {"text": "no image"}]
    (tmp_path / "llava.json").write_text(json.dumps(rows))
    mostly = {"images": str(tmp_path / "images"), "max_bad": 0.8}
    index = indexed(tmp_path / "cache", section("chat", tmp_path / "llava.json", samples=mostly), rules=None)
    assert texts_of(index) == ["no image"]
    assert {entry["reason"] for entry in index.bad} == {"it has an image, and the model takes no images"}


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=8)
    | st.sampled_from(["<image>", "human", "gpt", "a.png"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(JSON)
def test_any_json_row_is_a_sample_or_a_bad_sample(row: Any) -> None:
    try:
        turns, images = read_row(row, ImageFinder("/images"))
    except BadSampleError:
        return
    assert sum(part is None for turn in turns for part in turn.parts) == len(images)
    assert any(part for turn in turns if turn.role in ("assistant", "text") for part in turn.parts)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"source": "webdataset", "path": "shards.tar.gz"}, "T035"),
        ({"source": "webdataset", "path": "folder"}, "T005"),
        ({"source": "chat", "path": "missing.jsonl"}, "T003"),
        ({"source": "shapes", "path": "folder"}, "T002"),
        ({"source": "text", "mixture": [{"name": "old", "source": "shards", "path": "folder"}]}, "T030"),
        ({"source": "text", "mixture": [{"name": "two", "source": "shapes"}] * 2}, "T039"),
        ({"source": "chat", "path": "empty.jsonl"}, "T032"),
    ],
)
def test_a_mistake_in_a_source_has_its_code(
    fields: dict[str, Any], code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("folder/readme").write_text("nothing")
    Path("shards.tar.gz").write_bytes(b"...")
    Path("empty.jsonl").write_text("\n")
    with pytest.raises(UserError) as mistake:
        prepare_samples(DataSection.model_validate(fields), rules=RULES, cache=tmp_path / "cache")
    assert mistake.value.code == code
