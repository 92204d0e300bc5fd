"""The files that images are in, read at an offset."""

import os
from collections import OrderedDict
from pathlib import Path
from typing import BinaryIO

import numpy as np

from trimaran.data.quarantine import BadSampleError

MAX_OPEN = 64


class Containers:
    """Files by number: `table` [count, 3] has the end of each path in `paths`, its size and when it was changed.

    A relative path lies in `folder` and has no size. Files that hold many images stay open; reading at an offset
    moves no position, so forks may share them.
    """

    def __init__(self, folder: Path, table: np.ndarray, paths: np.ndarray) -> None:
        self._folder, self._table, self._paths = folder, table, paths
        self._open: OrderedDict[int, BinaryIO] = OrderedDict()

    def name(self, number: int) -> str:
        start = int(self._table[number - 1, 0]) if number else 0
        return self._paths[start : int(self._table[number, 0])].tobytes().decode(errors="surrogateescape")

    def path(self, number: int) -> Path:
        return self._folder / self.name(number)

    def read(self, number: int, offset: int, length: int) -> bytes:
        """Return the bytes of one image; BadSampleError when the file is not what it was."""
        size = int(self._table[number, 1])
        if (offset, length) == (0, size):
            with open(self.path(number), "rb") as stream:
                data = stream.read(size + 1)
            found = len(data)
        else:
            file = self._file(number)
            data, found = os.pread(file.fileno(), length, offset), os.fstat(file.fileno()).st_size
        if len(data) != length or size not in (-1, found):
            raise BadSampleError(f"{self.path(number)} has changed since the samples were prepared")
        return data

    def _file(self, number: int) -> BinaryIO:
        """Return the open file. When there are too many the one not asked for longest closes once nobody reads it."""
        if number not in self._open:
            self._open[number] = open(self.path(number), "rb", buffering=0)  # noqa: SIM115 - stays open
            if len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)
        self._open.move_to_end(number)
        return self._open[number]
