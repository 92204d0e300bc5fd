"""Rows of Parquet files. Loaded only when a recipe asks for them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trimaran.data.quarantine import BadSampleError
from trimaran.data.samples.read_rows import Done

BATCH_ROWS = 128  # of images of megabytes


def read_parquet(file: Path, done: Done) -> Iterator[tuple[int, Any, float]]:
    """Yield number, row and share read of each row; a file that is broken gives the rows before, and a bad one."""
    number, size = 0, file.stat().st_size
    try:
        with pq.ParquetFile(file) as table:
            total = table.metadata.num_rows
            for batch in table.iter_batches(BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row, done(size * number // total)
    except (OSError, pa.ArrowException, ValueError) as error:  # ValueError: text that is not UTF-8
        yield number + 1, BadSampleError(f"the Parquet file cannot be read on: {error}"[:200]), done(size)
