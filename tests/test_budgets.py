"""Sizes past which a file, a function or a class is probably doing a second thing."""

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "trimaran"
FILES = sorted(SRC.rglob("*.py"))
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 50
MAX_CONFIG_FIELDS = 12
# The two classes that every package uses: flat because people and programs read them (docs/decisions/0009).
FLAT = {"Plan": 14, "Prediction": 16, "DataSection": 14}
MAX_LOOP_LINES = 60


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_files_functions_and_classes_stay_small(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            length = (node.end_lineno or 0) - node.body[0].lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"
        if isinstance(node, ast.ClassDef):
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            assert len(fields) <= FLAT.get(node.name, MAX_CONFIG_FIELDS), f"{node.name} has {len(fields)} fields"


def test_the_training_loop_fits_on_a_screen() -> None:
    tree = ast.parse((SRC / "train" / "trainer.py").read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    (loop,) = [node for node in functions if any(iterates_over_loader(each) for each in ast.walk(node))]
    assert loop.name == "_run_steps"
    assert (loop.end_lineno or 0) - loop.lineno < MAX_LOOP_LINES


def iterates_over_loader(node: ast.AST) -> bool:
    """Return whether the node is a loop `for ... in loader`."""
    return isinstance(node, ast.For) and isinstance(node.iter, ast.Name) and node.iter.id == "loader"
