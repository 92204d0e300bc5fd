"""Streamed text: characters appear when they are complete, and no replacement character is ever shown."""

import random
from collections.abc import Iterable
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from tests.unit.test_data_tokenizer import train_bpe
from trimaran.data import ByteTokenizer, load_tokenizer
from trimaran.serve import MAX_WAITING, UNDECODABLE, TextStream

TEXT = "drei Rümpfe, 三体船, 🛶 and 👩‍🚀\n\tend"


def parts_of(stream: TextStream, ids: list[int]) -> list[str]:
    return [*map(stream.add, ids), stream.finish()]


def test_a_character_of_several_bytes_appears_when_it_is_complete() -> None:
    parts = parts_of(TextStream(ByteTokenizer()), list("a船🛶".encode()))
    assert parts == ["a", "", "", "船", "", "", "", "🛶", ""]


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_the_parts_are_the_text(name: str, tmp_path: Path) -> None:
    tokenizer = ByteTokenizer() if name == "bytes" else load_tokenizer(str(train_bpe(tmp_path / "tokenizer.json")))
    ids = tokenizer.encode(TEXT).tolist()
    parts = parts_of(TextStream(tokenizer), ids)
    assert "".join(parts) == TEXT
    assert max(map(len, parts)) < 6, "text must appear as it comes"
    before = tokenizer.encode("the boat ").tolist()
    assert "".join(parts_of(TextStream(tokenizer, before), ids)) == TEXT


def test_spaces_between_words_are_kept_by_a_tokenizer_that_drops_the_first(tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(models.WordLevel({"▁the": 0, "▁sea": 1, "</s>": 2}, unk_token="</s>"))
    words.normalizer, words.pre_tokenizer = normalizers.Sequence([]), pre_tokenizers.Metaspace()
    words.decoder = decoders.Metaspace()
    words.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert parts_of(TextStream(tokenizer), [0, 1, 1]) == ["the", " sea", " sea", ""]
    assert parts_of(TextStream(tokenizer, [0]), [1, 0]) == [" sea", " the", ""]


def test_bytes_that_are_not_utf8_are_left_out_and_counted() -> None:
    stream = TextStream(ByteTokenizer())
    assert "".join(parts_of(stream, [0x61, 0xFF, 0x62, 0xE4, 0xB8, 0x63, 0xE4])) == "abc"
    assert stream.num_undecodable == 3


def test_noise_never_shows_a_replacement_character() -> None:
    noise = random.Random(0)
    for _ in range(50):
        ids = [noise.randrange(300) for _ in range(60)]
        parts = parts_of(TextStream(ByteTokenizer()), ids)
        assert UNDECODABLE not in "".join(parts)
        assert "".join(parts) == ByteTokenizer().decode(ids).replace(UNDECODABLE, "")


@pytest.mark.parametrize("num_ids", [256, 300, 3000])
def test_the_text_does_not_depend_on_which_tokens_come_together(num_ids: int) -> None:
    noise = random.Random(num_ids)
    for most in (1, 3, 64, 150):
        ids = [noise.randrange(num_ids) for _ in range(2000)]
        stream, found, rest = TextStream(ByteTokenizer()), "", ids
        while rest:
            cut = noise.randrange(1, most + 1)
            found, rest = found + stream.add(*rest[:cut]), rest[cut:]
        assert found + stream.finish() == "".join(parts_of(TextStream(ByteTokenizer()), ids))


class CountingTokenizer(ByteTokenizer):
    """Counts the ids that it decodes."""

    num_decoded = 0

    def decode(self, ids: Iterable[int]) -> str:
        ids = list(ids)
        self.num_decoded += len(ids)
        return super().decode(ids)


def test_tokens_without_text_after_half_a_character_are_not_decoded_again_and_again() -> None:
    tokenizer, without_text = CountingTokenizer(), [1000] * 2000
    parts = parts_of(TextStream(tokenizer, [0x61, 0xE4]), [*without_text, 0x62])
    assert "".join(parts) == "b"
    assert tokenizer.num_decoded < 2 * MAX_WAITING * len(without_text)
