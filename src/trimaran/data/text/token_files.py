"""Token files of other programs: Megatron's `.bin` with its `.idx`, and raw `.bin` files of nanoGPT and llm.c."""

import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from trimaran.core import DataSection, UserError, check_regular_file
from trimaran.data.text.source_files import reading
from trimaran.data.text.tokenizer import Tokenizer

TOKEN_SOURCES = ("megatron", "nanogpt")
MEGATRON_HEADER = struct.Struct("<9sQBQQ")  # magic, version, type of a token, sequences, starts of documents
MEGATRON_MAGIC = b"MMIDIDX\0\0"
MEGATRON_DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
LLM_C_DTYPES = {20240520: "<u2", 20240801: "<u4"}  # by the magic number: tokens of GPT-2 and of Llama 3
LLM_C_HEADER_BYTES = 1024
CHUNK_TOKENS = 1 << 22
HEAD_TOKENS = 1 << 16
# Tokens of a document without the one that ends it, whether it ends, and the fraction of the source that is read.
TokenRun = tuple[np.ndarray, bool, float]


def check_token_files(section: DataSection, files: list[Path], tokenizer: Tokenizer) -> None:
    """Raise if a file is damaged, or if its first tokens cannot be those of the tokenizer."""
    if section.tokenizer is None:
        raise UserError("T079.source-holds-token", where="data.tokenizer", source=section.source)
    for file in files:
        if section.source == "megatron":
            if not file.with_suffix(".bin" if file.suffix == ".idx" else ".idx").is_file():
                raise _damaged(file, "a Megatron file has two parts, .bin and .idx, and the other one is missing")
            tokens = _open_megatron(file)[0] if file.suffix == ".idx" else np.empty(0, np.int64)
        else:
            tokens = _open_raw(file, tokenizer)
        _check_ids(tokens[:HEAD_TOKENS], tokenizer, file)


