"""Megatron's and nanoGPT's token files are read as their own programs read them, or refused."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model_folders import write_model_tokenizer
from trimaran.app import text_notices
from trimaran.core import DataSection, UserError
from trimaran.data import TokenShards, check, count_tokens, load_tokenizer, prepare

DOCUMENTS = [[1, 2, 3], [300], [5, 6], [7, 8, 9, 10]]
CODES = {"u1": 1, "i2": 3, "i4": 4, "i8": 5, "u2": 8}  # DType of megatron/core/datasets/indexed_dataset.py


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_tokenizer(tmp_path_factory.mktemp("tokenizer"), "qwen2.5")


def write_megatron(
    prefix: Path, documents: list[list[list[int]]], dtype: str = "i4", *, code: int = 0, version: int = 1
) -> Path:
    """Write documents of sequences as Megatron's `_IndexWriter` and `IndexedDatasetBuilder` do."""
    sequences = [np.array(sequence, dtype=f"<{dtype}") for document in documents for sequence in document]
    prefix.with_suffix(".bin").write_bytes(b"".join(each.tobytes() for each in sequences))
    lengths = np.array([len(each) for each in sequences], dtype="<i4")
    pointers = np.cumsum([0, *(each.nbytes for each in sequences)])[:-1].astype("<i8")
    starts = np.cumsum([0, *map(len, documents)]).astype("<i8")
    with prefix.with_suffix(".idx").open("wb") as index:
        index.write(b"MMIDIDX\x00\x00")
        index.write(struct.pack("<Q", version))
        index.write(struct.pack("<B", code or CODES[dtype]))
        index.write(struct.pack("<Q", len(sequences)))
        index.write(struct.pack("<Q", len(starts)))
        for part in (lengths, pointers, starts):
            index.write(part.tobytes(order="C"))
    return prefix


def section(source: str, path: Path, tokenizer: Any, **fields: Any) -> DataSection:
    own = {"source": source, "path": str(path), "tokenizer": tokenizer and str(tokenizer), "seq_len": 2}
    return DataSection.model_validate(own | fields)


def documents_of(data: DataSection, cache: Path) -> list[list[int]]:
    """Return the tokens of each document as they are packed, with their end."""
    check(data)
    shards = TokenShards.open(prepare(data, cache=cache))
    shards.verify()
    tokens = shards.tokens(0, shards.num_tokens).tolist()
    ends = [number + 1 for number, token in enumerate(tokens) if token == shards.meta.end_id]
    assert shards.num_documents == len(ends)
    return [tokens[start:stop] for start, stop in zip([0, *ends], ends, strict=False)]


def refusal(data: DataSection) -> UserError:
    with pytest.raises(UserError) as refused:
        check(data)
    return refused.value


@pytest.mark.parametrize("dtype", ["i4", "u2", "i8", "i2"])
@pytest.mark.parametrize("has_end", [True, False])
def test_documents_of_megatron_are_those_of_its_index(model: Path, tmp_path: Path, dtype: str, has_end: bool) -> None:
    end = load_tokenizer(str(model)).end_id
    ended = [[*document, end] for document in DOCUMENTS]
    written = ended if has_end else DOCUMENTS
    prefix = write_megatron(tmp_path / "a_text_document", [[each] for each in written], dtype)
    for path in (prefix, prefix.with_suffix(".idx"), prefix.with_suffix(".bin"), tmp_path):
        assert documents_of(section("megatron", path, model), tmp_path / "cache") == ended


def test_a_document_of_several_sequences_is_one(model: Path, tmp_path: Path) -> None:
    end = load_tokenizer(str(model)).end_id
    prefix = write_megatron(tmp_path / "a", [[DOCUMENTS[0], DOCUMENTS[2]], [], [DOCUMENTS[3]]])
    assert documents_of(section("megatron", prefix, model), tmp_path / "cache") == [[1, 2, 3, 5, 6, end],
                                                                                     [7, 8, 9, 10, end]]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "code", "what"),
    [
        ({"version": 2}, "T080", "not an index of Megatron's current format"),
        ({"code": 7}, "T080", "not an index of Megatron's current format"),
        ({"code": 5}, "T080", "its sequences"),
    ],
)
def test_another_index_is_refused(model: Path, tmp_path: Path, options: Any, code: str, what: str) -> None:
    prefix = write_megatron(tmp_path / "a", [[each] for each in DOCUMENTS], **options)
    error = refusal(section("megatron", prefix, model))
    assert error.code == code
    assert what in error.what


