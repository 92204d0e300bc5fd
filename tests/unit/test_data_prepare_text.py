"""Preparing a text source as packed shards in a cache."""

import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from trimaran.core import DataSection, UserError
from trimaran.data import TokenShards, cache_folder, check, pack, prepare

ROWS = ["three hulls", "one boat, drei Rümpfe"]


def section(source: str, path: Path | None = None, **fields: object) -> DataSection:
    where = {} if path is None else {"path": str(path)}
    return DataSection.model_validate({"source": source, "seq_len": 2, **where, **fields})


def documents(folder: Path) -> list[str]:
    """Return the texts that were packed."""
    shards = TokenShards.open(folder)
    shards.verify()
    found: list[list[int]] = [[]]
    for token in shards.tokens(0, shards.num_tokens).tolist():
        if token == shards.meta.end_id:
            found.append([])
        else:
            found[-1].append(token)
    assert found.pop() == []
    return [shards.tokenizer.decode(ids) for ids in found]


def write_text(folder: Path) -> DataSection:
    for number, row in enumerate(ROWS):
        (folder / f"{number}.txt").write_text(row)
    return section("text", folder)


def write_jsonl(folder: Path) -> DataSection:
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in ROWS))
    return section("jsonl", folder / "rows.jsonl")


def write_saved(folder: Path) -> DataSection:
    import datasets  # noqa: PLC0415  it imports pandas and pyarrow

    datasets.Dataset.from_dict({"n": [1, 2], "text": ROWS}).save_to_disk(folder / "saved")
    return section("datasets", folder / "saved")


def write_splits(folder: Path) -> DataSection:
    import datasets  # noqa: PLC0415  it imports pandas and pyarrow

    rows = datasets.Dataset.from_dict({"text": ROWS})
    test = rows.select([0])
    assert isinstance(test, datasets.Dataset)
    datasets.DatasetDict({"test": test, "train": rows}).save_to_disk(folder / "splits")
    return section("datasets", folder / "splits")


def write_tables(folder: Path) -> DataSection:
    import datasets  # noqa: PLC0415  it imports pandas and pyarrow

    datasets.Dataset.from_dict({"n": [1], "text": ROWS[:1]}).to_parquet(folder / "a.parquet")
    (folder / "b.json").write_text(json.dumps([{"text": ROWS[1]}]))
    (folder / "c.jsonl").touch()
    (folder / "README.md").write_text("about the rows")
    return section("datasets", folder)


@pytest.mark.parametrize("write", [write_text, write_jsonl, write_saved, write_splits, write_tables])
def test_every_source_packs_the_same_documents(tmp_path: Path, write) -> None:
    data = write(tmp_path)
    check(data)
    assert documents(pack(data, tmp_path / "out")) == ROWS


def test_shards_include_their_tokenizer(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ROWS, trainers.BpeTrainer(vocab_size=270, initial_alphabet=alphabet, special_tokens=["<stop>"])
    )
    file = tmp_path / "mine.json"
    tokenizer.save(str(file))
    (tmp_path / "text").mkdir()
    data = write_text(tmp_path / "text").model_copy(update={"tokenizer": str(file)})
    with pytest.raises(UserError) as error:
        prepare(data, cache=tmp_path / "cache")
    assert error.value.code == "T012"
    out = pack(data, tmp_path / "out", end_token="<stop>")
    file.unlink()
    assert documents(out) == ROWS
    assert TokenShards.open(out).num_tokens < sum(len(row.encode()) for row in ROWS)
    other = tmp_path / "other.json"
    other.write_text((out / "tokenizer.json").read_text().replace("<stop>", "</s>"))
    with pytest.raises(UserError) as error:
        prepare(section("shards", out, tokenizer=str(other)), cache=tmp_path / "cache")
    assert error.value.code == "T019"


