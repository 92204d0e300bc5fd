"""Helpers of the readers: progress over files, JSON rows, and the conversion of a row to a sample."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trimaran.data.quarantine import BadSampleError
from trimaran.data.samples.parse_chat import ImageFinder, read_extras, read_row
from trimaran.data.samples.raw_sample import RawSample
from trimaran.data.text.source_files import data_suffix
from trimaran.data.text.text_files import TextFile, open_text_file

MAX_JSON_BYTES = 4 << 30  # a JSON file that is one list is read into memory
MAX_TEXT_BYTES = 1 << 30

FractionAt = Callable[[int], float]
"""Returns the fraction of a source that lies before a position in the current file."""


def files_with_progress(files: Sequence[Path]) -> Iterator[tuple[Path, FractionAt]]:
    """Yield each file, and the function from a position in it to the fraction of all files before that position."""
    sizes = [file.stat().st_size for file in files]
    total, before = sum(sizes) or 1, 0
    for file, size in zip(files, sizes, strict=True):
        yield file, lambda position, before=before: min(1.0, (before + position) / total)
        before += size


def sample_of(
    file: Path | str, number: int, row: Any, finder: ImageFinder, text_field: str, fraction_read: float = 0.0
) -> RawSample:
    """Return the sample of row `number`. A row that is a BadSampleError or cannot be parsed gives a bad sample."""
    name = os.path.abspath(file)
    try:
        if isinstance(row, BadSampleError):
            raise row
        turns, images = read_row(row, finder, text_field)
        tools, system = read_extras(row) if turns[0].role != "text" else ((), "")
    except BadSampleError as error:
        return RawSample(file=name, row=number, fraction_read=fraction_read, bad=str(error))
    return RawSample(
        file=name, row=number, fraction_read=fraction_read, turns=turns, images=images, tools=tools, system=system
    )


def json_rows(file: Path, fraction_at: FractionAt) -> Iterator[tuple[int, Any, float]]:
    """Yield number, row and fraction read of each non-blank JSONL line, or of each entry of one JSON list."""
    try:
        with open_text_file(file) as opened:
            if data_suffix(file) == ".json" and opened.stream.peek(4096).lstrip().startswith(b"["):
                yield from _list_entries(opened, fraction_at)
                return
            for number, line in enumerate(opened.lines(), start=1):
                if line.strip():
                    yield number, parse_json(line), fraction_at(opened.position())
    except OSError as error:
        yield 0, BadSampleError(f"the file cannot be read: {error.strerror}"), fraction_at(0)


def _list_entries(opened: TextFile, fraction_at: FractionAt) -> Iterator[tuple[int, Any, float]]:
    data = opened.stream.read(MAX_JSON_BYTES + 1)
    size = opened.position()
    if len(data) > MAX_JSON_BYTES:
        reason = "this JSON list is too large for memory: write one object per line"
        yield 0, BadSampleError(reason), fraction_at(size)
        return
    rows = parse_json(data)
    if isinstance(rows, BadSampleError):
        yield 0, rows, fraction_at(size)
        return
    for number, row in enumerate(rows, start=1):
        yield number, row, fraction_at(size * number // len(rows))


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
