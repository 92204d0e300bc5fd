"""The source files of the package, each parsed once for all the rules that read them."""

import ast
from functools import cache
from pathlib import Path

SRC = Path(__file__).parents[1] / "src" / "trimaran"
FILES = sorted(SRC.rglob("*.py"))


def name_of(path: Path) -> str:
    """Return the path of a source file below the package, such as `train/trainer.py`."""
    return str(path.relative_to(SRC))


@cache
def text_of(path: Path) -> str:
    return path.read_text()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))
