"""`make mutants`: random mutants of modules without torch against the unit tests; how many do the tests notice?

A mutant changes one operator, comparison, `and`, `or` or `not` of a copy of src/. The unit tests that name something of
its module run against the copy; it is killed if one of them fails, or if they take too long. The same seed chooses the
same mutants as long as the modules are the same, so that two states of the tests can be compared.
"""

import argparse
import ast
import copy
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
TORCH = re.compile(r"^\s*(import|from) (torch|transformers)\b", re.MULTILINE)
NOT_PURE = {"commands", "__main__.py", "web", "targets"}  # tests that start processes prove these
MAX_TEST_FILES = 12


@dataclass(frozen=True)
class Mutant:
    """One changed place of a module, counted in the order of `places`."""

    module: str
    place: int
    line: int
    was: str
    now: str


def places(tree: ast.Module) -> Iterator[tuple[ast.AST, str, int]]:
    """Yield the nodes that can be changed, with the field that is replaced and its index in a list."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPS:
            if not isinstance(node, ast.BinOp) or not any(_is_text(each) for each in (node.left, node.right)):
                yield node, "op", -1
        elif isinstance(node, ast.Compare):
            yield from ((node, "ops", index) for index, each in enumerate(node.ops) if type(each) in SWAPS)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node, "not", -1


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def mutate(tree: ast.Module, place: int) -> tuple[str, str, int]:
    """Change a place of the tree and return the old and the new text of its expression, and its line."""
    node, field, index = list(places(tree))[place]
    assert isinstance(node, ast.expr)
    was = ast.unparse(node)
    if field == "not":
        assert isinstance(node, ast.UnaryOp)
        inner = copy.copy(node)
        node.op, node.operand = ast.Not(), ast.UnaryOp(ast.Not(), inner.operand)
    elif index < 0:
        setattr(node, field, SWAPS[type(getattr(node, field))]())
    else:
        changed = getattr(node, field)
        changed[index] = SWAPS[type(changed[index])]()
    return was, ast.unparse(node), node.lineno


def choose(number: int, modules: int, seed: int) -> list[Mutant]:
    """Return mutants of randomly chosen modules, about equally many of each."""
    chance = random.Random(seed)
    paths = [path for path in sorted(SRC.rglob("*.py")) if not (TORCH.search(_text(path)) or NOT_PURE & {*path.parts})]
    trees = {path: ast.parse(_text(path)) for path in paths}
    paths = [path for path in paths if _count(trees[path]) >= 5]
    chosen = chance.sample(paths, modules)
    found, used = [], set[tuple[Path, int]]()
    for index in range(number):
        path = chosen[index % modules]
        place = chance.choice([each for each in range(_count(trees[path])) if (path, each) not in used])
        used.add((path, place))
        was, now, line = mutate(copy.deepcopy(trees[path]), place)
        found.append(Mutant(str(path.relative_to(SRC)), place, line, was, now))
    return found


def _count(tree: ast.Module) -> int:
    return sum(1 for _ in places(tree))


@cache
def importers() -> dict[Path, set[Path]]:
    """Return which modules of src/ import each module."""
    files = {".".join(path.relative_to(SRC).with_suffix("").parts): path for path in SRC.rglob("*.py")}
    found: dict[Path, set[Path]] = {}
    for path in files.values():
        for node in ast.walk(ast.parse(_text(path))):
            if isinstance(node, ast.ImportFrom) and node.module:
                for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                    if name in files:
                        found.setdefault(files[name], set()).add(path)
    return found


@cache
def tests_of(path: Path) -> list[Path]:
    """Return the unit tests that name the module, something that it defines, or a module that imports it.

    Those that name most come first.
    """
    above = importers().get(path, set())
    near = {path: 100, **dict.fromkeys(above, 3)} | {
        each: 1 for module in above for each in importers().get(module, set()) - above
    }
    found: dict[Path, int] = {}
    for module, weight in near.items():
        pattern = _pattern(module)
        for test in (ROOT / "tests" / "unit").glob("test_*.py"):
            if named := len(set(pattern.findall(_text(test)))) + 10 * (module.stem in test.stem):
                found[test] = found.get(test, 0) + weight * named
    return sorted(found, key=lambda test: (-found[test], test))[:MAX_TEST_FILES]


def _pattern(module: Path) -> re.Pattern[str]:
    kinds, body = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, ast.parse(_text(module)).body
    names = {node.name for node in body if isinstance(node, kinds)}
    names |= {each.id for node in body if isinstance(node, ast.Assign) for each in node.targets
              if isinstance(each, ast.Name)}  # fmt: skip
    dotted = ".".join(module.relative_to(SRC).with_suffix("").parts)
    public = [re.escape(each) for each in sorted(names) if not each.startswith("_") and each != "main"]
    return re.compile(rf"\b({'|'.join([re.escape(dotted), *public])})\b")


@cache
def _text(path: Path) -> str:
    return path.read_text()


def is_killed(mutant: Mutant, folder: Path, seconds: float) -> str:
    """Return why a mutant is noticed: the first test that fails, or the time limit. Empty if it survives."""
    path = folder / "src" / mutant.module
    original = path.read_text()
    tree = ast.parse(original)
    mutate(tree, mutant.place)
    path.write_text(ast.unparse(tree))
    tests = [str(each) for each in tests_of(SRC / mutant.module)]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not chaos"]
    environment = os.environ | {"PYTHONPATH": f"{folder / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run([*command, *tests], cwd=ROOT, env=environment, capture_output=True, text=True,
                              timeout=seconds)  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"more than {seconds:.0f} s"
    finally:
        path.write_text(original)
    if done.returncode == 0:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return failed[1] if failed else f"pytest ended with {done.returncode}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--number", type=int, default=40)
    parser.add_argument("--modules", type=int, default=20)
    parser.add_argument("--seed", type=int, default=45)
    parser.add_argument("--seconds", type=float, default=300.0, help="for the tests of one mutant")
    parser.add_argument("--json", type=Path, help="where to write the mutants and what killed them")
    parser.add_argument("--at-least", type=float, default=0.5, help="the share that must be killed")
    asked = parser.parse_args()
    killed: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="trimaran-mutants-") as name:
        shutil.copytree(SRC, Path(name) / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        for mutant in choose(asked.number, asked.modules, asked.seed):
            by = is_killed(mutant, Path(name), asked.seconds)
            killed.append({**asdict(mutant), "killed_by": by})
            change = f"{mutant.module}:{mutant.line}  {mutant.was}  ->  {mutant.now}"
            print(f"killed    {change}  by {by}" if by else f"SURVIVED  {change}", flush=True)
    share = sum(bool(each["killed_by"]) for each in killed) / len(killed)
    print(f"{share:.0%} of {len(killed)} mutants in {asked.modules} modules were killed")
    if asked.json:
        asked.json.write_text(json.dumps(killed, indent=1) + "\n")
    return 0 if share >= asked.at_least else 1


if __name__ == "__main__":
    sys.exit(main())
