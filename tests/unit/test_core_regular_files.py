"""Only regular files are opened, and nothing waits for another kind."""

import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.special_files import KINDS, no_longer_than, put
from trimaran.core import (
    SpecialFileError,
    UserError,
    append_regular_file,
    check_regular_file,
    open_regular_fd,
    open_regular_file,
    read_regular_bytes,
    read_regular_text,
    replace_file,
    write_atomically,
)

OPENERS: list[Callable[[Path], Any]] = [
    open_regular_fd,
    open_regular_file,
    append_regular_file,
    check_regular_file,
    read_regular_bytes,
    read_regular_text,
    lambda path: open_regular_fd(path, os.O_RDWR | os.O_CREAT),
]


@pytest.fixture(autouse=True)
def _limit() -> Iterator[None]:
    with no_longer_than(20):
        yield


@pytest.mark.parametrize("kind", KINDS)
def test_anything_but_a_regular_file_is_refused_with_what_it_is(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    put(kind, path)
    before = len(os.listdir("/proc/self/fd"))
    for open_it in OPENERS:
        with pytest.raises(OSError) as caught:  # noqa: PT011 - its type is checked below
            open_it(path)
        error = caught.value
        assert isinstance(error, SpecialFileError)
        assert isinstance(error, UserError)
        assert (error.code, error.where, error.filename) == ("A021", str(path), str(path))
        assert KINDS[kind] in error.what
        assert error.strerror == f"it is {error.what.removeprefix('this is ')}"
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_link_is_followed_only_on_request_and_only_to_a_regular_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here\r\n")
    (tmp_path / "link").symlink_to("file")
    assert read_regular_text(tmp_path / "link", follow_links=True) == "here\n"
    for target in ("/dev/zero", "/", "/proc/self/fd/0/nowhere"):
        (tmp_path / "link").unlink()
        (tmp_path / "link").symlink_to(target)
        with pytest.raises(OSError):  # noqa: PT011 - a missing target is a plain FileNotFoundError
            read_regular_bytes(tmp_path / "link", follow_links=True)


def test_a_missing_file_stays_a_plain_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_regular_file(tmp_path / "missing")
    with append_regular_file(tmp_path / "new") as file:
        file.write(b"line\n")
    assert read_regular_bytes(tmp_path / "new", limit_bytes=2) == b"li"


def test_a_kernel_file_that_claims_no_size_is_read_to_its_limit() -> None:
    assert len(read_regular_bytes("/proc/self/maps", limit_bytes=100)) == 100


def half_of_the_lines() -> Iterator[bytes]:
    yield b"the first line\n"
    raise RuntimeError


def test_a_file_is_replaced_by_a_complete_one_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")
    with pytest.raises(RuntimeError), replace_file(path) as file:
        file.writelines(half_of_the_lines())
    assert (path.read_text(), os.listdir(tmp_path)) == ("old", ["file"])
    with replace_file(path, sync=True, mode=0o604) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert (path.read_text(), path.stat().st_mode & 0o777, os.listdir(tmp_path)) == ("new", 0o604, ["file"])


def test_a_draft_never_replaces_what_others_share_or_link_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"shared")
    (tmp_path / "copy").hardlink_to(tmp_path / "file")
    (tmp_path / "link").symlink_to("copy")
    for name in ("file", "link"):
        write_atomically(tmp_path / name, memoryview(b"own"))
    assert [(tmp_path / name).read_bytes() for name in ("file", "copy", "link")] == [b"own", b"shared", b"own"]
