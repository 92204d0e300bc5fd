"""Where text comes from: the files of a source, and the documents in them."""

import codecs
import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from trimaran.core import DataSection, UserError, nearest
from trimaran.data import lazy_import

HEAD_BYTES = 1 << 16
HEAD_FILES = 64
PIECE_BYTES = 1 << 24
JSONL_SUFFIXES = (".jsonl", ".ndjson")
JSON_SUFFIXES = (*JSONL_SUFFIXES, ".json")
# Which files of a folder are the source's; those of the others all are.
SUFFIXES = {"jsonl": JSONL_SUFFIXES, "chat": JSON_SUFFIXES, "webdataset": (".tar",), "parquet": (".parquet",)}
MADE_HERE = ("python-stdlib", "shapes", "scenes")
# Not the language's own text: other people's packages, caches, and tests with broken files on purpose.
NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Some text of a document: no file has to fit into memory. `done` is the share of the source read so far."""

    text: str
    ends_document: bool
    done: float


def find_files(section: DataSection) -> list[Path]:
    """Return the files of the source in the order they are read in; at least one of them is not empty."""
    if section.source in MADE_HERE and section.path is not None:
        raise UserError("T002", f"data.path is set, but the source {section.source} reads no path",
                        where=f"data.path: {section.path}",
                        fix="say what the path is: data.source = text, jsonl, chat, shards or datasets")  # fmt: skip
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
    raise UserError("T005", f"there is no {kind} with anything in it", where=str(root),
                    fix="name a file or a folder that has text in it")  # fmt: skip


def named_path(section: DataSection) -> Path:
    """Return `data.path`, which must be there and be a file or a folder."""
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
        there = next(parent for parent in path.absolute().parents if parent.is_dir())
        missing = path.absolute().relative_to(there).parts[0]
        what = f"'{missing}' does not exist in {there}{nearest(missing, os.listdir(there))}"
        if os.path.lexists(there / missing):
            what = f"'{missing}' in {there} is a link to nothing, or a file where a folder should be"
    raise UserError("T003", what, where=f"data.path: {path}",
                    fix="correct data.path; it is taken relative to where you start")  # fmt: skip


def read_pieces(section: DataSection, files: list[Path]) -> Iterator[TextChunk]:
    """Yield the text of the files, document by document; documents without text are left out."""
    return READERS[section.source](section, files)


def check_heads(section: DataSection, files: list[Path]) -> None:
    """Raise when the beginning of one of the first files shows that it cannot be read as the source says."""
    if section.source == "datasets":
        lazy_import.require("datasets", where="data.source")
        return
    for file in files[:HEAD_FILES]:
        with _reading(file), file.open("rb") as stream:
            head = stream.read(HEAD_BYTES)
        text = _decode(head, file, offset=0, whole=len(head) < HEAD_BYTES)
        if section.source == "jsonl":
            lines = text.split("\n")
            for number, line in enumerate(lines[:-1] if len(head) == HEAD_BYTES else lines, start=1):
                _line_text(line, section.text_field, f"{file}:{number}")


def _read_texts(section: DataSection, files: list[Path]) -> Iterator[TextChunk]:
    total, before = _total_bytes(files), 0
    for file in files:
        offset = 0
        with _reading(file), file.open("rb") as stream:
            chunk = stream.read(PIECE_BYTES) + stream.readline()
            while chunk:
                following = stream.read(PIECE_BYTES) + stream.readline()
                text = _decode(chunk, file, offset=offset)
                offset += len(chunk)
                yield TextChunk(text, ends_document=not following, done=min(1.0, (before + offset) / total))
                chunk = following
        before += offset


def _read_jsonl(section: DataSection, files: list[Path]) -> Iterator[TextChunk]:
    total, before = _total_bytes(files), 0
    for file in files:
        offset = 0
        with _reading(file), file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                text = _line_text(_decode(line, file, offset=offset), section.text_field, f"{file}:{number}")
                offset += len(line)
                if text:
                    yield TextChunk(text, ends_document=True, done=min(1.0, (before + offset) / total))
        before += offset


def _read_datasets(section: DataSection, files: list[Path]) -> Iterator[TextChunk]:
    module = lazy_import.load("hf_datasets", "datasets", where="data.source")
    for text, done in module.read_rows(named_path(section), files, section.text_field):
        if text:
            yield TextChunk(text, ends_document=True, done=done)


READERS: dict[str, Callable[[DataSection, list[Path]], Iterator[TextChunk]]] = {
    "python-stdlib": _read_texts,
    "text": _read_texts,
    "jsonl": _read_jsonl,
    "datasets": _read_datasets,
}


def _walk(root: Path, skip: frozenset[str] = frozenset()) -> list[Path]:
    """Return the files under `root` sorted by relative path, without hidden ones and the folders in `skip`."""
    found: list[Path] = []
    with _reading(root):
        for folder, folders, names in os.walk(root, onerror=_raise):
            folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
            found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(file for file in found if file.is_file())


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn what the system says about a file into a person's mistake."""
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


def _decode(data: bytes, file: Path, *, offset: int, whole: bool = True) -> str:
    """Return `data`, which begins at `offset` of the file, as text; unless it is `whole` its end may be cut."""
    if (zero := data.find(b"\0")) >= 0:
        raise _not_text(file, offset + zero, "a zero byte")
    try:
        return codecs.utf_8_decode(data, "strict", whole)[0]
    except UnicodeDecodeError as error:
        raise _not_text(file, offset + error.start, f"byte 0x{data[error.start]:02x}, which is not UTF-8") from None


def _not_text(file: Path, offset: int, what: str) -> UserError:
    return UserError("T006", f"this file is not UTF-8 text: {what}, at offset {offset:,}", where=str(file),
                     fix="convert it (iconv -t UTF-8) or move it out of data.path")  # fmt: skip


def _line_text(line: str, field: str, where: str) -> str:
    """Return the text that one line of JSONL holds; a blank line holds none."""
    if not line.strip():
        return ""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError("T007", f"this line is not JSON: {error}", where=where,
                        fix="write one JSON object per line, or use data.source = text") from None  # fmt: skip
    if not isinstance(row, dict):
        raise UserError("T007", f"this line is JSON, but a {type(row).__name__} and not an object", where=where,
                        fix=f'write lines like {{"{field}": "..."}}')  # fmt: skip
    return row_text(row, field, where)


def row_text(row: dict, field: str, where: str) -> str:
    """Return the text in `field` of one row."""
    if field not in row:
        raise UserError("T008", f"there is no field '{field}'{nearest(field, row)}", where=where,
                        fix=f"set data.text_field to one of {', '.join(row) or 'the fields there are'}")  # fmt: skip
    text = row[field]
    if not isinstance(text, str):
        raise UserError("T008", f"the field '{field}' holds a {type(text).__name__} and not a string", where=where,
                        fix="set data.text_field to the field that holds the text, or drop the row")  # fmt: skip
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise UserError("T008", f"the field '{field}' holds half of a surrogate pair, which is not text", where=where,
                        fix="repair the row or drop it")  # fmt: skip
    return text
