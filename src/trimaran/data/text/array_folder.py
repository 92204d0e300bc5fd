"""Folders of memory-mapped arrays with a `meta.json`: created atomically and never modified."""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import numpy as np
from pydantic import BaseModel

from trimaran.core import UserError
from trimaran.core.regular_files import open_regular_file, read_regular_text
from trimaran.data.text.tokenizer import Tokenizer

META, BAD = "meta.json", "bad.jsonl"
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}  # of token ids


class ArrayFolderWriter:
    """Writes a draft folder next to `path` and renames it to `path` when the `with` block succeeds.

    If the block fails, the draft is removed. If another process created `path` meanwhile, its folder stays and
    FileExistsError is raised. Token ids are below `vocab_size`; the tokenizer is stored with them.
    """

    def __init__(self, path: Path, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._path, self._tokenizer, self._vocab_size = path.absolute(), tokenizer, vocab_size
        self._draft = draft_of(path)
        self._dtype: Literal["uint16", "uint32"] = "uint16" if vocab_size <= 1 << 16 else "uint32"

    def __enter__(self) -> Self:
        self._draft.mkdir(parents=True)
        self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                meta = self._finish()
                (self._draft / META).write_text(meta.model_dump_json(indent=2) + "\n", encoding="utf-8")
                rename_into_place(self._draft, self._path)
        finally:
            self._close()
            shutil.rmtree(self._draft, ignore_errors=True)  # no longer exists if it was renamed

    def _begin(self) -> None:
        raise NotImplementedError

    def _finish(self) -> BaseModel:
        """Write and close all other files, and return the content of `meta.json`."""
        raise NotImplementedError

    def _close(self) -> None:
        """Close the files that are still open."""
        raise NotImplementedError


def draft_of(path: Path) -> Path:
    """Return a new name next to `path`, for a folder that becomes `path` when it is complete."""
    return path.absolute().with_name(f".{path.name}.{uuid.uuid4().hex[:12]}")


def rename_into_place(draft: Path, path: Path) -> None:
    """Rename a finished folder to `path`, durably (fsync). Raises FileExistsError if `path` exists."""
    for file in draft.iterdir():
        _sync(file)
    _sync(draft)
    try:
        draft.rename(path)
    except OSError as error:
        if path.exists():  # the error is ENOTEMPTY on some systems, EEXIST on others
            raise FileExistsError(error.errno, error.strerror, str(path)) from None
        raise
    _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def map_array(file: Path, dtype: np.dtype, count: int, damaged: Callable[[Path, str], UserError]) -> np.ndarray:
    """Return a file of `count` numbers as a plain ndarray: slicing a memmap is several times slower.

    Raises `damaged` of the file and the reason if it has another size or cannot be read.
    """
    try:
        with open_regular_file(file, follow_links=True) as stream:
            if (size := os.fstat(stream.fileno()).st_size) != count * dtype.itemsize:
                raise damaged(file, f"it has {size:,} bytes instead of {count * dtype.itemsize:,}")
            return np.asarray(np.memmap(stream, dtype=dtype, mode="r")) if size else np.empty(0, dtype)
    except OSError as error:
        raise damaged(file, error.strerror or str(error)) from None


def read_bad(folder: Path) -> list[dict[str, str]]:
    """Return what was left out when the folder was written, and why."""
    return [json.loads(line) for line in read_regular_text(folder / BAD, follow_links=True).splitlines()]


def sha256_of(file: Path) -> str:
    with open_regular_file(file, follow_links=True) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
