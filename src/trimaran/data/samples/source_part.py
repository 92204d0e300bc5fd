"""The samples of one source on disk: a folder of arrays, see `array_folder`, and the images that they refer to."""

import hashlib
import json
import os
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trimaran.core import UserError, open_regular_file, read_regular_text
from trimaran.data.quarantine import BadSampleError
from trimaran.data.samples.raw_sample import ImageLocation, RawSample, SizedImage, origin
from trimaran.data.text.array_folder import (
    BAD,
    DTYPES,
    META,
    ArrayFolderWriter,
    map_array,
    read_bad,
    sha256_of,
)
from trimaran.data.text.tokenizer import Tokenizer, open_tokenizer
from trimaran.data.vision.image_grid import ALONE

MAX_OPEN_FILES = 64
FORMAT = "trimaran-samples-1"
BLOB_BYTES = 1 << 30
TIMES = "times"  # of images: written only if there are videos of one block
ROW_WIDTHS = {"origins": 2, "pictures": 3, "sizes": 2, "containers": 3}
DTYPE_OF = {"targets": "|b1", "ends": "<i8", "picture_ends": "<i8", "origins": "<i8", "pictures": "<i8", "sizes": "<i4",
         "containers": "<i8", "paths": "|u1", TIMES: "<i4"}  # fmt: skip
Count = Annotated[int, Field(ge=0)]


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
            if number not in self._open:
                self._open[number] = open_regular_file(self.path(number), follow_links=True)
                if len(self._open) > MAX_OPEN_FILES:
                    self._open.popitem(last=False)  # the least recently used
            self._open.move_to_end(number)
            file = self._open[number].fileno()
            data, size_now = os.pread(file, length, offset), os.fstat(file).st_size
        if len(data) != length or size not in (-1, size_now):
            raise BadSampleError(f"{self.path(number)} has changed since the samples were prepared")
        return data


class SourcePartMeta(BaseModel):
    """The content of `meta.json`. `sha256` has the checksum of each file, `rows` the number of rows of each array."""

    model_config = ConfigDict(frozen=True)

    format: Literal["trimaran-samples-1"] = FORMAT
    dtype: Literal["uint16", "uint32"]
    vocab_size: Annotated[int, Field(ge=1)]
    tokenizer: dict[str, str]
    num_bad: Count
    rows: dict[str, Count]
    sha256: dict[str, str]


@dataclass(frozen=True, slots=True)
class TokenizedSample:
    """A sample: tokens, a target mask over them, and its images with width and height.

    `times` are the images' time positions in their videos (see `SampleTable`); none if no image continues a video.
    """

    tokens: np.ndarray
    targets: np.ndarray
    images: tuple[SizedImage, ...] = ()
    times: tuple[int, ...] = ()


