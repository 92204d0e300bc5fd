"""Tar files whose members of one name are one sample, the way WebDataset lays them out. Images stay in them."""

import os
import tarfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from trimaran.data.quarantine import BadSampleError
from trimaran.data.samples.parse_chat import RowImages
from trimaran.data.samples.raw_sample import ImageLocation, RawSample
from trimaran.data.samples.read_rows import Done, parse_json, sample_of

IMAGES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff")
MAX_MEMBER_BYTES = 64 << 20  # of text; an image is not read here


def read_tar(file: Path, text_field: str, done: Done) -> Iterator[RawSample]:
    """Yield the samples of a tar file; one that breaks off gives those before, and a bad one."""
    number, place = 0, 0
    nowhere = RowImages("/dev/null")  # rows in a tar file have their images beside them, and name no others
    try:
        with tarfile.open(file, mode="r:") as tar, file.open("rb", buffering=0) as stream:
            members = ((key, kind, member) for member in _files(tar) for key, kind in [_split(member.name)])
            for number, (key, group) in enumerate(groupby(members, key=lambda each: each[0]), start=1):
                row: Any = None
                try:
                    parts = [(kind, member) for _, kind, member in group]
                    place = parts[-1][1].offset_data
                    row = _row(str(file.absolute()), stream.fileno(), parts)
                except BadSampleError as error:
                    row = BadSampleError(f"{error}: {key}")
                yield sample_of(file, number, row, nowhere, text_field, done(place))
    except (tarfile.TarError, OSError, EOFError) as error:
        reason = f"the tar file breaks off or is none: {error}"[:200]
        yield RawSample(file=os.path.abspath(file), row=number + 1, done=done(place), bad=reason)


def _files(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the members that are files. What was met is forgotten: a tar may have millions."""
    for member in tar:
        tar.members = []  # pyrefly: ignore[missing-attribute]
        if member.isreg() and not member.issparse() and not os.path.basename(member.name).startswith("."):
            yield member


def _split(name: str) -> tuple[str, str]:
    """Return the key of a member, up to the first dot of its file name, and its kind behind the last."""
    folder, _, base = name.rpartition("/")
    key, _, kinds = base.partition(".")
    return f"{folder}/{key}", kinds.rpartition(".")[2].lower()


def _row(file: str, handle: int, parts: list[tuple[str, tarfile.TarInfo]]) -> dict[str, Any]:
    """Return a row as others have it: what the JSON or the text member says, and the images."""
    row: dict[str, Any] = {}
    for kind, member in parts:
        if kind == "json":
            said = parse_json(_read(handle, member))
            if isinstance(said, BadSampleError):
                raise said
            if not isinstance(said, dict):
                raise BadSampleError("its JSON is not an object")
            row = {field: value for field, value in said.items() if field not in ("image", "images", "file_name")} | row
        elif kind in ("txt", "caption", "cls"):
            row.setdefault("caption", _text(_read(handle, member)).strip())
    row["images"] = [ImageLocation(file, member.offset_data, member.size) for kind, member in parts if kind in IMAGES]
    return row


def _read(handle: int, member: tarfile.TarInfo) -> bytes:
    if member.size > MAX_MEMBER_BYTES:
        raise BadSampleError(f"a text of {member.size:,} bytes")
    data = os.pread(handle, member.size, member.offset_data)
    if len(data) != member.size:
        raise BadSampleError("the tar file breaks off")
    return data


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise BadSampleError("its text is not UTF-8") from None
