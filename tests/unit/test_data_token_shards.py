"""Packed token shards on disk."""

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from trimaran.core import UserError
from trimaran.data import ByteTokenizer, ShardWriter, TokenShards

TEXTS = ("three hulls", "a", "one boat, steered as one", "end")


class WideTokenizer(ByteTokenizer):
    """Bytes with more ids than 16 bits can hold."""

    vocab_size = 100_000


def write(path: Path, texts: tuple[str, ...] = TEXTS, *, shard_tokens: int = 1000) -> TokenShards:
    tokenizer = ByteTokenizer()
    with ShardWriter(path, tokenizer, shard_tokens=shard_tokens) as writer:
        for text in texts:
            writer.append(tokenizer.encode(text))
            writer.end_document()
    return TokenShards.open(path)


def stream(texts: tuple[str, ...] = TEXTS) -> tuple[list[int], list[int]]:
    """Return every token and the document that it belongs to."""
    documents = [[*text.encode(), 256] for text in texts]
    return list(chain(*documents)), [number for number, each in enumerate(documents) for _ in each]


@pytest.mark.parametrize("shard_tokens", [1, 5, 13, 1000])
def test_any_range_reads_the_same_for_any_shard_size(tmp_path: Path, shard_tokens: int) -> None:
    shards = write(tmp_path / "shards", shard_tokens=shard_tokens)
    tokens, documents = stream()
    assert (shards.num_tokens, shards.num_documents) == (len(tokens), len(TEXTS))
    for start in range(len(tokens)):
        for stop in range(start + 1, len(tokens) + 1):
            assert shards.tokens(start, stop).tolist() == tokens[start:stop]
            assert shards.documents(start, stop).tolist() == documents[start:stop]


def test_the_metadata_describes_the_shards(tmp_path: Path) -> None:
    shards = write(tmp_path / "shards", shard_tokens=13)
    meta = json.loads((tmp_path / "shards" / "meta.json").read_text())
    assert meta["format"] == "trimaran-shards-1"
    assert (meta["dtype"], meta["vocab_size"], meta["end_id"]) == ("uint16", 257, 256)
    assert meta["tokenizer"] == {"kind": "bytes"}
    assert [shard["num_documents"] for shard in meta["shards"]] == [2, 1, 1]
    assert sum(shard["num_tokens"] for shard in meta["shards"]) == shards.num_tokens
    assert shards.tokenizer.decode(shards.tokens(0, 11)) == "three hulls"


def test_large_vocabularies_use_four_bytes(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "shards", WideTokenizer()) as writer:
        writer.append(np.array([70_000, 99_999]))
        writer.end_document()
    shards = TokenShards.open(tmp_path / "shards")
    assert shards.meta.dtype == "uint32"
    assert shards.tokens(0, 3).tolist() == [70_000, 99_999, 256]


def test_a_failure_leaves_no_files(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        write(tmp_path / "shards", ("valid", "an unpaired surrogate: \ud800"))
    assert list(tmp_path.iterdir()) == []


def test_shards_are_never_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "shards")
    with pytest.raises(FileExistsError):
        write(tmp_path / "shards", ("something else",))
    assert TokenShards.open(tmp_path / "shards").num_documents == len(TEXTS)
    assert [each.name for each in tmp_path.iterdir()] == ["shards"]


def test_ids_outside_the_vocabulary_fail_an_assertion(tmp_path: Path) -> None:
    with pytest.raises(AssertionError), ShardWriter(tmp_path / "shards", ByteTokenizer()) as writer:
        writer.append(np.array([257]))


def truncate(folder: Path) -> None:
    file = folder / "shard-00000.tokens"
    file.write_bytes(file.read_bytes()[:-2])


def remove_ends(folder: Path) -> None:
    (folder / "shard-00000.documents").unlink()


def shift_ends(folder: Path) -> None:
    file = folder / "shard-00000.documents"
    file.write_bytes((np.frombuffer(file.read_bytes(), "<i8") + 1).tobytes())


def miscount(folder: Path) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"num_tokens": 1}))


@pytest.mark.parametrize("damage", [truncate, remove_ends, shift_ends, miscount])
def test_damaged_shards_are_detected_on_open(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    write(tmp_path / "shards")
    damage(tmp_path / "shards")
    with pytest.raises(UserError) as error:
        TokenShards.open(tmp_path / "shards")
    assert error.value.code == "T015"


def test_verify_detects_a_flipped_bit(tmp_path: Path) -> None:
    shards = write(tmp_path / "shards", shard_tokens=13)
    shards.verify()
    file = tmp_path / "shards" / "shard-00001.tokens"
    data = bytearray(file.read_bytes())
    data[4] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match="checksum") as error:
        TokenShards.open(tmp_path / "shards").verify()
    assert error.value.code == "T015"
    assert "shard-00001" in error.value.where


@pytest.mark.parametrize(
    "meta", [None, "not json", "{}", '{"format": "other-2"}', '["list"]', b"\xff\xfe", "../escape"]
)
def test_other_folders_are_refused(tmp_path: Path, meta: str | bytes | None) -> None:
    folder = tmp_path / "shards"
    if meta == "../escape":
        write(folder)
        text = (folder / "meta.json").read_text().replace("shard-00000.tokens", "../shard-00000.tokens")
        (folder / "meta.json").write_text(text)
    else:
        folder.mkdir()
        if meta is not None:
            (folder / "meta.json").write_bytes(meta if isinstance(meta, bytes) else meta.encode())
    with pytest.raises(UserError) as error:
        TokenShards.open(folder)
    assert error.value.code == "T014"
