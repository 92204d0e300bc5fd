"""Reads the samples of a source. A bad sample is reported and skipped, not raised."""

import json
import os
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from trimaran.core import check_regular_file, open_regular_file
from trimaran.data import drawn_shapes, lazy_import
from trimaran.data.quarantine import BadSampleError
from trimaran.data.samples.parse_chat import ImageFinder, read_extras, read_row, without_arrow_nulls
from trimaran.data.samples.raw_sample import ImageLocation, RawSample, SourceFiles, Turn
from trimaran.data.text.source_files import (
    CSV_SUFFIXES,
    JSON_SUFFIXES,
    NOT_ROWS,
    FractionAt,
    csv_rows,
    data_suffix,
    files_with_progress,
    is_saved_dataset,
    open_text_file,
)

MAX_JSON_BYTES = 4 << 30  # a JSON file that is one list is read into memory
MAX_TEXT_BYTES = 1 << 30

BATCH_ROWS = 128  # a row may hold an image of several megabytes
IMAGE_KINDS = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff")
MAX_MEMBER_BYTES = 64 << 20  # of a text member; images are not read here
IMAGE_SUFFIXES = tuple(f".{kind}" for kind in IMAGE_KINDS)
CAPTION_FILES = ("metadata.jsonl", "captions.jsonl")
RowsOf = Callable[[Path, FractionAt], Iterator[tuple[int, Any, float]]]
"""Yields number, row and fraction read of each row of a file."""


def sample_of(
    file: Path | str, number: int, row: Any, finder: ImageFinder, text_field: str, fraction_read: float = 0.0
) -> RawSample:
    """Return the sample of row `number`. A row that is a BadSampleError or cannot be parsed gives a bad sample."""
    raw = RawSample(file=os.path.abspath(file), row=number, fraction_read=fraction_read)
    try:
        if isinstance(row, BadSampleError):
            raise row
        turns, images = read_row(row, finder, text_field)
        tools, system = read_extras(row) if turns[0].role != "text" else ((), "")
    except BadSampleError as error:
        return replace(raw, bad=str(error))
    return replace(raw, turns=turns, images=images, tools=tools, system=system)


