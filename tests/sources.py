"""What the rules read of the source files. Each file is read once for all of them, and few are parsed."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SRC = Path(__file__).parents[1] / "src" / "trimaran"
FILES = sorted(SRC.rglob("*.py"))
# `ruff format` leaves one statement on a line, so each of these begins its own.
DEFINING = re.compile(
    r"^[ \t]*(?:from[ \t]+[\w.]+[ \t]+import[ \t]+(?:\([^)]*\)|.+)|import[ \t].+|class[ \t]+\w+)", re.MULTILINE
)
LONG_STRING = re.compile("(\"\"\"|''').*?\\1", re.DOTALL)


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """What the rules need of a file."""

    imports: tuple[ast.Import | ast.ImportFrom, ...]  # at any depth of the file
    classes: tuple[str, ...]


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


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements and all that are nested in them; expressions, nine of ten nodes, are not visited."""
    for node in body:
        yield node
        for field in ("body", "orelse", "finalbody"):
            yield from statements(getattr(node, field, []))
        for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            yield from statements(part.body)


@cache
def facts_of(path: Path) -> SourceFacts:
    """Return the imports and classes of a file.

    Their lines are found without parsing the rest: to parse all files takes four seconds. A file that has such a line
    in a string is parsed.
    """
    text = text_of(path)
    found = DEFINING.findall(text)
    if len(DEFINING.findall(LONG_STRING.sub("", text))) == len(found):
        try:
            return facts_in(
                "\n".join(f"{line}: ..." if line[:5] == "class" else line for line in map(str.lstrip, found))
            )
        except SyntaxError:
            pass  # such as text after a backslash
    return facts_in(text)


def facts_in(text: str) -> SourceFacts:
    nodes = [*statements(ast.parse(text).body)]
    imports = tuple(node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))
    return SourceFacts(imports, tuple(node.name for node in nodes if isinstance(node, ast.ClassDef)))


def nodes_of(path: Path) -> Iterator[ast.AST]:
    return walk(ast.parse(text_of(path)))


@cache
def names_of(path: Path) -> frozenset[str]:
    """Return the names of variables, attributes, classes and functions of a file."""
    found = set[str]()
    for node in nodes_of(path):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
    return frozenset(found)
