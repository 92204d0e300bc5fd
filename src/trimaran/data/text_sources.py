"""Text sources: finds the files of a source and reads their documents."""

import codecs
import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from trimaran.core import DataSection, UserError, did_you_mean
from trimaran.core.regular_files import open_regular_file
from trimaran.data import lazy_import

HEAD_BYTES = 1 << 16
HEAD_FILES = 64
CHUNK_BYTES = 1 << 24
JSONL_SUFFIXES = (".jsonl", ".ndjson")
JSON_SUFFIXES = (*JSONL_SUFFIXES, ".json")
# The file suffixes that belong to a source. Other sources take all files of a folder.
SUFFIXES = {"jsonl": JSONL_SUFFIXES, "chat": JSON_SUFFIXES, "webdataset": (".tar",), "parquet": (".parquet",)}
GENERATED_SOURCES = ("python-stdlib", "shapes", "scenes")
# Not part of the standard library's own source: other packages, caches, and tests with deliberately broken files.
NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


@dataclass(frozen=True, slots=True)
class TextChunk:
    """A chunk of a document, so that no file has to fit in memory. `fraction_read` is the progress in the source."""

    text: str
    ends_document: bool
    fraction_read: float


def find_files(section: DataSection) -> list[Path]:
    """Return the files of the source in reading order. Raises if all of them are empty."""
    if section.source in GENERATED_SOURCES and section.path is not None:
        raise UserError("T002", f"data.path is set, but the source {section.source} reads no path",
                        where=f"data.path: {section.path}", fix="set data.source to the type of data.path: "
                        "text, jsonl, chat, shards or datasets")  # fmt: skip
    if section.source == "python-stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        files = [file for file in _walk(root, NOT_STDLIB) if file.suffix == ".py"]
    else:
        root = named_path(section)
        files = [root] if root.is_file() else _walk(root)
        if section.source in SUFFIXES and root.is_dir():
            files = [file for file in files if file.suffix in SUFFIXES[section.source]]
    if _total_bytes(files):
        return files
    kind = (
        "Python file" if section.source == "python-stdlib" else f"{SUFFIXES.get(section.source, ('',))[0]} file".strip()
    )
    raise UserError("T005", f"there is no non-empty {kind}", where=str(root),
                    fix="name a file or a folder with text")  # fmt: skip


def named_path(section: DataSection) -> Path:
    """Return `data.path`. Raises unless it is an existing file or folder."""
    if section.path is None:
        raise UserError("T001", f"the source {section.source} needs a path", where="data.path",
                        fix="set data.path to a file or folder, or data.source to python-stdlib")  # fmt: skip
    path = Path(section.path)
    with _reading(path):
        if path.is_file() or path.is_dir():
            return path
        if path.exists():
            raise UserError("T004", "this is neither a file nor a folder", where=f"data.path: {path}",
                            fix="name a regular file or a folder")  # fmt: skip
        existing = next(parent for parent in path.absolute().parents if parent.is_dir())
        missing = path.absolute().relative_to(existing).parts[0]
        what = f"'{missing}' does not exist in {existing}{did_you_mean(missing, os.listdir(existing))}"
        if os.path.lexists(existing / missing):
            what = f"'{missing}' in {existing} is a broken link, or a file where a folder should be"
    raise UserError("T003", what, where=f"data.path: {path}",
                    fix="correct data.path; it is relative to the working directory")  # fmt: skip


def read_chunks(section: DataSection, files: list[Path]) -> Iterator[TextChunk]:
    """Yield the text of the files, document by document. Skips empty documents."""
    return READERS[section.source](section, files)


def check_file_starts(section: DataSection, files: list[Path]) -> None:
    """Raise if the start of one of the first files does not match the source type."""
    if section.source == "datasets":
        lazy_import.require("datasets", where="data.source")
        return
    for file in files[:HEAD_FILES]:
        with _reading(file), open_regular_file(file, follow_links=True) as stream:
            head = stream.read(HEAD_BYTES)
        text = _decode(head, file, offset=0, final=len(head) < HEAD_BYTES)
        if section.source == "jsonl":
            lines = text.split("\n")
            for number, line in enumerate(lines[:-1] if len(head) == HEAD_BYTES else lines, start=1):
                _line_text(line, section.text_field, f"{file}:{number}")