def test_damaged_and_lonely_files_are_refused(model: Path, tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "a", [[each] for each in DOCUMENTS])
    whole = {suffix: prefix.with_suffix(suffix).read_bytes() for suffix in (".bin", ".idx")}
    for suffix in whole:
        prefix.with_suffix(suffix).write_bytes(whole[suffix][:-4])
        assert refusal(section("megatron", prefix, model)).code == "T080"
        prefix.with_suffix(suffix).write_bytes(whole[suffix])
    (tmp_path / "b.bin").write_bytes(whole[".bin"])
    assert "the other one is missing" in refusal(section("megatron", tmp_path, model)).what


def test_ids_need_the_tokenizer_that_made_them(model: Path, tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "a", [[each] for each in DOCUMENTS])
    assert refusal(section("megatron", prefix, None)).code == "T079"
    error = refusal(section("megatron", prefix, "bytes"))
    assert (error.code, error.what) == ("T081", "the token 300 is not in the tokenizer, which has 257 ids")
    write_megatron(tmp_path / "b", [[[0] * (1 << 16), [-1]]])  # behind what the check reads
    late = section("megatron", tmp_path / "b", model)
    check(late)
    with pytest.raises(UserError, match="the token -1 is not in the tokenizer"):
        prepare(late, cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def write_raw(path: Path, tokens: list[int], dtype: str = "<u2") -> Path:
    """Write tokens as nanoGPT's prepare.py does."""
    np.array(tokens, dtype=dtype).tofile(path)
    return path


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
@pytest.mark.parametrize("ends", [True, False])
def test_a_raw_file_is_the_same_stream(model: Path, tmp_path: Path, dtype: str, ends: bool) -> None:
    end = load_tokenizer(str(model)).end_id
    stream = [1, 2, 3, end, 300, end, end, 5, 6] + [end] * ends
    path = write_raw(tmp_path / "train.bin", stream, dtype)
    expected = [[1, 2, 3, end], [300, end], [end], [5, 6, end]]
    data = section("nanogpt", path, model)
    assert documents_of(data, tmp_path / "cache") == expected
    assert count_tokens(data, [path], load_tokenizer(str(model))) == (len(stream), stream.count(end))


@pytest.mark.parametrize(("magic", "dtype"), [(20240520, "<u2"), (20240801, "<u4")])
def test_the_header_of_llm_c_is_no_text(model: Path, tmp_path: Path, magic: int, dtype: str) -> None:
    end = load_tokenizer(str(model)).end_id
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, 1, 5
    path = tmp_path / "fineweb_train_000001.bin"
    path.write_bytes(header.tobytes() + np.array([end, 1, 2, end, 3], dtype=dtype).tobytes())
    assert documents_of(section("nanogpt", path, model), tmp_path / "cache") == [[end], [1, 2, end], [3, end]]
    path.write_bytes(path.read_bytes()[:-2])
    assert refusal(section("nanogpt", path, model)).code == "T080"


def test_validation_files_of_a_folder_are_left_out_and_named(model: Path, tmp_path: Path) -> None:
    write_raw(tmp_path / "train.bin", [1, 2, 3])
    write_raw(tmp_path / "val.bin", [4, 5, 6])
    data = section("nanogpt", tmp_path, model)
    (document,) = documents_of(data, tmp_path / "cache")
    assert document[:-1] == [1, 2, 3]
    (notice,) = text_notices(data, TokenShards.open(prepare(data, cache=tmp_path / "cache")))
    assert notice == f"{tmp_path}: val.bin is not used for training"


def test_a_file_of_characters_or_of_another_tokenizer_is_refused(model: Path, tmp_path: Path) -> None:
    path = write_raw(tmp_path / "train.bin", [1, 2, 3, 50256])
    assert refusal(section("nanogpt", path, model)).code == "T081"
    path.write_bytes(b"odd")
    assert refusal(section("nanogpt", path, model)).code == "T080"
    write_raw(path, [1, 2, 3])
    (tmp_path / "meta.pkl").write_bytes(b"characters")
    error = refusal(section("nanogpt", path, model))
    assert error.code == "T079"
    assert "data.source=text" in error.fix
