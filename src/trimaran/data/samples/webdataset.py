"""WebDataset tar files: members with the same key are one sample. Images stay in the tar file."""

import os
import tarfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from trimaran.core.regular_files import open_regular_file
from trimaran.data.quarantine import BadSampleError
from trimaran.data.samples.parse_chat import ImageFinder
from trimaran.data.samples.raw_sample import ImageLocation, RawSample
from trimaran.data.samples.read_rows import FractionAt, parse_json, sample_of

IMAGE_KINDS = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff")
MAX_MEMBER_BYTES = 64 << 20  # of a text member; images are not read here


def read_tar(file: Path, text_field: str, fraction_at: FractionAt) -> Iterator[RawSample]:
    """Yield the samples of a tar file. A truncated file ends with a bad sample."""
    number, position = 0, 0
    finder = ImageFinder("/dev/null")  # a row's images are members of the tar file; it may not name others
    try:
        with open_regular_file(file, follow_links=True) as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
            members = ((key, kind, member) for member in _files(tar) for key, kind in [_split(member.name)])
            for number, (key, group) in enumerate(groupby(members, key=lambda each: each[0]), start=1):
                row: Any = None
                try:
                    parts = [(kind, member) for _, kind, member in group]
                    position = parts[-1][1].offset_data
                    row = _row(str(file.absolute()), stream.fileno(), parts)
                except BadSampleError as error:
                    row = BadSampleError(f"{error}: {key}")
                yield sample_of(file, number, row, finder, text_field, fraction_at(position))
    except (tarfile.TarError, OSError, EOFError) as error:
        reason = f"the tar file is truncated or invalid: {getattr(error, 'strerror', None) or error}"[:200]
        yield RawSample(file=os.path.abspath(file), row=number + 1, fraction_read=fraction_at(position), bad=reason)


def _files(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the regular files. Clears the list of members that `tarfile` keeps: there may be millions."""
    for member in tar:
        tar.members = []  # pyrefly: ignore[missing-attribute]
        if member.isreg() and not member.issparse() and not os.path.basename(member.name).startswith("."):
            yield member


def _split(name: str) -> tuple[str, str]:
    """Return the key of a member (up to the first dot of its file name) and its kind (after the last dot)."""
    folder, _, base = name.rpartition("/")
    key, _, kinds = base.partition(".")
    return f"{folder}/{key}", kinds.rpartition(".")[2].lower()


def _row(file: str, handle: int, parts: list[tuple[str, tarfile.TarInfo]]) -> dict[str, Any]:
    """Return the row of a sample: the fields of its JSON or text member, and its images."""
    row: dict[str, Any] = {}
    for kind, member in parts:
        if kind == "json":
            fields = parse_json(_read(handle, member))
            if isinstance(fields, BadSampleError):
                raise fields
            if not isinstance(fields, dict):
                raise BadSampleError("its JSON is not an object")
            kept = {field: value for field, value in fields.items() if field not in ("image", "images", "file_name")}
            row = kept | row
        elif kind in ("txt", "caption", "cls"):
            row.setdefault("caption", _text(_read(handle, member)).strip())
    row["images"] = [
        ImageLocation(file, member.offset_data, member.size) for kind, member in parts if kind in IMAGE_KINDS
    ]
    return row


def _read(handle: int, member: tarfile.TarInfo) -> bytes:
    if member.size > MAX_MEMBER_BYTES:
        raise BadSampleError(f"its text has {member.size:,} bytes, more than {MAX_MEMBER_BYTES:,}")
    data = os.pread(handle, member.size, member.offset_data)
    if len(data) != member.size:
        raise BadSampleError("the tar file is truncated")
    return data


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise BadSampleError("its text is not UTF-8") from None