def count_tokens(section: DataSection, files: list[Path], tokenizer: Tokenizer) -> tuple[int, int]:
    """Return the number of tokens, and of documents; in raw files those are estimated from the first tokens."""
    num_tokens = num_documents = 0
    for file in files:
        if section.source == "nanogpt":
            tokens = _open_raw(file, tokenizer)
            num_ends = int(np.count_nonzero(tokens[:HEAD_TOKENS] == tokenizer.end_id))
            num_documents += max(1, num_ends * len(tokens) // min(HEAD_TOKENS, len(tokens)))
            num_tokens += len(tokens)
        elif file.suffix == ".idx":
            _, lengths, _, documents = _open_megatron(file)
            num_tokens, num_documents = num_tokens + int(lengths.sum()), num_documents + len(documents) - 1
    return num_tokens, num_documents


def read_token_runs(section: DataSection, files: list[Path], tokenizer: Tokenizer) -> Iterator[TokenRun]:
    """Yield the tokens of the files, document by document. Raises if one is not of the tokenizer."""
    check_token_files(section, files, tokenizer)
    files = [file for file in files if section.source != "megatron" or file.suffix == ".idx"]
    read = _read_megatron if section.source == "megatron" else _read_raw
    for number, file in enumerate(files):
        for ids, ends_document, fraction_read in read(file, tokenizer):
            _check_ids(ids, tokenizer, file)
            yield ids, ends_document, (number + fraction_read) / len(files)


def _read_megatron(file: Path, tokenizer: Tokenizer) -> Iterator[TokenRun]:
    """Yield the documents. One may or may not have the end token, depending on how the file was made."""
    tokens, lengths, starts_of, documents = _open_megatron(file)
    for first, stop in pairwise(documents.tolist()):
        sequences = zip(starts_of[first:stop].tolist(), lengths[first:stop].tolist(), strict=True)
        ids = np.concatenate([np.empty(0, tokens.dtype), *(tokens[start : start + size] for start, size in sequences)])
        if len(ids):
            yield (ids[:-1] if ids[-1] == tokenizer.end_id else ids), True, stop / len(lengths)


def _read_raw(file: Path, tokenizer: Tokenizer) -> Iterator[TokenRun]:
    """Yield the documents, which the end token separates; a long one in several runs."""
    tokens = _open_raw(file, tokenizer)
    is_open = False
    for begin in range(0, len(tokens), CHUNK_TOKENS):
        chunk = tokens[begin : begin + CHUNK_TOKENS]
        fraction_read, start = min(1.0, (begin + len(chunk)) / len(tokens)), 0
        for stop in np.flatnonzero(chunk == tokenizer.end_id).tolist():
            yield chunk[start:stop], True, fraction_read
            start = stop + 1
        is_open = start < len(chunk)
        if is_open:
            yield chunk[start:], False, fraction_read
    if is_open:
        yield tokens[:0], True, 1.0


def _open_megatron(file: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the tokens, length and start of each sequence, and first sequence of each document, then their number."""
    index = _bytes_of(file)
    head = index[: MEGATRON_HEADER.size].tobytes().ljust(MEGATRON_HEADER.size, b"\0")
    magic, version, code, num_sequences, num_starts = MEGATRON_HEADER.unpack(head)
    if magic != MEGATRON_MAGIC or version != 1 or code not in MEGATRON_DTYPES:
        raise _damaged(file, "this is not an index of Megatron's current format")
    sizes = [4 * num_sequences, 8 * num_sequences, 8 * num_starts]
    if len(index) - MEGATRON_HEADER.size not in (sum(sizes), sum(sizes) + num_sequences):  # with modes of sequences
        raise _damaged(file, f"it has {len(index):,} bytes, which are not {num_sequences:,} sequences")
    stops = np.cumsum([MEGATRON_HEADER.size, *sizes]).tolist()
    parts = [index[start:stop].tobytes() for start, stop in pairwise(stops)]
    lengths, offsets, documents = (
        np.frombuffer(part, kind).astype(np.int64) for part, kind in zip(parts, ("<i4", "<i8", "<i8"), strict=True)
    )
    data, dtype = _bytes_of(file.with_suffix(".bin")), np.dtype(MEGATRON_DTYPES[code])
    ends = offsets + lengths * dtype.itemsize
    covers_all = num_starts and documents[0] == 0 and documents[-1] == num_sequences
    is_negative = lengths.min(initial=0) < 0 or offsets.min(initial=0) < 0
    if not covers_all or is_negative or (np.diff(documents) < 0).any() or (offsets % dtype.itemsize).any():
        raise _damaged(file, "its sequences and documents do not fit together")
    if len(data) % dtype.itemsize or ends.max(initial=0) > len(data):
        raise _damaged(file, f"its sequences end at byte {ends.max(initial=0):,}, and the .bin has {len(data):,}")
    return data.view(dtype), lengths, offsets // dtype.itemsize, documents


def _open_raw(file: Path, tokenizer: Tokenizer) -> np.ndarray:
    """Return the tokens of a raw file: 16 bits each, or 32 if there are more ids, or every other half is zero."""
    if (file.parent / "meta.pkl").is_file():
        raise UserError("T079.meta-pkl-beside", where=str(file))
    data = _bytes_of(file)
    magic, _, num_tokens = np.frombuffer(data[:12].tobytes().ljust(12, b"\0"), "<i4").tolist()
    if magic in LLM_C_DTYPES:
        tokens = data[LLM_C_HEADER_BYTES:]
        dtype = np.dtype(LLM_C_DTYPES[magic])
        if len(tokens) != num_tokens * dtype.itemsize:
            raise _damaged(file, f"it has {len(tokens):,} bytes of tokens, and its header says {num_tokens:,} tokens")
        return tokens.view(dtype)
    if len(data) % 2:
        raise _damaged(file, f"{len(data):,} bytes are not tokens of 16 or 32 bits")
    is_wide = len(data) >= 4 and len(data) % 4 == 0 and not data.view("<u2")[1 : 2 * HEAD_TOKENS : 2].any()
    if not is_wide and tokenizer.vocab_size <= 1 << 16:
        return data.view("<u2")
    if len(data) % 4:
        raise _damaged(file, f"{len(data):,} bytes are not tokens of 32 bits, which the tokenizer needs")
    return data.view("<u4")


def _bytes_of(file: Path) -> np.ndarray:
    with reading(file):
        check_regular_file(file, follow_links=True)
        return np.asarray(np.memmap(file, np.uint8, mode="r")) if file.stat().st_size else np.empty(0, np.uint8)


def _check_ids(ids: np.ndarray, tokenizer: Tokenizer, file: Path) -> None:
    outside = ids[(ids < 0) | (ids >= tokenizer.vocab_size)][:1].tolist()
    if outside:
        raise UserError(
            "T081.token-not-tokenizer", where=str(file), outside=outside[0], vocab_size=tokenizer.vocab_size
        )


def _damaged(file: Path, what: str) -> UserError:
    return UserError("T080.token-file", where=str(file), text=what)
