"""Compiled code is kept where the next start finds it, unless a person has said where."""

from importlib.metadata import version
from pathlib import Path

import pytest

from trimaran.core.compile_cache import INDUCTOR, TRITON, compile_cache, compile_folder


def test_it_lies_in_the_users_cache_by_version_of_torch(tmp_path: Path) -> None:
    folder = tmp_path / "trimaran" / "compile" / f"torch-{version('torch')}"
    assert compile_folder({"XDG_CACHE_HOME": str(tmp_path)}) == folder
    assert compile_cache({"XDG_CACHE_HOME": str(tmp_path)}) == {
        INDUCTOR: str(folder / "inductor"),
        TRITON: str(folder / "triton"),
    }


def test_our_own_cache_folder_holds_it_where_one_is_named(tmp_path: Path) -> None:
    named = compile_folder({"TRIMARAN_CACHE": str(tmp_path), "XDG_CACHE_HOME": "/elsewhere"})
    assert named == tmp_path / "compile" / f"torch-{version('torch')}"


def test_what_a_person_named_stays(tmp_path: Path) -> None:
    ours = {"XDG_CACHE_HOME": str(tmp_path)}
    assert compile_cache(ours | {INDUCTOR: "/mine"}) == {}, "torch puts Triton's beside its own"
    assert compile_cache(ours | {TRITON: "/mine"}).keys() == {INDUCTOR}


@pytest.mark.parametrize("name", ["TRIMARAN_CACHE", "XDG_CACHE_HOME"])
def test_without_a_place_to_write_to_torch_chooses(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    assert compile_cache({name: str(tmp_path / "file" / "cache")}) == {}


@pytest.mark.parametrize("above", ["compile", f"compile/torch-{version('torch')}/inductor"])
def test_a_folder_inside_that_cannot_be_written_to_is_seen_as_well(tmp_path: Path, above: str) -> None:
    taken = tmp_path / above
    taken.parent.mkdir(parents=True, exist_ok=True)
    taken.touch()
    assert compile_cache({"TRIMARAN_CACHE": str(tmp_path)}) == {}
