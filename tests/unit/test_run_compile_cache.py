"""The cache folder for compiled code."""

import os
from importlib.metadata import version
from pathlib import Path

import pytest

from trimaran.core import UserError
from trimaran.runs import INDUCTOR, TRITON, compile_cache, compile_folder, refuse_unusable


def test_the_folder_is_in_the_users_cache_by_version_of_torch(tmp_path: Path) -> None:
    folder = tmp_path / "trimaran" / "compile" / f"torch-{version('torch')}"
    assert compile_folder({"XDG_CACHE_HOME": str(tmp_path)}) == folder
    assert compile_cache({"XDG_CACHE_HOME": str(tmp_path)}) == {
        INDUCTOR: str(folder / "inductor"),
        TRITON: str(folder / "triton"),
    }


def test_trimaran_cache_comes_before_the_users_cache(tmp_path: Path) -> None:
    named = compile_folder({"TRIMARAN_CACHE": str(tmp_path), "XDG_CACHE_HOME": "/elsewhere"})
    assert named == tmp_path / "compile" / f"torch-{version('torch')}"


def test_variables_that_the_user_set_stay(tmp_path: Path) -> None:
    ours = {"XDG_CACHE_HOME": str(tmp_path)}
    assert compile_cache(ours | {INDUCTOR: "/mine"}) == {}, "torch puts Triton's beside its own"
    assert compile_cache(ours | {TRITON: "/mine"}).keys() == {INDUCTOR}


@pytest.mark.parametrize("name", ["TRIMARAN_CACHE", "XDG_CACHE_HOME"])
def test_without_a_writable_folder_torchs_default_stays(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    assert compile_cache({name: str(tmp_path / "file" / "cache")}) == {}


@pytest.mark.parametrize("above", ["compile", f"compile/torch-{version('torch')}/inductor"])
def test_an_unwritable_subfolder_is_detected(tmp_path: Path, above: str) -> None:
    taken = tmp_path / above
    taken.parent.mkdir(parents=True, exist_ok=True)
    taken.touch()
    assert compile_cache({"TRIMARAN_CACHE": str(tmp_path)}) == {}


def test_a_folder_that_the_user_set_is_checked_by_writing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for named in (tmp_path / "file", tmp_path / "file" / "cache", tmp_path / "link", "/proc/mine", ""):
        with pytest.raises(UserError, match=rf"A017.*{INDUCTOR} is '{named}'"):
            refuse_unusable({INDUCTOR: str(named)})
    refuse_unusable({INDUCTOR: str(tmp_path / "new" / "cache")})
    assert list((tmp_path / "new" / "cache").iterdir()) == []
    refuse_unusable({})


def test_the_triton_folder_is_checked_only_with_kernels() -> None:
    refuse_unusable({TRITON: "/proc/mine"})
    with pytest.raises(UserError, match=rf"A017.*{TRITON} is '/proc/mine'"):
        refuse_unusable({TRITON: "/proc/mine"}, kernels=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's folder")
def test_a_cache_that_any_user_can_write_to_is_not_used(tmp_path: Path) -> None:
    own, planted, shared = (tmp_path / name for name in ("own", "planted", "shared"))
    for each in (own, planted, shared):
        each.mkdir()
    own.chmod(0o1777)  # as /tmp: others can write, but cannot replace our files
    planted.chmod(0o1777)
    (planted / "compile").mkdir()
    os.chown(planted / "compile", 65501, 65501)  # another user was first
    shared.chmod(0o777)
    found = [compile_folder({"TRIMARAN_CACHE": str(each)}) is not None for each in (own, planted, shared)]
    assert found == [True, False, False]
