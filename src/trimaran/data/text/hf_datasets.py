"""Rows of a local `datasets` folder. Imported only if a recipe needs it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets

from trimaran.core import UserError, check_regular_file
from trimaran.data.quarantine import BadSampleError
from trimaran.data.text.bad_lines import BadLines
from trimaran.data.text.source_files import CSV_SUFFIXES, csv_rows, data_suffix, is_saved_dataset
from trimaran.data.text.text_sources import counted_text, row_text

BATCH_ROWS = 1000
BATCH_IMAGES = 128
BUILDERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}


def read_rows(path: Path, files: list[Path], field: str, bad: BadLines) -> Iterator[tuple[str, float]]:
    """Yield text and fraction read of each row of a saved dataset or of files; a bad row is empty, and in `bad`."""
    if is_saved_dataset(path):
        dataset = _open_saved(path)
        for number, text in enumerate(_texts(dataset, field, path, bad), start=1):
            yield text, number / len(dataset)
        return
    files = [file for file in files if file.stat().st_size]
    tables = [file for file in files if data_suffix(file) in BUILDERS]
    tables = tables or [file for file in files if data_suffix(file) in CSV_SUFFIXES]
    if not tables:
        raise UserError("T018.neither-saved-dataset", where=str(path))
    for number, file in enumerate(tables):
        if data_suffix(file) not in CSV_SUFFIXES:
            try:
                check_regular_file(file, follow_links=True)
                # Streaming avoids a second copy in the user's `datasets` cache.
                kind = BUILDERS[data_suffix(file)]
                rows = datasets.load_dataset(kind, data_files=str(file), split="train", streaming=True)
            except (OSError, ValueError) as error:
                raise _unreadable(file, error) from None
            yield from ((text, number / len(tables)) for text in _texts(rows, field, file, bad))
            continue
        for line, row, _ in csv_rows(file, lambda position: 0.0):
            where = f"{file}:{line}"
            if isinstance(row, BadSampleError):
                bad.add(UserError("T018.row-cannot-read", where=where, row=row))
            else:
                yield counted_text(row, field, where, bad), number / len(tables)


def read_saved(path: Path) -> Iterator[tuple[int, dict[str, Any], float]]:
    """Yield number, row and fraction read of a `save_to_disk` dataset. Images come as bytes or as a path."""
    dataset = _open_saved(path)
    number = 0
    try:
        tables: Iterator[Any] = dataset.with_format("arrow").iter(batch_size=BATCH_IMAGES)  # of pyarrow
        for table in tables:
            for row in table.to_pylist():
                number += 1
                yield number, row, number / len(dataset)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None


def _open_saved(path: Path) -> datasets.Dataset:
    try:
        for each in sorted(path.rglob("*")):
            if not each.is_dir():
                check_regular_file(each, follow_links=True)
        dataset = datasets.load_from_disk(path)
    except (OSError, ValueError, KeyError) as error:
        raise _unreadable(path, error) from None
    if isinstance(dataset, datasets.Dataset):
        return dataset
    names = [str(name) for name in dataset]
    if "train" not in names and len(names) > 1:
        raise UserError("T018.dataset-no-split", where=str(path), names=", ".join(names), path=path / names[0])
    return dataset["train" if "train" in names else names[0]]


def _texts(rows: Any, field: str, path: Path, bad: BadLines) -> Iterator[str]:
    """Yield the text of each row of a Dataset or IterableDataset, which share these methods but no base type."""
    number, column = 0, field
    try:
        if columns := rows.column_names:  # unknown for some JSON files until they are read
            column = field if field in columns else field.partition(".")[0]
            row_text(dict.fromkeys(columns, "some text"), column, str(path))
            rows = rows.select_columns([column])
        for batch in rows.iter(batch_size=BATCH_ROWS):
            column = field if field in batch else field.partition(".")[0]
            if column not in batch:
                row_text(dict.fromkeys(batch, "some text"), column, str(path))
            for value in batch[column]:
                number += 1
                yield counted_text({column: value}, field, f"{path}, row {number}", bad)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> UserError:
    first_line = (getattr(error, "strerror", None) or str(error)).partition("\n")[0]
    return UserError("T018.datasets-cannot-read", where=str(path), first_line=first_line)
