"""Sizes past which a file, a function or a class is probably doing a second thing."""

import ast

from tests.sources import FILES, SRC, facts_of, name_of, nodes_of, text_of

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 50
MAX_CONFIG_FIELDS = 12
# Classes that every package uses: flat because people and programs read them (docs/decisions/0009). `States` are bytes
# that are added up term by term.
FLAT = {"Plan": 18, "Prediction": 21, "DataSection": 18, "Device": 14, "Calibration": 15, "CommResult": 15,
        "Decision": 13, "TelemetrySection": 15, "States": 13, "PerceptionSpec": 13, "ImageRules": 14}  # fmt: skip
MAX_LOOP_LINES = 60


def test_files_functions_and_classes_stay_small() -> None:
    wrong: list[str] = []
    for path in FILES:
        if (length := len(text_of(path).splitlines())) > MAX_FILE_LINES:
            wrong.append(f"{name_of(path)} has {length} lines")
        facts = facts_of(path)
        wrong += [f"{name_of(path)}: {name} has {length} lines" for name, length in facts.functions
                  if length > MAX_FUNCTION_LINES]  # fmt: skip
        wrong += [f"{name_of(path)}: {name} has {number} fields" for name, number in facts.classes
                  if number > FLAT.get(name, MAX_CONFIG_FIELDS)]  # fmt: skip
    assert wrong == []


def test_the_training_loop_fits_on_a_screen() -> None:
    functions = [node for node in nodes_of(SRC / "train" / "trainer.py") if isinstance(node, ast.FunctionDef)]
    (loop,) = [node for node in functions if any(iterates_over_loader(each) for each in ast.walk(node))]
    assert loop.name == "_run_steps"
    assert (loop.end_lineno or 0) - loop.lineno < MAX_LOOP_LINES


def iterates_over_loader(node: ast.AST) -> bool:
    """Return whether the node is a loop `for ... in loader`."""
    return isinstance(node, ast.For) and isinstance(node.iter, ast.Name) and node.iter.id == "loader"
