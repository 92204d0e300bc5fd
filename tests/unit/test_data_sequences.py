"""Fixed-length sequences of the token stream."""

from pathlib import Path

import numpy as np
import pytest

from trimaran.core import DataSection, UserError
from trimaran.data import IGNORED, ByteTokenizer, Sequences, ShardWriter, TokenShards, split


def write(path: Path, *texts: str) -> TokenShards:
    tokenizer = ByteTokenizer()
    with ShardWriter(path, tokenizer) as writer:
        for text in texts:
            writer.append(tokenizer.encode(text))
            writer.end_document()
    return TokenShards.open(path)


def section(**fields: object) -> DataSection:
    return DataSection.model_validate({"seq_len": 4, **fields})


def test_labels_are_the_tokens_shifted_by_one(tmp_path: Path) -> None:
    shards = write(tmp_path / "shards", "abcdefgh")
    sample = Sequences(shards, 4, False, 0, 2)[1]
    assert bytes(sample.tokens.tolist()) == b"efgh"
    assert sample.labels.tolist() == [*b"fgh", 256]
    assert sample.documents is None
    assert sample.tokens.dtype == sample.labels.dtype == np.int64


def test_isolation_numbers_documents_and_drops_targets_across_documents(tmp_path: Path) -> None:
    shards = write(tmp_path / "shards", "ab", "c", "defg")
    first, second = (Sequences(shards, 4, True, 0, 2)[index] for index in range(2))
    assert first.tokens.tolist() == [97, 98, 256, 99]
    assert first.labels.tolist() == [98, 256, IGNORED, 256]
    assert first.documents is not None
    assert first.documents.tolist() == [0, 0, 0, 1]
    assert first.documents.dtype == np.int32
    assert second.labels.tolist() == [IGNORED, *b"efg"]
    assert second.documents is not None
    assert second.documents.tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize(("holdout", "num_held_out"), [(0.0, 0), (0.01, 1), (0.3, 3), (0.99, 9)])
def test_the_last_fraction_of_the_sequences_is_held_out(tmp_path: Path, holdout: float, num_held_out: int) -> None:
    shards = write(tmp_path / "shards", "x" * 40)
    train, test = split(shards, section(holdout=holdout))
    assert (len(train), len(test)) == (10 - num_held_out, num_held_out)
    assert (train.first, train.last, test.first, test.last) == (0, 10 - num_held_out, 10 - num_held_out, 10)


def test_no_target_of_training_is_a_target_of_evaluation(tmp_path: Path) -> None:
    shards = write(tmp_path / "shards", "".join(map(chr, range(33, 74))))
    train, test = split(shards, section(holdout=0.3))
    seen = [label for index in range(len(train)) for label in train[index].labels.tolist()]
    held = [label for index in range(len(test)) for label in test[index].labels.tolist()]
    assert not set(seen) & set(held)
    assert seen + held == shards.tokens(1, 41).tolist()


def test_a_single_sequence_is_never_held_out(tmp_path: Path) -> None:
    train, test = split(write(tmp_path / "shards", "abcd"), section(holdout=0.5))
    assert (len(train), len(test)) == (1, 0)


def test_fewer_tokens_than_one_sequence_are_a_user_error(tmp_path: Path) -> None:
    shards = write(tmp_path / "shards", "abc")
    with pytest.raises(UserError, match="at most 3") as error:
        split(shards, section())
    assert error.value.code == "T010"
