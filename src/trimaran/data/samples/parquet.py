"""Rows of Parquet files. Imported only if a recipe needs it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trimaran.core.regular_files import check_regular_file
from trimaran.data.quarantine import BadSampleError
from trimaran.data.samples.read_rows import FractionAt

BATCH_ROWS = 128  # a row may hold an image of several megabytes


def read_parquet(file: Path, fraction_at: FractionAt) -> Iterator[tuple[int, Any, float]]:
    """Yield number, row and fraction read of each row. A damaged file ends with a bad row."""
    number, size = 0, file.stat().st_size
    try:
        check_regular_file(file, follow_links=True)
        with pq.ParquetFile(file) as table:
            total = table.metadata.num_rows
            for batch in table.iter_batches(BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row, fraction_at(size * number // total)
    except (OSError, pa.ArrowException, ValueError) as error:  # ValueError: text that is not UTF-8
        reason = f"the rest of the Parquet file cannot be read: {getattr(error, 'strerror', None) or error}"
        yield number + 1, BadSampleError(reason[:200]), fraction_at(size)
