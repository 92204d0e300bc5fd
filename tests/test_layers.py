"""The map of the house: which room may import which, and which live without torch."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PLANNING = {"core", "hardware", "models", "cost", "planner"}
RUN = {"run", "telemetry"}
WORKER = {"nets", "parallel", "data", "checkpoint", "optim", "infer", "train"}
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "hardware": {"core"},
    "models": {"core"},
    "cost": {"core", "hardware", "models"},
    "planner": {"core", "hardware", "models", "cost"},
    "run": {"core"},
    "telemetry": {"core", "run"},
    "nets": {"core", "models"},
    "parallel": {"core", "models", "run", "nets"},
    "data": {"core", "run"},
    "checkpoint": {"core", "models", "run", "nets", "parallel"},
    "optim": {"core", "models", "nets", "parallel", "checkpoint"},
    "infer": {"core", "models", "run", "nets", "parallel", "data"},
    "train": {"core", "models", "cost", *RUN, *WORKER} - {"train"},
    "loop": {"core", "run", *WORKER},
    "probe": {"core"},
    "launch": {*PLANNING, *RUN},
    "doctor": {*PLANNING, *RUN},
    "app": {*PLANNING, *RUN, *WORKER, "loop", "launch", "doctor"},
}
TORCH_FREE = {*PLANNING, *RUN, "launch", "doctor"}
TORCH_ALLOWED = {"models/from_module.py"}  # walks a live nn.Module
SRC = Path(__file__).parents[1] / "src" / "trimaran"
FILES = sorted(SRC.glob("*/**/*.py"))


def imported(path: Path) -> Iterator[str]:
    """Every module that `path` imports, at any depth of the file, as a dotted name."""
    package = ("trimaran", *path.relative_to(SRC).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            stem = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{stem}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_imports_point_down(path: Path) -> None:
    room = path.relative_to(SRC).parts[0]
    names = list(imported(path))
    rooms = {name.split(".")[1] for name in names if name.startswith("trimaran.")} & MAY_IMPORT.keys() - {room}
    assert rooms <= MAY_IMPORT[room], f"{room} may not import {sorted(rooms - MAY_IMPORT[room])}"
    if room in TORCH_FREE and str(path.relative_to(SRC)) not in TORCH_ALLOWED:
        assert not any(name.split(".")[0] == "torch" for name in names), f"{room} is a room without torch"


def test_the_map_has_no_loops() -> None:
    order: list[str] = []
    while left := MAY_IMPORT.keys() - order:
        ready = [room for room in sorted(left) if MAY_IMPORT[room] <= set(order)]
        assert ready, f"loop in {left}"
        order += ready


def test_every_room_is_on_the_map() -> None:
    assert {path.relative_to(SRC).parts[0] for path in FILES} <= MAY_IMPORT.keys()
