"""What readers share: files with how far one is, rows of JSON, and a row that becomes a sample or a bad one."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trimaran.data.quarantine import BadSampleError
from trimaran.data.samples.parse_chat import RowImages, read_row
from trimaran.data.samples.raw_sample import RawSample

MAX_JSON_BYTES = 4 << 30  # a JSON file that is one list is read whole
MAX_TEXT_BYTES = 1 << 30

Done = Callable[[int], float]


def weighed(files: Sequence[Path]) -> Iterator[tuple[Path, Done]]:
    """Yield each file, and what tells from a place in it which share of all files lies before that place."""
    sizes = [file.stat().st_size for file in files]
    total, before = sum(sizes) or 1, 0
    for file, size in zip(files, sizes, strict=True):
        yield file, lambda place, before=before: min(1.0, (before + place) / total)
        before += size


def sample_of(
    file: Path | str, number: int, row: Any, finder: RowImages, text_field: str, done: float = 0.0
) -> RawSample:
    """Return the sample in row `number` of a file; one that is a BadSampleError already, or turns out bad, says why."""
    name = os.path.abspath(file)
    try:
        if isinstance(row, BadSampleError):
            raise row
        turns, images = read_row(row, finder, text_field)
    except BadSampleError as error:
        return RawSample(file=name, row=number, done=done, bad=str(error))
    return RawSample(file=name, row=number, done=done, turns=turns, images=images)


def json_rows(file: Path, done: Done) -> Iterator[tuple[int, Any, float]]:
    """Yield number, row and share read, for each line of JSONL that is not blank, or each entry of one JSON list."""
    try:
        with file.open("rb") as stream:
            head = stream.read(4096).lstrip()
            if file.suffix == ".json" and head.startswith(b"["):
                yield from _entries(file, done)
                return
            stream.seek(0)
            place = 0
            for number, line in enumerate(stream, start=1):
                place += len(line)
                if line.strip():
                    yield number, parse_json(line), done(place)
    except OSError as error:
        yield 0, BadSampleError(f"the file cannot be read: {error.strerror}"), done(0)


def _entries(file: Path, done: Done) -> Iterator[tuple[int, Any, float]]:
    size = file.stat().st_size
    if size > MAX_JSON_BYTES:
        yield (
            0,
            BadSampleError("a JSON list this large does not fit into memory: write one object per line"),
            done(size),
        )
        return
    rows = parse_json(file.read_bytes())
    if isinstance(rows, BadSampleError):
        yield 0, rows, done(size)
        return
    for number, row in enumerate(rows, start=1):
        yield number, row, done(size * number // len(rows))


def parse_json(text: bytes | str) -> Any:
    """Return what a JSON text holds, or a BadSampleError that says why it holds nothing."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also bytes that are not UTF-8
        return BadSampleError(f"this is not JSON: {error}"[:200])


def text_of(file: Path) -> str:
    """Return the text of a file; BadSampleError when it is none."""
    try:
        if file.stat().st_size > MAX_TEXT_BYTES:
            raise BadSampleError("a text this large is not one sample: cut it into files of less than a gigabyte")
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise BadSampleError(f"the file cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise BadSampleError(f"this is not UTF-8 text: byte {error.start:,}") from None
    if "\0" in text:
        raise BadSampleError("this is not text: a zero byte in it")
    return text
