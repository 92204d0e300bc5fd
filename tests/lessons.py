"""Runs the commands of the pages of docs/course, and compares what they print with what the pages show."""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import trimaran.loop.loop  # noqa: F401, imported once before ranks are forked
from tests.environment import CACHE, ROOT, environment
from tests.guide_commands import BLOCK
from tests.ranks import run_ranks
from trimaran.app import main, resolve
from trimaran.runs import RunDirectory, create_run
from trimaran.train import read_rank_info, run_worker

PAGES = ROOT / "docs" / "course"
TOLERANCE = 0.01  # of a number: the page was written on another machine
NUMBER = r"\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?"
PART = re.compile(rf"(?P<any>\.\.\.)|(?P<space>\s+)|(?P<number>{NUMBER})")
LAUNCHED = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a page, and the output that the page shows below it."""

    line: str
    shown: str


def commands(page: str) -> list[Command]:
    """Return the commands of a page in their order; its path is below docs/course."""
    found = []
    for _, body in BLOCK.findall((PAGES / page).read_text()):
        for part in re.split(r"^\$ ", re.sub(r" *\\\n *", " ", body), flags=re.MULTILINE)[1:]:
            line, _, shown = part.partition("\n")
            found.append(Command(line, shown.strip()))
    return found


def difference(shown: str, printed: str, *, tolerance: float = TOLERANCE) -> str:
    """Return how `printed` differs from what a page shows; nothing if words are equal and numbers nearly so.

    `...` stands for anything; all white space is equal.
    """
    pattern, numbers, end = "", [], 0
    for match in PART.finditer(shown):
        pattern += re.escape(shown[end : match.start()])
        pattern += {"any": r"(?s:.*?)", "space": r"\s+", "number": f"({NUMBER})"}[match.lastgroup or ""]
        numbers += [match[0]] if match.lastgroup == "number" else []
        end = match.end()
    found = re.fullmatch(pattern + re.escape(shown[end:]), printed.strip())
    if found is None:
        return f"the page shows\n{shown}\nbut the command prints\n{printed}"
    theirs, ours = ([float(each.replace(",", "")) for each in group] for group in (numbers, found.groups()))
    return "" if ours == pytest.approx(theirs, rel=tolerance) else f"the page shows\n{shown}\nand not\n{printed}"


class Student:
    """Types the commands of pages in a folder of her own, which is the current one.

    If `is_real`, every command is a new process. Otherwise scripts, and the ranks of `trimaran train`, are forked from
    this process, and other verbs run in it.
    """

    def __init__(self, folder: Path, *, is_real: bool = False) -> None:
        self.folder, self.is_real = folder, is_real
        for name in ("examples", "recipes"):
            (folder / name).symlink_to(ROOT / name)

    def check(self, page: str, *, tolerance: float = TOLERANCE) -> None:
        """Fail unless every command of the page succeeds and prints what the page shows."""
        for command in commands(page):
            wrong = self.difference(command, tolerance)
            assert not wrong, f"{page}: {command.line}\n{wrong}"

    def difference(self, command: Command, tolerance: float = TOLERANCE) -> str:
        """Return how the output of a command differs from what the page shows. Forked training shows its losses."""
        printed = self.run(command.line)
        if command.line.startswith("trimaran train ") and not self.is_real:
            losses = re.search(r"loss [\d.]+ -> [\d.]+", command.shown)
            return difference(losses[0], printed, tolerance=tolerance) if losses else ""
        return difference(command.shown, printed, tolerance=tolerance) if command.shown else ""

    def run(self, line: str) -> str:
        """Return what a command prints."""
        words = shlex.split(line)
        if self.is_real:
            return self._start(words)
        if words[0] == "trimaran":
            return self._train(words[2:]) if words[1] == "train" else run_verb(words[1:])
        assert words[0] in ("python", "torchrun"), f"tests of the course cannot run {line}"
        at = next(index for index, word in enumerate(words) if word.endswith(".py"))
        is_launched = words[0] == "torchrun"
        ranks = int(words[words.index("--nproc-per-node") + 1]) if is_launched else 1
        return "".join(run_ranks(ranks, run_script, self.folder, words[at:], is_launched))

    def _start(self, words: list[str]) -> str:
        programs = {"python": [], "torchrun": ["-m", "torch.distributed.run"], "trimaran": ["-m", "trimaran"]}
        command = [sys.executable, *programs[words[0]], *words[1:]]
        done = subprocess.run(command, cwd=self.folder, env=environment(OMP_NUM_THREADS="1"), capture_output=True,
                              text=True, timeout=300)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _train(self, words: list[str]) -> str:
        """Train as `trimaran train` would, without its supervisor, and return the line of the losses."""
        settings = [words[index + 1] for index, word in enumerate(words) if word == "--set"]
        request = resolve(words[0], settings)
        name = words[words.index("--run-dir") + 1] if "--run-dir" in words else f"runs/{request.recipe.name}"
        run = create_run(self.folder / name, request.recipe, request.plan)
        codes = run_ranks(request.plan.mesh.world_size, work, run.path, CACHE)
        assert not any(codes), run.events(0).read_text()
        losses = [json.loads(line)["loss"] for line in run.metrics.read_text().splitlines()]
        return f"loss {losses[0]:.4f} -> {losses[-1]:.4f}"


def work(path: Path, cache: Path) -> int:
    """Train as a rank of a run."""
    return run_worker(RunDirectory(path), read_rank_info(os.environ), cache=cache)


def run_verb(arguments: list[str]) -> str:
    """Return what `trimaran` prints, run in this process."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(arguments)
    assert code == 0, arguments
    return out.getvalue()


def run_script(folder: Path, words: list[str], is_launched: bool) -> str:
    """Return what a script prints on this rank; without `is_launched`, it does not know of ranks."""
    os.chdir(folder)
    for name in () if is_launched else LAUNCHED:
        os.environ.pop(name, None)
    if is_launched:
        os.environ["TORCHELASTIC_RUN_ID"] = "lesson"  # by which torch recognises a rank of torchrun
    path, out = Path(words[0]), io.StringIO()
    sys.path.insert(0, str(path.resolve().parent))
    sys.argv = words
    with contextlib.redirect_stdout(out):
        exec(compile(path.read_text(), str(path), "exec"), {"__name__": "__main__", "__file__": str(path)})
    return out.getvalue()
