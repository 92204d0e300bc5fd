"""Reads images at an offset from the files that contain them."""

import os
from collections import OrderedDict
from pathlib import Path
from typing import BinaryIO

import numpy as np

from trimaran.core.regular_files import open_regular_file
from trimaran.data.quarantine import BadSampleError

MAX_OPEN_FILES = 64


class ImageFiles:
    """Image files by number. `table` [count, 3] has the end of each path in `paths`, the file size and the mtime.

    A relative path is inside `folder` and has no recorded size. Files with many images stay open. Reads use pread, so
    forked processes may share the file descriptors.
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
        """Return the bytes of one image. Raises BadSampleError if the file has changed."""
        size = int(self._table[number, 1])
        if (offset, length) == (0, size):
            with open_regular_file(self.path(number), follow_links=True) as stream:
                data = stream.read(size + 1)
            size_now = len(data)
        else:
            file = self._file(number)
            data, size_now = os.pread(file.fileno(), length, offset), os.fstat(file.fileno()).st_size
        if len(data) != length or size not in (-1, size_now):
            raise BadSampleError(f"{self.path(number)} has changed since the samples were prepared")
        return data

    def _file(self, number: int) -> BinaryIO:
        """Return the open file. Evicts the least recently used one if too many are open."""
        if number not in self._open:
            self._open[number] = open_regular_file(self.path(number), follow_links=True)
            if len(self._open) > MAX_OPEN_FILES:
                self._open.popitem(last=False)
        self._open.move_to_end(number)
        return self._open[number]
