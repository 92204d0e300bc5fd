"""Finds the files of a text source, and opens those of text: plain or compressed, without a byte order mark."""

import codecs
import csv
import errno
import gzip
import importlib
import io
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from trimaran.core import SOURCES, DataSection, UserError, did_you_mean, open_regular_file, templated
from trimaran.data.quarantine import BadSampleError

CSV_SUFFIXES = (".csv", ".tsv")
COMPRESSED_SUFFIXES = (".gz", ".zst")
JSONL_SUFFIXES = (".jsonl", ".ndjson")
JSON_SUFFIXES = (*JSONL_SUFFIXES, ".json")
# The file suffixes that belong to a source, in groups: the first group that a folder has is read. Other sources take
# all files of a folder, as every source does with a saved dataset.
SUFFIXES: dict[str, tuple[tuple[str, ...], ...]] = {
    "jsonl": (JSONL_SUFFIXES,),
    "chat": (JSON_SUFFIXES, (".parquet",), CSV_SUFFIXES),
    "webdataset": ((".tar",),),
    "parquet": ((".parquet",),),
    "megatron": ((".idx", ".bin"),),
    "nanogpt": ((".bin",),),
}
SAVED_DATASET = ("state.json", "dataset_dict.json")  # one of them is in a folder written by save_to_disk
NOT_ROWS = (*SAVED_DATASET, "dataset_info.json", "dataset_infos.json")
GENERATED_SOURCES = ("python-stdlib", "shapes")
# Not part of the standard library's own source: other packages, caches, and tests with deliberately broken files.
NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
HELD_OUT = re.compile(r"(?:^|[_-])(?:val|valid|validation|test)(?:[_-]|$)")
GZIP_MAGIC, ZSTD_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
ZSTD_CHUNK_BYTES = 1 << 14
MAX_LINE_BYTES = 1 << 30
DAMAGED = "the compressed file is truncated or damaged"
DELIMITERS = ",;\t"
MAX_FIELD_CHARACTERS = 1 << 30
HEAD_BYTES = 1 << 16
FractionAt = Callable[[int], float]  # returns the fraction of a source that lies before a position in the current file


def find_files(section: DataSection) -> list[Path]:
    """Return the files of the source in reading order; none of a plug-in's. Raises if all of them are empty."""
    if section.source not in SOURCES:
        return []
    if section.source in GENERATED_SOURCES and section.path is not None:
        raise UserError("T002.data-path-set", where=f"data.path: {section.path}", source=section.source)
    if section.source == "python-stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        files = [file for file in _walk(root, NOT_STDLIB) if file.suffix == ".py"]
    else:
        root = named_path(section)
        files = [root] if root.is_file() else _walk(root)
        if section.source == "megatron" and root.is_file():
            files = [root.with_suffix(suffix) for suffix in (".idx", ".bin")]
        groups = SUFFIXES.get(section.source, ())
        if groups and root.is_dir() and not (section.source == "chat" and is_saved_dataset(root)):
            rows = [file for file in files if file.name not in NOT_ROWS]
            of_groups = ([file for file in rows if data_suffix(file) in group] for group in groups)
            files = next(filter(None, of_groups), [])
            if section.source == "nanogpt":
                files = [file for file in files if file not in held_out_files(files)]
    for file in files:
        with reading(file):
            if file.stat().st_size:
                return files
    suffixes = SUFFIXES.get(section.source, (("",),))[0]
    kind = "Python file" if section.source == "python-stdlib" else f"{suffixes[0]} file".strip()
    raise UserError("T005.no-non-empty", where=str(root), kind=kind)


def is_saved_dataset(path: Path) -> bool:
    """Return whether this is a folder that `save_to_disk` of `datasets` wrote."""
    return any((path / name).is_file() for name in SAVED_DATASET)


def named_path(section: DataSection) -> Path:
    """Return `data.path`. Raises unless it is an existing file or folder."""
    if section.path is None:
        raise UserError("T001.source-needs-path", where="data.path", source=section.source)
    path = Path(section.path)
    if section.source == "megatron" and not path.exists() and Path(f"{path}.idx").is_file():
        return Path(f"{path}.idx")  # Megatron's tools name its files without their suffixes
    with reading(path):
        if path.is_file() or path.is_dir():
            return path
        if path.exists():
            raise UserError("T004.neither-file-nor", where=f"data.path: {path}")
        existing = next(parent for parent in path.absolute().parents if parent.is_dir())
        missing = path.absolute().relative_to(existing).parts[0]
        what = templated(
            "'{missing}' does not exist in {existing}{guess}",
            missing=missing,
            existing=existing,
            guess=did_you_mean(missing, os.listdir(existing)),
        )
        if os.path.lexists(existing / missing):
            what = templated(
                "'{missing}' in {existing} is a broken link, or a file where a folder should be",
                missing=missing,
                existing=existing,
            )
    raise UserError("T003", what, where=f"data.path: {path}",
                    fix="correct data.path; it is relative to the working directory")  # fmt: skip


def held_out_files(files: list[Path]) -> list[Path]:
    """Return the files that are for validation by their names; none if all are."""
    found = [file for file in files if HELD_OUT.search(file.stem)]
    return found if len(found) < len(files) else []


