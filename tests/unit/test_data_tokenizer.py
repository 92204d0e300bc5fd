"""Tokenizers: text to token ids and back."""

import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from trimaran.core import UserError
from trimaran.data import ByteTokenizer, load_tokenizer, open_tokenizer


def train_bpe(path: Path, *, special: tuple[str, ...] = ("<|endoftext|>",), truncate: bool = False) -> Path:
    """Write a small tokenizer. `truncate` enables truncation and padding, as files from the hub do."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the boat and the sea and the boat"] * 10, trainer)
    if truncate:
        tokenizer.enable_truncation(4)
        tokenizer.enable_padding(length=4)
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("text", ["", "def f(x):\n\treturn x\n", "drei Rümpfe, 三体船, 🛶"])
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_decoding_skips_non_byte_ids_and_marks_invalid_utf8() -> None:
    assert ByteTokenizer().decode([104, 256, 105, 300, 0xFF]) == "hi\ufffd"


def test_a_json_tokenizer_encodes_and_decodes(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(train_bpe(tmp_path / "tokenizer.json")))
    text = "the boat and the sea, 三体船"
    ids = tokenizer.encode(text)
    assert len(ids) < len(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.end_id == 0
    assert all(np.array_equal(one, ids) for one in tokenizer.encode_many([text, text]))


def test_a_json_tokenizer_never_truncates_or_pads(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(train_bpe(tmp_path / "tokenizer.json", truncate=True)))
    assert (
        tokenizer.decode(tokenizer.encode("the boat and the sea and the boat")) == "the boat and the sea and the boat"
    )
    assert len(tokenizer.encode("a")) == 1


def test_the_vocabulary_size_covers_the_largest_id(tmp_path: Path) -> None:
    path = train_bpe(tmp_path / "tokenizer.json")
    text = path.read_text().replace('"id": 0', '"id": 5000').replace('"<|endoftext|>": 0', '"<|endoftext|>": 5000')
    path.write_text(text)
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.vocab_size > max(tokenizer.encode("the boat").max(), tokenizer.end_id)


@pytest.mark.parametrize("name", ["</s>", "<|end_of_text|>", "<eos>", "<|im_end|>"])
def test_the_end_token_is_found_by_its_usual_names(tmp_path: Path, name: str) -> None:
    tokenizer = load_tokenizer(str(train_bpe(tmp_path / "tokenizer.json", special=("<pad>", name))))
    assert tokenizer.end_id == 1


def test_an_unusual_end_token_has_to_be_named(tmp_path: Path) -> None:
    path = str(train_bpe(tmp_path / "tokenizer.json", special=("<stop>",)))
    with pytest.raises(UserError, match="--end-token") as error:
        load_tokenizer(path)
    assert error.value.code == "T012"
    assert load_tokenizer(path, end_token="<stop>").end_id == 0
    with pytest.raises(UserError, match="did you mean '<stop>'"):
        load_tokenizer(path, end_token="<stopp>")


def test_the_byte_level_tokenizer_takes_no_end_token() -> None:
    with pytest.raises(UserError) as error:
        load_tokenizer(None, end_token="<stop>")
    assert error.value.code == "T012"


def test_invalid_tokenizer_files_are_user_errors(tmp_path: Path) -> None:
    train_bpe(tmp_path / "tokenizer.json")
    (tmp_path / "other.json").write_text('{"a": 1}')
    (tmp_path / "binary.json").write_bytes(bytes(range(256)))
    (tmp_path / "empty").mkdir()
    for name in ("missing.json", "other.json", "binary.json", "empty"):
        with pytest.raises(UserError) as error:
            load_tokenizer(str(tmp_path / name))
        assert error.value.code == "T011"


def test_a_saved_tokenizer_reopens_and_a_changed_one_is_refused(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(train_bpe(tmp_path / "mine.json")))
    folder = tmp_path / "shards"
    folder.mkdir()
    tokenizer.save(folder)
    again = open_tokenizer(tokenizer.describe(), folder)
    assert again.describe()["sha256"] == tokenizer.describe()["sha256"]
    train_bpe(folder / "tokenizer.json", special=("<|endoftext|>", "<pad>"))
    with pytest.raises(UserError) as error:
        open_tokenizer(tokenizer.describe(), folder)
    assert error.value.code == "T015"


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tokenizers")
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(UserError, match=r"trimaran\[hf\]") as error:
        load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert error.value.code == "T013"
