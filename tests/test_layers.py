"""The layer map: which package may import which, which may start which as a command, and which work without torch."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from tests.sources import FILES, SRC, facts_of, name_of, text_of, walk

FREE = {"core", "machine", "models", "cost", "planner", "runs"}  # plan, and read a run: without torch
WORKER = {"nets", "parallel", "data", "checkpoint"}
BELOW_APP = {*FREE, *WORKER, "train", "launch", "doctor", "autopilot"}
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "machine": {"core"},
    "models": {"core"},
    "runs": {"core", "machine"},
    "cost": {"core", "machine", "models"},
    "planner": {"core", "machine", "models", "cost", "runs"},
    "nets": {"core", "models"},
    "parallel": {"core", "models", "runs", "nets"},
    "data": {"core", "runs"},
    "checkpoint": {"core", "machine", "models", "runs", "nets", "parallel"},
    "launch": FREE,
    "doctor": FREE,
    "train": {*FREE, *WORKER},
    "autopilot": {*FREE, "launch", "doctor"},
    "loop": {"core", "runs", *WORKER, "train"},
    "app": BELOW_APP,
    "serve": {*BELOW_APP, "app"},
    "ui": {*BELOW_APP, "app", "serve"},
}
FLOORS = 9
# Which package may start which as a command, `python -m trimaran.x.y`. Commands separate what imports must not join:
# the supervisor and its ranks, the doctor and a probe that may crash.
MAY_START: dict[str, set[str]] = {
    "launch": {"launch", "train", "doctor", "runs", "autopilot", "app"},  # app: torchrun, in a script it writes
    "machine": {"machine"},  # a probe may crash
    "checkpoint": {"checkpoint"},  # the process that talks to an object store, beside a training loop
    "serve": {"serve", "app"},  # the processes of an engine, which the server starts again when they die; vLLM's files
    "planner": {"train"},  # one rank of a rehearsal, which may run out of memory
    "ui": {"app"},  # tools for assistants are commands
    "app": {"machine", "train", "app"},  # train: what it can do with a model; app: the torchrun command that it prints
}
TORCH_FREE = {*FREE, "launch", "doctor", "autopilot"}
TORCH_ALLOWED = ("models/from_module.py", "machine/probe/")  # walks a live nn.Module; commands that measure
MODULES_OF_TESTS = 120  # 743 before packages had stubs
PACKAGED = [path for path in FILES if path.parent != SRC]
MODULE = re.compile(r"\btrimaran(?:\.[a-z_]\w*)*")
IMPORT = re.compile(r"^ *(?:from|import) trimaran[\w.]*", re.MULTILINE)


def imported(path: Path) -> Iterator[str]:
    """Yield every module that `path` imports, at any depth of the file, as a dotted name."""
    package = ("trimaran", *path.relative_to(SRC).parts[:-1])
    for node in facts_of(path).imports:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            above = package[: len(package) - node.level + 1] if node.level else ()
            stem = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{stem}.{alias.name}" for alias in node.names)


def started(tree: ast.Module) -> set[str]:
    """Return every module that a source file names as a command.

    These are the strings that follow `-m` in a list of arguments or in a text, and all others that name a module which
    can be run. Docstrings, and the names that argument parsers give to their own program, do not count.
    """
    nodes = list(walk(tree))
    texts = {id(node): node.value for node in nodes if isinstance(node, ast.Constant) and type(node.value) is str}
    for node in nodes:
        if isinstance(node, ast.Expr):
            texts.pop(id(node.value), None)
        if isinstance(node, ast.keyword) and node.arg == "prog":
            texts.pop(id(node.value), None)
    modules = {name for text in texts.values() for name in MODULE.findall(text) if is_runnable(name)}
    modules |= {name for text in texts.values() for name in re.findall(r"-m (trimaran[\w.]*)", text)}
    for node in nodes:
        arguments = (
            node.elts if isinstance(node, ast.List | ast.Tuple) else node.args if isinstance(node, ast.Call) else []
        )
        for flag, module in pairwise(arguments):
            if isinstance(flag, ast.Constant) and flag.value == "-m":
                modules |= {name for each in walk(module) for name in MODULE.findall(texts.get(id(each), ""))}
    return modules


@cache
def is_runnable(name: str) -> bool:
    """Return whether `name` is a module that `python -m` runs: one with a main guard, below the package itself."""
    path = SRC.joinpath(*name.split(".")[1:])
    path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    return "." in name and path.is_file() and 'if __name__ == "__main__":' in text_of(path)


@cache
def commands_of(path: Path) -> set[str]:
    named = IMPORT.sub("", text_of(path))  # most files only import modules
    is_named = '"-m"' in named or "-m trimaran" in named or any(map(is_runnable, MODULE.findall(named)))
    return started(ast.parse(text_of(path))) if is_named else set()


def package_of(module: str) -> str:
    """Return the package of a module; the command `trimaran` itself is that of `app`."""
    return module.split(".")[1] if "." in module else "app"


def test_imports_point_down() -> None:
    wrong: list[str] = []
    for path in PACKAGED:
        package, names = path.relative_to(SRC).parts[0], list(imported(path))
        packages = {name.split(".")[1] for name in names if name.startswith("trimaran.")} & MAY_IMPORT.keys()
        if above := packages - MAY_IMPORT[package] - {package}:
            wrong.append(f"{name_of(path)}: {package} may not import {sorted(above)}")
        torch_free = package in TORCH_FREE and not name_of(path).startswith(TORCH_ALLOWED)
        if torch_free and any(name.split(".")[0] == "torch" for name in names):
            wrong.append(f"{name_of(path)}: {package} must not import torch")
    assert wrong == []


def test_commands_are_on_the_map() -> None:
    wrong: list[str] = []
    for path in PACKAGED:
        package, modules = path.relative_to(SRC).parts[0], commands_of(path)
        if not {package_of(module) for module in modules} <= MAY_START.get(package, set()):
            wrong.append(f"{name_of(path)}: {package} may not start {sorted(modules)}")
    assert wrong == []


def test_every_entry_of_the_map_of_commands_is_used() -> None:
    used: dict[str, set[str]] = {}
    for path in PACKAGED:
        if modules := commands_of(path):
            used.setdefault(path.relative_to(SRC).parts[0], set()).update(map(package_of, modules))
    assert used == MAY_START


@pytest.mark.parametrize(
    ("source", "modules"),
    [
        ('run([sys.executable, "-m", "trimaran.train", path])', {"trimaran.train"}),
        ('run(sys.executable, "-m", f"trimaran.app.{name}")', {"trimaran.app"}),
        ('COMMAND = "python -m trimaran.app.main RUN"', {"trimaran.app.main"}),
        (
            'MODULE = "trimaran.machine.probe.calibrate"\nrun(["python", "-m", MODULE])',
            {"trimaran.machine.probe.calibrate"},
        ),
        ('run(["torchrun", "-m", "trimaran", "train"])', {"trimaran"}),
        ('"""`python -m trimaran.launch RUN`."""\nParser(prog="python -m trimaran.launch")', set()),
        ('import_module("trimaran.runs.sinks.ecs"); span = {"trimaran.runs": 1}', set()),
    ],
)
def test_commands_are_found_however_they_are_written(source: str, modules: set[str]) -> None:
    assert started(ast.parse(source)) == modules


@pytest.mark.parametrize(
    ("source", "imports"),
    [
        (
            "import os, sys\nclass A:\n    from .core import Plan as P",
            ["import os, sys", "from .core import Plan as P"],
        ),
        ("def f():\n    from run import (\n        a,\n        b,\n    )\n    return a", ["from run import a, b"]),
        ("from run import (\n    a,  # (once)\n    b,\n)", ["from run import a, b"]),
        ("from run import \\\n    a", ["from run import a"]),
        ('"""Text.\n\nimport torch\n"""\nimport yaml', ["import yaml"]),
        ('QUOTES = \'"""\'\nimport yaml\nTEXT = """text"""', ["import yaml"]),
    ],
)
def test_imports_are_found_however_they_are_written(source: str, imports: list[str], tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(source)
    assert [ast.unparse(node) for node in facts_of(path).imports] == imports


def test_the_map_has_no_loops_and_few_floors() -> None:
    floors: list[set[str]] = []
    while left := MAY_IMPORT.keys() - set[str]().union(*floors):
        floors.append({package for package in left if not MAY_IMPORT[package] & left})
        assert floors[-1], f"loop in {left}"
    assert len(floors) <= FLOORS


def folder_of(module: str) -> str:
    """Return the folder of a module inside its package, such as `train/steppers`; "" if it is in none."""
    parts = module.split(".")[1:3]
    return "/".join(parts) if len(parts) == 2 and SRC.joinpath(*parts).is_dir() else ""


def reached_from(folder: str, imports: dict[str, set[str]]) -> set[str]:
    found, left = set[str](), [folder]
    while left:
        new = imports.get(left.pop(), set()) - found
        found |= new
        left += new
    return found


def test_folders_inside_a_package_form_no_circle() -> None:
    imports: dict[str, set[str]] = {}
    for path in PACKAGED:
        if here := folder_of(".".join(("trimaran", *path.relative_to(SRC).parts[:2]))):
            below = {folder_of(name) for name in imported(path) if name.startswith("trimaran.")}
            same_package = {each for each in below if each.split("/")[0] == here.split("/")[0]}
            imports.setdefault(here, set()).update(same_package - {here})
    reached = {folder: reached_from(folder, imports) for folder in imports}
    circles = {frozenset(each for each in reached[folder] if folder in reached.get(each, ())) for folder in imports}
    assert circles <= {frozenset()}


def test_every_package_is_on_the_map() -> None:
    assert {path.relative_to(SRC).parts[0] for path in PACKAGED} <= MAY_IMPORT.keys()


def test_tests_import_packages_and_few_modules() -> None:
    """A module that tests import by its path cannot move without them; its public name belongs in a stub."""
    by_path = set[str]()
    for path in Path(__file__).parent.rglob("*.py"):
        for node in facts_of(path).imports:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trimaran."):
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                modules = {name for name in names if SRC.joinpath(*name.split(".")[1:]).with_suffix(".py").is_file()}
                stubbed = SRC.joinpath(*str(node.module).split(".")[1:], "__init__.pyi").is_file()
                by_path |= modules if stubbed else {str(node.module)}
    assert len(by_path) <= MODULES_OF_TESTS, sorted(by_path)
