"""A data source: the texts of one column of an SQLite database. `data.path` is its file, `data.text_field` the column.

The table is called `documents`.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from trimaran.core import DataSection, UserError


class SqliteSource:
    contract = 1

    def documents(self, data: DataSection) -> Iterator[str]:
        column = '"' + data.text_field.replace('"', '""') + '"'
        with closing(sqlite3.connect(f"{_file(data).as_uri()}?mode=ro", uri=True)) as database:
            for (text,) in database.execute(f"SELECT {column} FROM documents ORDER BY rowid"):
                yield text or ""

    def fingerprint(self, data: DataSection) -> str:
        stat = _file(data).stat()
        return f"{_file(data)} {data.text_field} {stat.st_size} {stat.st_mtime_ns}"


def _file(data: DataSection) -> Path:
    path = Path(data.path or "")
    if not path.is_file():
        raise UserError("T001", "the source sqlite needs a database", where="data.path", fix="name an SQLite file")
    return path.absolute()
