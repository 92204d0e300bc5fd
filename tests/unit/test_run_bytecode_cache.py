"""Bytecode goes to our cache only if the installed torch has none and Python would write none."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, sys
from trimaran.runs.compile_cache import use_bytecode_cache
print(use_bytecode_cache(os.environ), sys.pycache_prefix)
import torch.inner
"""


def install(folder: Path) -> Path:
    """Write a package of the name `torch` without bytecode, and return its folder."""
    package = folder / "site" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text("")
    return package


def run(folder: Path, **environment: str) -> tuple[str, list[Path]]:
    """Return what the script prints, and the bytecode in our cache."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    paths = {
        "PYTHONPATH": f"{folder / 'site'}:{Path(__file__).parents[2] / 'src'}",
        "TRIMARAN_CACHE": str(folder / "c"),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=outer | paths | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), [*(folder / "c").rglob("inner*.pyc")]


def test_where_python_writes_no_bytecode_it_goes_to_our_cache(tmp_path: Path) -> None:
    package = install(tmp_path)
    printed, cached = run(tmp_path, PYTHONDONTWRITEBYTECODE="1")
    assert printed == f"True {tmp_path / 'c' / 'bytecode'}"
    assert len(cached) == 1
    assert not (package / "__pycache__").exists()


def test_where_python_writes_it_nothing_changes(tmp_path: Path) -> None:
    package = install(tmp_path)
    assert run(tmp_path) == ("False None", [])
    assert [*package.glob("__pycache__/inner*.pyc")]
    # Now torch has bytecode, which a process that may not write any still reads.
    assert run(tmp_path, PYTHONDONTWRITEBYTECODE="1") == ("False None", [])


def test_a_prefix_of_the_user_and_a_cache_that_cannot_be_written_are_left_alone(tmp_path: Path) -> None:
    install(tmp_path)
    mine = str(tmp_path / "mine")
    assert run(tmp_path, PYTHONDONTWRITEBYTECODE="1", PYTHONPYCACHEPREFIX=mine) == (f"False {mine}", [])
    (tmp_path / "c").write_text("a file")
    assert run(tmp_path, PYTHONDONTWRITEBYTECODE="1")[0] == "False None"