def test_data_is_packed_once_and_again_when_it_changes(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    data, cache = write_text(tmp_path / "text"), tmp_path / "cache"
    reports: list[tuple[str, float]] = []
    first = prepare(data, cache=cache, progress=lambda what, fraction: reports.append((what, fraction)))
    assert reports == [("packing text", 1.0)]
    assert first.parent == cache
    assert prepare(data.model_copy(update={"seq_len": 4}), cache=cache, progress=pytest.fail) == first  # pyrefly: ignore[bad-argument-type]
    (tmp_path / "text" / "0.txt").write_text("changed")
    second = prepare(data, cache=cache)
    assert second != first
    assert documents(second) == ["changed", ROWS[1]]
    os.utime(tmp_path / "text" / "0.txt", ns=(0, 1))
    assert prepare(data, cache=cache) not in (first, second)


def test_shards_are_used_in_place(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    out = pack(write_text(tmp_path / "text"), tmp_path / "out")
    data = section("shards", out)
    check(data)
    assert prepare(data, cache=tmp_path / "cache") == out
    assert not (tmp_path / "cache").exists()
    with pytest.raises(UserError) as error:
        pack(data, tmp_path / "again")
    assert error.value.code == "T016"


def test_packing_never_overwrites_anything(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    data = write_text(tmp_path / "text")
    (tmp_path / "empty").mkdir()
    assert documents(pack(data, tmp_path / "empty")) == ROWS
    (tmp_path / "file").write_text("mine")
    for occupied in (tmp_path / "empty", tmp_path / "text", tmp_path / "file"):
        with pytest.raises(UserError) as error:
            pack(data, occupied)
        assert error.value.code == "T016"
    assert (tmp_path / "file").read_text() == "mine"


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    data = write_text(tmp_path / "text")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError) as error:
        prepare(data, cache=tmp_path / "file" / "cache")
    assert error.value.code == "T017"


def test_too_little_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(UserError) as error:
        prepare(section("text", tmp_path / "a.txt", seq_len=64), cache=tmp_path / "cache")
    assert error.value.code == "T010"
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(UserError) as error:
        prepare(section("jsonl", tmp_path / "a.jsonl"), cache=tmp_path / "cache")
    assert error.value.code == "T009"


def test_unreadable_datasets_are_user_errors(tmp_path: Path) -> None:
    import datasets  # noqa: PLC0415  it imports pandas and pyarrow

    (tmp_path / "a.parquet").write_bytes(b"no parquet at all")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes.md").write_text("no table")
    rows = datasets.Dataset.from_dict({"text": ROWS, "n": [1, 2]})
    datasets.DatasetDict({"one": rows, "two": rows}).save_to_disk(tmp_path / "c")
    for path in (tmp_path / "a.parquet", tmp_path / "b", tmp_path / "c"):
        with pytest.raises(UserError) as error:
            pack(section("datasets", path), tmp_path / "out")
        assert error.value.code == "T018"
    assert documents(pack(section("datasets", tmp_path / "c" / "two"), tmp_path / "out")) == ROWS
    for field in ("n", "body"):
        with pytest.raises(UserError) as error:
            pack(section("datasets", tmp_path / "c" / "two", text_field=field), tmp_path / "other")
        assert error.value.code == "T008"


def prepare_together(data: DataSection, cache: Path, start, answers) -> None:
    start.wait()
    answers.put(str(prepare(data, cache=cache)))


def test_concurrent_processes_share_one_result(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    data, cache = write_text(tmp_path / "text"), tmp_path / "cache"
    context = multiprocessing.get_context("fork")
    start, answers = context.Barrier(3), context.Queue()
    processes = [context.Process(target=prepare_together, args=(data, cache, start, answers)) for _ in range(3)]
    for process in processes:
        process.start()
    found = {answers.get(timeout=20) for _ in processes}
    for process in processes:
        process.join(timeout=20)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(found) == 1
    assert [each.name for each in cache.iterdir()] == [Path(found.pop()).name]


def test_the_loser_of_a_race_uses_the_shards_of_the_winner(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    data, cache = write_text(tmp_path / "text"), tmp_path / "cache"

    def overtake(what: str, fraction: float) -> None:
        if not any(each.name[0] != "." for each in cache.iterdir()):
            prepare(data, cache=cache)

    path = prepare(data, cache=cache, progress=overtake)
    assert documents(path) == ROWS
    assert [each.name for each in cache.iterdir()] == [path.name]


def test_the_default_data_is_packed_in_seconds_and_then_cached(tmp_path: Path) -> None:
    data = DataSection(seq_len=2048)
    check(data)
    began = time.monotonic()
    path = prepare(data, cache=tmp_path)
    cold = time.monotonic() - began
    began = time.monotonic()
    assert prepare(data, cache=tmp_path) == path
    cached = time.monotonic() - began
    assert TokenShards.open(path).num_tokens > 5_000_000
    assert cold < 10
    assert cached < 1


def test_the_cache_folder_comes_from_the_environment() -> None:
    assert cache_folder({"TRIMARAN_CACHE": "/scratch/packed"}) == Path("/scratch/packed")
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/trimaran/data")
    assert cache_folder({}).parts[-3:] == (".cache", "trimaran", "data")


def test_packing_needs_neither_torch_nor_the_extras() -> None:
    script = "import sys, trimaran.data; print({'torch', 'datasets', 'tokenizers'} & set(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert answer.stdout.strip() == "set()"