def data_suffix(file: Path) -> str:
    """Return the suffix of the file that says what it holds: `.jsonl` for `a.jsonl.gz`."""
    return (file.with_suffix("") if file.suffix in COMPRESSED_SUFFIXES else file).suffix.lower()


def any_byte_order_mark(files: Iterable[Path]) -> bool:
    """Return whether a file starts with a byte order mark, which was part of the text in earlier versions."""
    for file in files:
        with open_regular_file(file, follow_links=True) as stream:
            if stream.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8:
                return True
    return False


def _walk(root: Path, skip: frozenset[str] = frozenset()) -> list[Path]:
    """Return the files under `root` sorted by path, without hidden files and the folders in `skip`."""
    files: list[Path] = []

    def raise_error(error: OSError) -> NoReturn:
        raise error

    with reading(root):
        for folder, folders, names in os.walk(root, onerror=raise_error):
            folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
            files += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(file for file in files if file.is_file())


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an OSError into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError("T004.cannot-read", where=error.filename or str(path), reason=error.strerror) from None


def files_with_progress(files: Sequence[Path]) -> Iterator[tuple[Path, FractionAt]]:
    """Yield each file, and the function from a position in it to the fraction of all files before that position."""
    sizes = []
    for file in files:
        with reading(file):
            sizes.append(file.stat().st_size)
    total, before = sum(sizes) or 1, 0
    for file, size in zip(files, sizes, strict=True):
        yield file, lambda position, before=before: min(1.0, (before + position) / total)
        before += size


class TextFile:
    """A file opened for reading, after its byte order mark; `stream` yields its decompressed bytes."""

    def __init__(self, stream: io.BufferedReader, file: BinaryIO) -> None:
        self.stream, self._file = stream, file

    def position(self) -> int:
        """Return how many bytes of the file on disk have been read."""
        return self._file.tell()

    def lines(self) -> Iterator[bytes]:
        """Yield the lines. Raises OSError for a line that is too large for memory."""
        while line := self.stream.readline(MAX_LINE_BYTES):
            if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                raise OSError(errno.EFBIG, f"a line has more than {MAX_LINE_BYTES:,} bytes")
            yield line


class ZstdReader(io.RawIOBase):
    """Decompresses the frames of a Zstandard file; the library's own reader takes a truncated file for a whole one."""

    def __init__(self, decompressor: Any, file: BinaryIO) -> None:
        self._decompressor, self._file = decompressor, file
        self._frame: Any = None
        self._compressed = self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if self._frame is not None and self._frame.eof:
                self._compressed, self._frame = self._frame.unused_data, None
            data, self._compressed = self._compressed or self._file.read(ZSTD_CHUNK_BYTES), b""
            if not data:
                if self._frame is not None:
                    raise EOFError
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            self._ready = self._frame.decompress(data)
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


@contextmanager
def open_text_file(path: Path) -> Iterator[TextFile]:
    """Open a file; its first bytes, not its name, say whether it is compressed. Damage in it is an OSError."""
    with open_regular_file(path, follow_links=True) as file:
        head = file.read(len(ZSTD_MAGIC))
        file.seek(0)
        zstd_errors: tuple[type[Exception], ...] = ()
        raw: Any = gzip.GzipFile(fileobj=file) if head.startswith(GZIP_MAGIC) else file
        if head == ZSTD_MAGIC:
            try:
                zstandard = importlib.import_module("zstandard")
            except ImportError:
                raise UserError("T013.zst-file", where=str(path)) from None
            raw, zstd_errors = ZstdReader(zstandard.ZstdDecompressor(), file), (zstandard.ZstdError,)
        stream = io.BufferedReader(raw)
        damage: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile, *zstd_errors)
        try:
            if stream.peek(len(codecs.BOM_UTF8)).startswith(codecs.BOM_UTF8):
                stream.read(len(codecs.BOM_UTF8))
            yield TextFile(stream, file)
        except damage:
            raise OSError(errno.EIO, DAMAGED, str(path)) from None


def csv_rows(file: Path, fraction_at: FractionAt) -> Iterator[tuple[int, Any, float]]:
    """Yield line number, row and fraction read of each row. A file that cannot be parsed ends with a bad row."""
    csv.field_size_limit(MAX_FIELD_CHARACTERS)
    number = 1
    try:
        with open_text_file(file) as opened, io.TextIOWrapper(opened.stream, encoding="utf-8", newline="") as text:
            head = opened.stream.peek(HEAD_BYTES).partition(b"\n")[0]
            delimiter = max(DELIMITERS, key=lambda each: head.count(each.encode()))
            reader = csv.reader(text, delimiter=delimiter, strict=True)
            header = next(reader, [])
            if len(set(header)) < len(header):
                yield number, BadSampleError("two columns have the same name"), fraction_at(opened.position())
                return
            number = reader.line_num + 1
            for values in reader:
                row: Any = dict(zip(header, values, strict=False))
                if len(values) != len(header):
                    row = BadSampleError(f"it has {len(values)} values, and the first line has {len(header)} names")
                if values:
                    yield number, row, fraction_at(opened.position())
                number = reader.line_num + 1
    except OSError as error:
        yield 0, BadSampleError(f"the file cannot be read: {error.strerror}"), fraction_at(0)
    except (csv.Error, UnicodeDecodeError) as error:
        yield number, BadSampleError(f"the rest of the file cannot be read: {error}"[:200]), fraction_at(0)