def json_rows(file: Path, fraction_at: FractionAt) -> Iterator[tuple[int, Any, float]]:
    """Yield number, row and fraction read of each non-blank JSONL line, or of each entry of one JSON list."""
    try:
        with open_text_file(file) as opened:
            if data_suffix(file) == ".json" and opened.stream.peek(4096).lstrip().startswith(b"["):
                data = opened.stream.read(MAX_JSON_BYTES + 1)
                size, is_large = opened.position(), len(data) > MAX_JSON_BYTES
                reason = "this JSON list is too large for memory: write one object per line"
                rows = BadSampleError(reason) if is_large else parse_json(data)
                if isinstance(rows, BadSampleError):
                    yield 0, rows, fraction_at(size)
                    return
                for number, row in enumerate(rows, start=1):
                    yield number, row, fraction_at(size * number // len(rows))
                return
            for number, line in enumerate(opened.lines(), start=1):
                if line.strip():
                    yield number, parse_json(line), fraction_at(opened.position())
    except OSError as error:
        yield 0, BadSampleError(f"the file cannot be read: {error.strerror}"), fraction_at(0)


def parse_json(text: bytes | str) -> Any:
    """Return the parsed JSON, or a BadSampleError that says why it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also bytes that are not UTF-8
        return BadSampleError(f"this is not JSON: {error}"[:200])


def text_of(file: Path) -> str:
    """Return the text of a file. Raises BadSampleError if it is not text."""
    try:
        with open_text_file(file) as opened:
            data = opened.stream.read(MAX_TEXT_BYTES + 1)
        if len(data) > MAX_TEXT_BYTES:
            raise BadSampleError("this text is too large for one sample: split it into files below 1 GiB")
        text = data.decode().replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise BadSampleError(f"the file cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line, byte = error.object.count(b"\n", 0, error.start) + 1, error.object[error.start]
        raise BadSampleError(f"this is not UTF-8 text: byte 0x{byte:02x} in line {line:,}") from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise BadSampleError(f"this is not text: there is a zero byte in line {line:,}")
    return text


def parquet_rows(file: Path, fraction_at: FractionAt) -> Iterator[tuple[int, Any, float]]:
    """Yield number, row and fraction read of each row of a Parquet file. A damaged file ends with a bad row."""
    lazy_import.require("pyarrow", where="data.source")
    import pyarrow as pa  # noqa: PLC0415  optional
    import pyarrow.parquet as pq  # noqa: PLC0415

    number, size = 0, file.stat().st_size
    try:
        check_regular_file(file, follow_links=True)
        with pq.ParquetFile(file) as table:
            total = table.metadata.num_rows
            for batch in table.iter_batches(BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield number, without_arrow_nulls(row), fraction_at(size * number // total)
    except (OSError, pa.ArrowException, ValueError) as error:  # ValueError: text that is not UTF-8
        reason = f"the rest of the Parquet file cannot be read: {getattr(error, 'strerror', None) or error}"
        yield number + 1, BadSampleError(reason[:200]), fraction_at(size)


def read_tar(file: Path, text_field: str, fraction_at: FractionAt) -> Iterator[RawSample]:
    """Yield the samples of a tar file. A truncated file ends with a bad sample."""
    number, position = 0, 0
    finder = ImageFinder("/dev/null")  # a row's images are members of the tar file; it may not name others
    try:
        with open_regular_file(file, follow_links=True) as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
            for number, (key, group) in enumerate(groupby(_files(tar), key=lambda each: each[0]), start=1):
                row: Any = None
                try:
                    parts = [(kind, member) for _, kind, member in group]
                    position = parts[-1][1].offset_data
                    row = _row(str(file.absolute()), stream.fileno(), parts)
                except BadSampleError as error:
                    row = BadSampleError(f"{error}: {key}")
                yield sample_of(file, number, row, finder, text_field, fraction_at(position))
    except (tarfile.TarError, OSError, EOFError) as error:
        reason = f"the tar file is truncated or invalid: {getattr(error, 'strerror', None) or error}"[:200]
        yield RawSample(file=os.path.abspath(file), row=number + 1, fraction_read=fraction_at(position), bad=reason)


def _files(tar: tarfile.TarFile) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
    """Yield key (up to the first dot of the file name) and kind (after the last dot) of regular files, and the file."""
    for member in tar:
        tar.members = []  # pyrefly: ignore[missing-attribute]  `tarfile` keeps a list: there may be millions
        folder, _, base = member.name.rpartition("/")
        if member.isreg() and not member.issparse() and not base.startswith("."):
            key, _, kinds = base.partition(".")
            yield f"{folder}/{key}", kinds.rpartition(".")[2].lower(), member


def _row(file: str, handle: int, parts: list[tuple[str, tarfile.TarInfo]]) -> dict[str, Any]:
    """Return the row of a sample: the fields of its JSON or text member, and its images."""
    row: dict[str, Any] = {}
    for kind, member in parts:
        if kind == "json":
            fields = parse_json(_read(handle, member))
            if isinstance(fields, BadSampleError):
                raise fields
            if not isinstance(fields, dict):
                raise BadSampleError("its JSON is not an object")
            row = _without_images(fields) | row
        elif kind in ("txt", "caption", "cls"):
            try:
                row.setdefault("caption", _read(handle, member).decode().strip())
            except UnicodeDecodeError:
                raise BadSampleError("its text is not UTF-8") from None
    row["images"] = [
        ImageLocation(file, member.offset_data, member.size) for kind, member in parts if kind in IMAGE_KINDS
    ]
    return row


def _without_images(fields: dict[str, Any]) -> dict[str, Any]:
    return {field: value for field, value in fields.items() if field not in ("image", "images", "file_name")}


def _read(handle: int, member: tarfile.TarInfo) -> bytes:
    if member.size > MAX_MEMBER_BYTES:
        raise BadSampleError(f"its text has {member.size:,} bytes, more than {MAX_MEMBER_BYTES:,}")
    data = os.pread(handle, member.size, member.offset_data)
    if len(data) != member.size:
        raise BadSampleError("the tar file is truncated")
    return data


def read_samples(source_files: SourceFiles) -> Iterator[RawSample]:
    """Yield the samples of a source. A bad sample carries its reason; nothing is raised for it."""
    return READERS[source_files.source.source](source_files)


def _finder(source_files: SourceFiles, folder: Path) -> ImageFinder:
    """Return how images and videos are found that a file in `folder` names."""
    return ImageFinder(os.path.abspath(source_files.images or folder), source_files.frames)


def file_rows(file: Path, fraction_at: FractionAt) -> Iterator[tuple[int, Any, float]]:
    """Yield number, row and fraction read of each row of a JSON, Parquet or CSV file."""
    suffix = data_suffix(file)
    if suffix == ".parquet":
        return parquet_rows(file, fraction_at)
    return csv_rows(file, fraction_at) if suffix in CSV_SUFFIXES else json_rows(file, fraction_at)


def saved_rows(folder: Path) -> Iterator[tuple[int, Any, float]]:
    module = lazy_import.load("text.hf_datasets", "datasets", where="data.source")
    for number, row, fraction_read in module.read_saved(folder):
        yield number, without_arrow_nulls(row), fraction_read


def _read_rows(source_files: SourceFiles) -> Iterator[RawSample]:
    """Yield the rows of a `save_to_disk` folder, or of Parquet, JSON and CSV files."""
    source, folder = source_files.source, Path(source_files.source.path or "")
    if is_saved_dataset(folder):
        finder = _finder(source_files, folder)
        for number, row, fraction_read in saved_rows(folder):
            yield sample_of(folder, number, row, finder, source.text_field, fraction_read)
        return
    yield from _read_files(source_files, file_rows)


def _read_files(source_files: SourceFiles, rows_of: RowsOf) -> Iterator[RawSample]:
    for file, fraction_at in files_with_progress(source_files.files):
        finder = _finder(source_files, file.parent)
        for number, row, fraction_read in rows_of(file, fraction_at):
            yield sample_of(file, number, row, finder, source_files.source.text_field, fraction_read)


def _read_texts(source_files: SourceFiles) -> Iterator[RawSample]:
    """Yield each file as one document. Skips empty files."""
    for file, fraction_at in files_with_progress(source_files.files):
        raw = RawSample(file=os.path.abspath(file), row=0, fraction_read=fraction_at(0))
        try:
            text = text_of(file)
        except BadSampleError as error:
            yield replace(raw, bad=str(error))
            continue
        if text.strip():
            yield replace(raw, turns=(Turn("text", (text,)),))


def _read_image_folder(source_files: SourceFiles) -> Iterator[RawSample]:
    """Yield the images of caption lists, then the other images with the caption file of the same name."""
    listed: set[str] = set()
    for file in source_files.files:
        if file.name in CAPTION_FILES:
            finder = ImageFinder(os.path.abspath(file.parent), source_files.frames)
            for number, row, _ in json_rows(file, lambda position: 0.0):
                raw = sample_of(file, number, row, finder, source_files.source.text_field)
                listed.update(image.file for image in raw.images if isinstance(image, ImageLocation))
                yield raw
    images = [file for file in source_files.files if file.suffix.lower() in IMAGE_SUFFIXES]
    for number, file in enumerate(images, start=1):
        if (name := os.path.abspath(file)) not in listed:
            row, finder = _caption(file, ImageLocation(name)), ImageFinder("/dev/null")
            yield sample_of(file, 0, row, finder, source_files.source.text_field, number / len(images))


def _caption(file: Path, image: ImageLocation) -> Any:
    """Return a row of the image and the caption file of the same name."""
    try:
        if (caption_file := file.with_suffix(".txt")).is_file():
            return {"caption": text_of(caption_file).strip(), "images": [image]}
        if not (caption_file := file.with_suffix(".json")).is_file():
            return BadSampleError("there is no caption: no .txt or .json of this name, and no list names the image")
        row = parse_json(text_of(caption_file))
    except BadSampleError as error:
        return error
    if not isinstance(row, dict):
        return row
    return _without_images(row) | {"images": [image]}


def _read_datasets(source_files: SourceFiles) -> Iterator[RawSample]:
    """Yield the rows of a folder: of Parquet and JSON files, or of CSV files if there are no others."""
    files = [file for file in source_files.files if file.name not in NOT_ROWS]
    groups = (".parquet",), JSON_SUFFIXES, CSV_SUFFIXES
    parquet, lines, tables = ([file for file in files if data_suffix(file) in group] for group in groups)
    return _read_rows(replace(source_files, files=[*parquet, *lines] or tables))


def _read_webdataset(source_files: SourceFiles) -> Iterator[RawSample]:
    for file, fraction_at in files_with_progress(source_files.files):
        yield from read_tar(file, source_files.source.text_field, fraction_at)


def _read_shapes(source_files: SourceFiles) -> Iterator[RawSample]:
    for number in range(drawn_shapes.NUM_SAMPLES):
        drawn, fraction_read = drawn_shapes.draw(number), number / drawn_shapes.NUM_SAMPLES
        images = (drawn.image,) if drawn.image else ()
        markers = (None,) * len(images)
        turns = (Turn("user", (*markers, drawn.question)), Turn("assistant", (drawn.answer,)))
        if not drawn.question:
            turns = (Turn("text", (*markers, drawn.answer)),)
        yield RawSample(file="shapes", row=number + 1, fraction_read=fraction_read, turns=turns, images=images)


READERS: dict[str, Callable[[SourceFiles], Iterator[RawSample]]] = {
    "chat": _read_rows,
    "jsonl": _read_rows,
    "text": _read_texts,
    "python-stdlib": _read_texts,
    "webdataset": _read_webdataset,
    "parquet": lambda source_files: _read_files(source_files, parquet_rows),
    "datasets": _read_datasets,
    "image-folder": _read_image_folder,
    "shapes": _read_shapes,
}
