"""Opens files of text: plain or compressed with gzip or Zstandard, without a byte order mark."""

import codecs
import errno
import gzip
import importlib
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from trimaran.core import UserError
from trimaran.core.regular_files import open_regular_file

GZIP_MAGIC, ZSTD_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
ZSTD_CHUNK_BYTES = 1 << 14
MAX_LINE_BYTES = 1 << 30
DAMAGED = "the compressed file is truncated or damaged"


class TextFile:
    """A file opened for reading, after its byte order mark; `stream` yields its decompressed bytes."""

    def __init__(self, stream: io.BufferedReader, file: BinaryIO) -> None:
        self.stream, self._file = stream, file

    def position(self) -> int:
        """Return how many bytes of the file on disk have been read."""
        return self._file.tell()

    def lines(self) -> Iterator[bytes]:
        """Yield the lines. Raises OSError for a line that is too large for memory."""
        while line := self.stream.readline(MAX_LINE_BYTES):
            if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                raise OSError(errno.EFBIG, f"a line has more than {MAX_LINE_BYTES:,} bytes")
            yield line


class ZstdReader(io.RawIOBase):
    """Decompresses the frames of a Zstandard file; the library's own reader takes a truncated file for a whole one."""

    def __init__(self, decompressor: Any, file: BinaryIO) -> None:
        self._decompressor, self._file = decompressor, file
        self._frame: Any = None
        self._compressed = self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if self._frame is not None and self._frame.eof:
                self._compressed, self._frame = self._frame.unused_data, None
            data, self._compressed = self._compressed or self._file.read(ZSTD_CHUNK_BYTES), b""
            if not data:
                if self._frame is not None:
                    raise EOFError
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            self._ready = self._frame.decompress(data)
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


@contextmanager
def open_text_file(path: Path) -> Iterator[TextFile]:
    """Open a file; its first bytes, not its name, say whether it is compressed. Damage in it is an OSError."""
    with open_regular_file(path, follow_links=True) as file:
        head = file.read(len(ZSTD_MAGIC))
        file.seek(0)
        stream = io.BufferedReader(_decompressed(head, file, path))
        damage: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile, *_zstd_errors(head))
        try:
            if stream.peek(len(codecs.BOM_UTF8)).startswith(codecs.BOM_UTF8):
                stream.read(len(codecs.BOM_UTF8))
            yield TextFile(stream, file)
        except damage:
            raise OSError(errno.EIO, DAMAGED, str(path)) from None


def _decompressed(head: bytes, file: BinaryIO, path: Path) -> Any:
    if head.startswith(GZIP_MAGIC):
        return gzip.GzipFile(fileobj=file)
    if head == ZSTD_MAGIC:
        try:
            zstandard = importlib.import_module("zstandard")
        except ImportError:
            raise UserError("T013", "a .zst file needs the package 'zstandard', which is not installed",
                            where=str(path), fix="run: pip install zstandard") from None  # fmt: skip
        return ZstdReader(zstandard.ZstdDecompressor(), file)
    return file


def _zstd_errors(head: bytes) -> tuple[type[Exception], ...]:
    return (importlib.import_module("zstandard").ZstdError,) if head == ZSTD_MAGIC else ()