class PartWriter(ArrayFolderWriter):
    """Writes a folder of samples."""

    def __init__(self, path: Path, tokenizer: Tokenizer, vocab_size: int) -> None:
        super().__init__(path, tokenizer, vocab_size)
        self._columns = {name: array("q") for name in DTYPE_OF if name not in ("targets", "paths")}
        self._paths = bytearray()
        self._numbers: dict[str, int] = {}
        self._num_tokens = self._blob_bytes = self._blobs = 0
        self.num_samples = self.num_bad = 0

    def _begin(self) -> None:
        self._tokens, self._targets, self._bad = (self._stream(name) for name in ("tokens", "targets", BAD))
        self._blob: BinaryIO | None = None

    def add(self, raw: RawSample, samples: Sequence[TokenizedSample]) -> None:
        """Add the samples of one raw sample: several if it was a long document."""
        file_number = self._file_number(raw.file)
        for sample in samples:
            assert sample.tokens.min() >= 0
            assert sample.tokens.max() < self._vocab_size
            self._tokens.write(sample.tokens.astype(DTYPES[self._dtype]).tobytes())
            self._targets.write(sample.targets.tobytes())
            self._num_tokens += len(sample.tokens)
            self._columns["ends"].append(self._num_tokens)
            self._columns["origins"].extend((file_number, raw.row))
            times = sample.times or (ALONE,) * len(sample.images)
            for (image, width, height), time in zip(sample.images, times, strict=True):
                self._columns["pictures"].extend(self._store(image))
                self._columns["sizes"].extend((width, height))
                self._columns[TIMES].append(time)
            self._columns["picture_ends"].append(len(self._columns["sizes"]) // 2)
        self.num_samples += len(samples)

    def add_bad(self, raw: RawSample, reason: str) -> None:
        """Record a sample that cannot be used."""
        self.num_bad += 1
        self._bad.write(json.dumps({"where": raw.origin, "reason": reason}).encode() + b"\n")

    def _close(self) -> None:
        for stream in (self._tokens, self._targets, self._bad, self._blob):
            if stream is not None:
                stream.close()

    def _stream(self, name: str) -> BinaryIO:
        return (self._draft / name).open("wb")

    def _store(self, image: ImageLocation | bytes) -> tuple[int, int, int]:
        """Return file number, offset and length of an image. Bytes are copied into a file of this folder."""
        if isinstance(image, ImageLocation):
            return self._file_number(image.file), image.offset, image.length
        if self._blob is None or self._blob_bytes + len(image) > BLOB_BYTES:
            if self._blob is not None:
                self._blob.close()
            self._blob = self._stream(f"pictures-{self._blobs:05d}")
            self._blobs, self._blob_bytes = self._blobs + 1, 0
        offset, self._blob_bytes = self._blob_bytes, self._blob_bytes + len(image)
        self._blob.write(image)
        return self._file_number(f"pictures-{self._blobs - 1:05d}"), offset, len(image)

    def _file_number(self, file: str) -> int:
        """Return the number of a file. A relative name is a file of this folder."""
        number = self._numbers.setdefault(file, len(self._numbers))
        if number * 3 == len(self._columns["containers"]):
            self._paths += file.encode(errors="surrogateescape")
            is_own = not Path(file).is_absolute()
            stat = None if is_own else Path(file).stat()
            size, mtime = (stat.st_size, stat.st_mtime_ns) if stat else (-1, -1)
            self._columns["containers"].extend((len(self._paths), size, mtime))
        return number

    def _finish(self) -> SourcePartMeta:
        self._close()
        if set(self._columns[TIMES]) <= {ALONE}:
            del self._columns[TIMES]
        for name, column in self._columns.items():
            (self._draft / name).write_bytes(np.array(column, dtype=DTYPE_OF[name]).tobytes())
        (self._draft / "paths").write_bytes(bytes(self._paths))
        self._tokenizer.save(self._draft)
        rows = {name: len(column) // ROW_WIDTHS.get(name, 1) for name, column in self._columns.items()}
        files = [file for file in self._draft.rglob("*") if file.is_file()]
        return SourcePartMeta(
            dtype=self._dtype,
            vocab_size=self._vocab_size,
            tokenizer=self._tokenizer.describe(),
            num_bad=self.num_bad,
            rows=rows | {"tokens": self._num_tokens, "targets": self._num_tokens, "paths": len(self._paths)},
            sha256={str(file.relative_to(self._draft)): sha256_of(file) for file in sorted(files)},
        )


class SamplePart:
    """Random access to the samples of one source."""

    def __init__(self, path: Path, meta: SourcePartMeta) -> None:
        self.path, self.meta = path, meta
        self.tokens = self._map("tokens", DTYPES[meta.dtype].str)
        arrays = {name: self._map(name, kind) for name, kind in DTYPE_OF.items() if name != TIMES}
        self.targets, self.ends, self.image_ends = arrays["targets"], arrays["ends"], arrays["picture_ends"]
        self.origins, self.images, self.sizes = arrays["origins"], arrays["pictures"], arrays["sizes"]
        alone = np.broadcast_to(np.int32(ALONE), len(self.images))
        self.times = self._map(TIMES, DTYPE_OF[TIMES]) if TIMES in meta.rows else alone
        self.image_files = ImageFiles(path, arrays["containers"], arrays["paths"])
        self.num_samples = len(self.ends)
        ends = (int(self.ends[-1]), int(self.image_ends[-1])) if len(self.ends) else (0, 0)
        is_complete = len(self.ends) == len(self.origins) and len(self.times) == len(self.images)
        if not len(self.ends) or ends != (len(self.tokens), len(self.images)) or not is_complete:
            raise _damaged(path / META, "its counts do not add up")

    @classmethod
    def open(cls, path: Path) -> Self:
        """Return the samples at `path`. Checks only file sizes; `verify` checks the content."""
        try:
            return cls(path, SourcePartMeta.model_validate_json(read_regular_text(path / META, follow_links=True)))
        except (OSError, UnicodeDecodeError, ValidationError):
            raise not_samples(path, META) from None

    @property
    def digest(self) -> str:
        """A hash of the samples. Image paths are not part of it, so the images may move to another disk."""
        ignored = ("containers", "paths", BAD)
        checksums = {name: checksum for name, checksum in self.meta.sha256.items() if name not in ignored}
        return hashlib.sha256(json.dumps([self.meta.dtype, checksums], sort_keys=True).encode()).hexdigest()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return open_tokenizer(self.meta.tokenizer, self.path)

    @cached_property
    def bad(self) -> list[dict[str, str]]:
        """The bad samples, as {where, reason}."""
        return read_bad(self.path)

    def span(self, index: int) -> slice:
        """Return the slice of a sample's tokens."""
        return slice(int(self.ends[index - 1]) if index else 0, int(self.ends[index]))

    def origin(self, index: int) -> str:
        file_number, row = self.origins[index].tolist()
        return origin(self.image_files.name(file_number), row)

    def image_bytes(self, number: int) -> bytes:
        file_number, offset, length = self.images[number].tolist()
        return self.image_files.read(file_number, offset, length)

    def verify(self) -> None:
        """Raise unless all checksums match. Reads all files of the folder."""
        for name, checksum in self.meta.sha256.items():
            if sha256_of(self.path / name) != checksum:
                raise _damaged(self.path / name, "its checksum differs")

    def _map(self, name: str, kind: str) -> np.ndarray:
        width = ROW_WIDTHS.get(name, 1)
        flat = map_array(self.path / name, np.dtype(kind), self.meta.rows.get(name, 0) * width, _damaged)
        return flat.reshape(-1, width) if width > 1 else flat


def not_samples(path: Path, file: str) -> UserError:
    return UserError("T033.not-folder-prepared", where=str(path), file=file)


def _damaged(file: Path, what: str) -> UserError:
    return UserError("T034.file-prepared-samples", where=str(file), text=what, parent=file.parent)
