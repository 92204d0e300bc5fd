"""What the rules read of the source files of the package. Each file is parsed once for all of them."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SRC = Path(__file__).parents[1] / "src" / "trimaran"
FILES = sorted(SRC.rglob("*.py"))


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """What the rules need of a file. Its tree is not kept: those of all files take half a gigabyte."""

    imports: tuple[ast.Import | ast.ImportFrom, ...]  # at any depth of the file
    classes: tuple[str, ...]
    names: frozenset[str]  # of variables, attributes, classes and functions


def name_of(path: Path) -> str:
    """Return the path of a source file below the package, such as `train/trainer.py`."""
    return str(path.relative_to(SRC))


@cache
def text_of(path: Path) -> str:
    return path.read_text()


def walk(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the node and all below it, as `ast.walk` does, in less than half the time."""
    left = [tree]
    for node in left:  # which grows meanwhile
        yield node
        for value in vars(node).values():
            if isinstance(value, list):
                left += [each for each in value if isinstance(each, ast.AST)]
            elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
                left.append(value)


def nodes_of(path: Path) -> Iterator[ast.AST]:
    return walk(ast.parse(text_of(path)))


@cache
def facts_of(path: Path) -> SourceFacts:
    imports: list[ast.Import | ast.ImportFrom] = []
    classes: list[str] = []
    names: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names.add(node.name)
            classes.append(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            imports.append(node)
    return SourceFacts(tuple(imports), tuple(classes), frozenset(names))
