"""Tokenizes a text source into packed shards, once, in a cache."""

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from trimaran.core import DataSection, UserError
from trimaran.core.plugins import SOURCES
from trimaran.core.user_folders import needed_user_cache
from trimaran.data.bad_lines import BadLines
from trimaran.data.plugin_source import plugin_fingerprint
from trimaran.data.sequences import count_sequences
from trimaran.data.text_files import any_byte_order_mark
from trimaran.data.text_sources import TextChunk, check_file_starts, find_files, named_path, read_chunks
from trimaran.data.token_files import TOKEN_SOURCES, check_token_files, read_token_runs
from trimaran.data.token_shards import FORMAT, ShardWriter, TokenShards
from trimaran.data.tokenizer import Tokenizer, is_same_tokenizer, load_tokenizer

BATCH_CHARACTERS = 1 << 22
REPORTED_RUNS = 1000  # of tokens between reports of progress

Progress = Callable[[str, float], None]


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return the cache folder of packed data: TRIMARAN_CACHE, or a folder in the user's cache.

    The environment is an argument: only entry points read it.
    """
    if named := environ.get("TRIMARAN_CACHE"):
        return Path(named)
    return needed_user_cache(environ) / "data"


def prepare(section: DataSection, *, cache: Path, progress: Progress | None = None) -> Path:
    """Return the folder of packed shards for `section`: its own path, or `cache/<fingerprint>`, packed if missing.

    Several processes may prepare the same data at once: the first to finish wins, the others drop their copy.
    """
    if section.source == "shards":
        path = named_path(section)
    else:
        files, tokenizer = find_files(section), load_tokenizer(section.tokenizer)
        path = cache / _fingerprint(section, files, tokenizer)
        if not path.exists():
            with suppress(FileExistsError):  # another process finished first, with the same shards
                _pack(section, files, tokenizer, path, progress)
    _check_shards(section, path)
    return path


def pack(section: DataSection, out: Path, *, end_token: str | None = None, progress: Progress | None = None) -> Path:
    """Return `out` after packing `section` into it. It must be missing or an empty folder."""
    if section.source == "shards":
        raise UserError("T016", "the source is packed shards already", where="data.source",
                        fix="pack another source, or use the shards directly")  # fmt: skip
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise _already_exists(out)
    try:
        _pack(section, find_files(section), load_tokenizer(section.tokenizer, end_token=end_token), out, progress)
    except FileExistsError:
        raise _already_exists(out) from None
    return out


def pack_with(section: DataSection, tokenizer: Tokenizer, out: Path, *, progress: Progress | None = None) -> Path:
    """Return the new folder `out` after packing `section` into it with a tokenizer that is already open."""
    _pack(section, find_files(section), tokenizer, out, progress)
    return out


def check(section: DataSection) -> None:
    """Raise if the data is missing, empty or unreadable. Reads only the start of files and packs nothing."""
    if section.source == "shards":
        _check_shards(section, named_path(section))
        return
    files, tokenizer = find_files(section), load_tokenizer(section.tokenizer)
    if section.source in TOKEN_SOURCES:
        check_token_files(section, files, tokenizer)
    else:
        check_file_starts(section, files)


def _check_shards(section: DataSection, path: Path) -> None:
    shards = TokenShards.open(path)
    shards.refuse_many_bad(section.samples.max_bad)
    count_sequences(shards, section.seq_len)
    if section.source == "shards" and section.tokenizer is not None:
        requested = load_tokenizer(section.tokenizer)
        if not is_same_tokenizer(requested, shards.tokenizer):
            raise UserError("T019", f"the shards were packed with another tokenizer, of {shards.vocab_size:,} ids; "
                            f"the named one has {requested.vocab_size:,}", where="data.tokenizer",
                            fix="leave data.tokenizer out: the shards include their tokenizer")  # fmt: skip


def _fingerprint(section: DataSection, files: list[Path], tokenizer: Tokenizer) -> str:
    """Return a hash of everything that the packed tokens depend on."""
    folders = {folder: folder.resolve() for folder in {file.parent for file in files}}
    paths = [file.resolve() if file.is_symlink() else folders[file.parent] / file.name for file in files]
    stats = [(str(path), path.stat()) for path in paths]
    parts = {
        "format": FORMAT,
        "source": section.source,
        "text_field": section.text_field,
        "tokenizer": tokenizer.describe().get("sha256", "bytes"),
        "python": sys.version if section.source == "python-stdlib" else None,
        "files": [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats],
    }
    if section.source not in SOURCES:
        parts["plugin"] = ", ".join(plugin_fingerprint(section))
    if "rejected" in section.text_field:
        parts["rejected"] = "refused"  # earlier versions packed the rejected answers of preference data
    if section.source != "python-stdlib" and any_byte_order_mark(files):  # it has none, and hundreds of files
        parts["byte_order_mark"] = "skipped"  # earlier versions packed it; files without one keep their fingerprint
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _pack(section: DataSection, files: list[Path], tokenizer: Tokenizer, path: Path, progress: Progress | None) -> None:
    write = _write_tokens if section.source in TOKEN_SOURCES else _write_texts
    try:
        with ShardWriter(path, tokenizer) as writer:
            for fraction_read in write(section, files, tokenizer, writer):
                if progress is not None:
                    progress(f"packing {section.source}", fraction_read)
            if not writer.num_documents:
                raise UserError("T009", "the data has no text", where=f"data.path: {section.path}",
                                fix="name data with at least one non-empty document")  # fmt: skip
    except FileExistsError:
        raise
    except OSError as error:
        raise UserError("T017", f"the packed shards cannot be written: {error.strerror}", where=str(path),
                        fix="choose a folder on a disk with free space that you may write to") from None  # fmt: skip


def _write_texts(section: DataSection, files: list[Path], tokenizer: Tokenizer, writer: ShardWriter) -> Iterator[float]:
    """Write the documents of a text source, and yield the fraction read after each batch."""
    bad = BadLines(section.samples.max_bad, kind="row" if section.source == "datasets" else "line")
    begin, at_start = np.array(tokenizer.begin_ids, dtype=np.int64), True
    for batch in _batches(read_chunks(section, files, bad)):
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
    writer.record_bad(bad)


def _write_tokens(
    section: DataSection, files: list[Path], tokenizer: Tokenizer, writer: ShardWriter
) -> Iterator[float]:
    """Write the documents of token files, and yield the fraction read now and then."""
    for number, run in enumerate(read_token_runs(section, files, tokenizer)):
        writer.append(run.ids)
        if run.ends_document:
            writer.end_document()
        if number % REPORTED_RUNS == 0:
            yield run.fraction_read


def _batches(chunks: Iterable[TextChunk]) -> Iterator[list[TextChunk]]:
    """Yield the chunks in batches of a few megabytes: enough for a tokenizer to use all cores."""
    batch: list[TextChunk] = []
    num_characters = 0
    for chunk in chunks:
        batch.append(chunk)
        num_characters += len(chunk.text)
        if num_characters >= BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def _already_exists(path: Path) -> UserError:
    return UserError("T016", "this path already exists", where=str(path),
                     fix="name a folder that does not exist yet")  # fmt: skip
