"""Rows of CSV files, with the names of their first line as fields."""

import csv
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trimaran.data.quarantine import BadSampleError
from trimaran.data.text.text_files import open_text_file

DELIMITERS = ",;\t"
MAX_FIELD_CHARACTERS = 1 << 30
HEAD_BYTES = 1 << 16


def csv_rows(file: Path, fraction_at: Callable[[int], float]) -> Iterator[tuple[int, Any, float]]:
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