def _read_texts(section: DataSection, files: list[Path]) -> Iterator[TextChunk]:
    total, before = _total_bytes(files), 0
    for file in files:
        offset = 0
        with _reading(file), open_regular_file(file, follow_links=True) as stream:
            chunk = stream.read(CHUNK_BYTES) + stream.readline()
            while chunk:
                following = stream.read(CHUNK_BYTES) + stream.readline()
                text = _decode(chunk, file, offset=offset)
                offset += len(chunk)
                yield TextChunk(text, ends_document=not following, fraction_read=min(1.0, (before + offset) / total))
                chunk = following
        before += offset


def _read_jsonl(section: DataSection, files: list[Path]) -> Iterator[TextChunk]:
    total, before = _total_bytes(files), 0
    for file in files:
        offset = 0
        with _reading(file), open_regular_file(file, follow_links=True) as stream:
            for number, line in enumerate(stream, start=1):
                text = _line_text(_decode(line, file, offset=offset), section.text_field, f"{file}:{number}")
                offset += len(line)
                if text:
                    yield TextChunk(text, ends_document=True, fraction_read=min(1.0, (before + offset) / total))
        before += offset


def _read_datasets(section: DataSection, files: list[Path]) -> Iterator[TextChunk]:
    module = lazy_import.load("hf_datasets", "datasets", where="data.source")
    for text, fraction_read in module.read_rows(named_path(section), files, section.text_field):
        if text:
            yield TextChunk(text, ends_document=True, fraction_read=fraction_read)


READERS: dict[str, Callable[[DataSection, list[Path]], Iterator[TextChunk]]] = {
    "python-stdlib": _read_texts,
    "text": _read_texts,
    "jsonl": _read_jsonl,
    "datasets": _read_datasets,
}


def _walk(root: Path, skip: frozenset[str] = frozenset()) -> list[Path]:
    """Return the files under `root` sorted by path, without hidden files and the folders in `skip`."""
    files: list[Path] = []
    with _reading(root):
        for folder, folders, names in os.walk(root, onerror=_raise):
            folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
            files += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(file for file in files if file.is_file())


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn an OSError into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError("T004", f"this cannot be read: {error.strerror}", where=error.filename or str(path),
                        fix="check the name, the permissions and the disk") from None  # fmt: skip


def _total_bytes(files: list[Path]) -> int:
    sizes = []
    for file in files:
        with _reading(file):
            sizes.append(file.stat().st_size)
    return sum(sizes)


def _raise(error: OSError) -> NoReturn:
    raise error


def _decode(data: bytes, file: Path, *, offset: int, final: bool = True) -> str:
    """Return `data`, which starts at `offset` of the file, as text. Unless `final`, it may end inside a character."""
    if (zero := data.find(b"\0")) >= 0:
        raise _not_text(file, offset + zero, "a zero byte")
    try:
        return codecs.utf_8_decode(data, "strict", final)[0]
    except UnicodeDecodeError as error:
        raise _not_text(file, offset + error.start, f"byte 0x{data[error.start]:02x}, which is not UTF-8") from None


def _not_text(file: Path, offset: int, what: str) -> UserError:
    return UserError("T006", f"this file is not UTF-8 text: {what}, at offset {offset:,}", where=str(file),
                     fix="convert it (iconv -t UTF-8) or move it out of data.path")  # fmt: skip


def _line_text(line: str, field: str, where: str) -> str:
    """Return the text of one JSONL line; empty for a blank line."""
    if not line.strip():
        return ""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError("T007", f"this line is not JSON: {error}", where=where,
                        fix="write one JSON object per line, or use data.source = text") from None  # fmt: skip
    if not isinstance(row, dict):
        raise UserError("T007", f"this line is a JSON {type(row).__name__} and not an object", where=where,
                        fix=f'write lines like {{"{field}": "..."}}')  # fmt: skip
    return row_text(row, field, where)


def row_text(row: dict, field: str, where: str) -> str:
    """Return the text in `field` of one row."""
    if field not in row:
        raise UserError("T008", f"there is no field '{field}'{did_you_mean(field, row)}", where=where,
                        fix=f"set data.text_field to one of {', '.join(row) or 'the existing fields'}")  # fmt: skip
    text = row[field]
    if not isinstance(text, str):
        raise UserError("T008", f"the field '{field}' holds a {type(text).__name__} and not a string", where=where,
                        fix="set data.text_field to the field that holds the text, or drop the row")  # fmt: skip
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise UserError("T008", f"the field '{field}' holds an unpaired surrogate, which is not valid text",
                        where=where, fix="correct the row or drop it")  # fmt: skip
    return text
