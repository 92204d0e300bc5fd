"""How many bytes of text each token stands for, so that losses of different tokenizers can be compared."""

import numpy as np

from trimaran.data.text.tokenizer import ByteTokenizer, Tokenizer

WORD_START = "\u2581"  # how SentencePiece writes a space
BYTE_LENGTH = len("<0x00>")


def byte_alphabet() -> dict[int, str]:
    """Return the character that stands for each byte in a byte-level BPE, as GPT-2 defined it."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + number) for number, byte in enumerate(hidden)}


def token_byte_lengths(tokenizer: Tokenizer, vocabulary: int) -> np.ndarray | None:
    """Return the bytes of each token id [vocabulary]; None if the tokens of this tokenizer do not say.

    Special tokens and unused ids are 0 bytes. Bytes, byte-level BPE and SentencePiece with bytes for unknown characters
    are known.
    """
    lengths = np.zeros(vocabulary, dtype=np.int64)
    if isinstance(tokenizer, ByteTokenizer):
        lengths[: min(256, vocabulary)] = 1
        return lengths
    texts = {number: tokenizer.ordinary_token(number) for number in range(min(vocabulary, tokenizer.vocab_size))}
    ordinary = {number: text for number, text in texts.items() if text}
    alphabet = set(byte_alphabet().values())
    if all(alphabet.issuperset(text) for text in ordinary.values()):
        sizes = {number: len(text) for number, text in ordinary.items()}
    elif "<0x00>" in tokenizer.vocabulary():
        sizes = {number: _sentencepiece_bytes(text) for number, text in ordinary.items()}
    else:
        return None
    for number, size in sizes.items():
        lengths[number] = size
    return lengths


def _sentencepiece_bytes(token: str) -> int:
    if len(token) == BYTE_LENGTH and token.startswith("<0x"):
        return 1
    return len(token.replace(WORD_START, " ").encode())
