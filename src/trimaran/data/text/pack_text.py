"""Packs the documents of a text source into shards: reads them, tokenizes them and writes them."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np

from trimaran.core import DataSection, UserError
from trimaran.data.text.bad_lines import BadLines
from trimaran.data.text.source_files import find_files
from trimaran.data.text.text_sources import read_chunks
from trimaran.data.text.token_files import TOKEN_SOURCES, read_token_runs
from trimaran.data.text.token_shards import ShardWriter
from trimaran.data.text.tokenizer import Tokenizer, load_tokenizer

BATCH_CHARACTERS = 1 << 22  # a few megabytes: enough for a tokenizer to use all cores
REPORTED_RUNS = 1000  # of tokens between reports of progress

Progress = Callable[[str, float], None]
Item = TypeVar("Item")


def pack(section: DataSection, out: Path, *, end_token: str | None = None, progress: Progress | None = None) -> Path:
    """Return `out` after packing `section` into it. It must be missing or an empty folder."""
    if section.source == "shards":
        raise UserError("T016.source-packed-shards", where="data.source")
    try:
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise FileExistsError
        pack_files(section, find_files(section), load_tokenizer(section.tokenizer, end_token=end_token), out, progress)
    except FileExistsError:
        raise UserError("T016.path-already-exists", where=str(out)) from None
    return out


def pack_files(
    section: DataSection, files: list[Path], tokenizer: Tokenizer, path: Path, progress: Progress | None
) -> None:
    write = _write_tokens if section.source in TOKEN_SOURCES else _write_texts
    try:
        with ShardWriter(path, tokenizer) as writer:
            for fraction_read in write(section, files, tokenizer, writer):
                if progress is not None:
                    progress(f"packing {section.source}", fraction_read)
            if not writer.num_documents:
                raise UserError("T009.data-no-text", where=f"data.path: {section.path}")
    except FileExistsError:
        raise
    except OSError as error:
        raise UserError("T017.packed-shards", where=str(path), reason=error.strerror) from None


def _write_texts(section: DataSection, files: list[Path], tokenizer: Tokenizer, writer: ShardWriter) -> Iterator[float]:
    """Write the documents of a text source, and yield the fraction read after each batch."""
    bad = BadLines(section.samples.max_bad, kind="row" if section.source == "datasets" else "line")
    begin, at_start = np.array(tokenizer.begin_ids, dtype=np.int64), True
    for batch in in_batches(read_chunks(section, files, bad), lambda chunk: len(chunk.text), BATCH_CHARACTERS):
        encoded = tokenizer.encode_many([chunk.text for chunk in batch])
        for chunk, ids in zip(batch, encoded, strict=True):
            if at_start:
                writer.append(begin)
            writer.append(ids)
            at_start = chunk.ends_document
            if chunk.ends_document:
                writer.end_document()
        yield batch[-1].fraction_read
    bad.refuse_too_many()
    writer.bad = bad


def _write_tokens(
    section: DataSection, files: list[Path], tokenizer: Tokenizer, writer: ShardWriter
) -> Iterator[float]:
    """Write the documents of token files, and yield the fraction read now and then."""
    for number, (ids, ends_document, fraction_read) in enumerate(read_token_runs(section, files, tokenizer)):
        writer.append(ids)
        if ends_document:
            writer.end_document()
        if number % REPORTED_RUNS == 0:
            yield fraction_read


def in_batches(items: Iterable[Item], size_of: Callable[[Item], float], full_size: float) -> Iterator[list[Item]]:
    """Yield the items in batches of at least this size; the last one may be smaller."""
    batch: list[Item] = []
    size = 0.0
    for each in items:
        batch.append(each)
        size += size_of(each)
        if size >= full_size:
            yield batch
            batch, size = [], 0.0
    if batch:
        yield batch
