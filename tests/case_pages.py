"""The commands of the case studies and what the pages show of their answers: `python -m tests.case_pages` writes it.

An answer of `plan` or `predict` is the same everywhere. What runs measure is not: it is written with --measured only.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "cases"
CASE_PAGES = sorted(FOLDER.glob("0*.md"))
COLUMNS = "100"
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MEASURED = re.compile(r"trimaran (train|rehearse) |torchrun |python examples/vit_3d\.py$")
# They build a model with torch or transformers: seconds for a figure that other tests hold, too.
SLOW = ("python examples/vit_3d.py --plan", *(f"trimaran plan recipes/case-studies/{each}" for each in ("gpt3", "vit")))
TIMING = re.compile(r"(\d+ lines in )[\d.]+ m?s")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownCommand:
    """A command of a page, without the prompt, and the lines that the page shows as its answer."""

    page: str
    command: str
    lines: tuple[str, ...]

    @property
    def is_measured(self) -> bool:
        return bool(MEASURED.match(self.command))

    @property
    def is_slow(self) -> bool:
        return self.is_measured or self.command.startswith(SLOW)


def shown_commands(page: Path) -> list[ShownCommand]:
    """Return the commands of a page's console blocks in their order; continued lines are joined."""
    found = []
    for body in BLOCK.findall(page.read_text()):
        for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
            command, *lines = re.sub(r" *\\\n *", " ", part).splitlines()
            found.append(ShownCommand(page=page.stem, command=command, lines=tuple(tidy_lines("\n".join(lines)))))
    return found


def tidy_lines(printed: str) -> list[str]:
    """Return the lines of an answer without trailing blanks, and without the time that predictions took."""
    return [TIMING.sub(r"\1N ms", line.rstrip()) for line in printed.rstrip().splitlines()]


def apply_grep(command: str, printed: str) -> tuple[str, str]:
    """Return the command before `| grep -E PATTERN`, and the lines of `printed` that it lets pass."""
    first, _, pattern = command.partition(" | grep -E ")
    kept = [line for line in printed.splitlines() if not pattern or re.search(shlex.split(pattern)[0], line)]
    return first, "\n".join(kept)


def run_in_shell(command: str, folder: Path) -> str:
    """Return what a command of a page prints, run in `folder`; the error if it prints nothing else."""
    for name in ("recipes", "examples"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    environment = os.environ | {"COLUMNS": COLUMNS, "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(folder / "state")}
    environment |= {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True)
    return done.stdout or done.stderr


def write_page(page: Path, answer: Callable[[ShownCommand], str]) -> None:
    """Replace what the page shows below each of its commands by `answer`."""
    answers = iter([answer(shown) for shown in shown_commands(page)])

    def replace(block: re.Match[str]) -> str:
        parts = re.split(r"^\$ ", block[1], flags=re.MULTILINE)[1:]
        typed = [re.match(r"(?:.*\\\n)*.*\n", part)[0] for part in parts]  # type: ignore[index]
        return "```console\n" + "".join(f"$ {each}{next(answers)}\n" for each in typed) + "```"

    page.write_text(BLOCK.sub(replace, page.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pages", nargs="*", help="such as 02-llama-13b; by default all")
    parser.add_argument("--measured", action="store_true", help="also train and rehearse, which takes minutes a page")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for page in CASE_PAGES:
            if args.pages and page.stem not in args.pages:
                continue

            def answer(shown: ShownCommand) -> str:
                if shown.is_measured and not args.measured:
                    return "\n".join(shown.lines)
                return "\n".join(line.rstrip() for line in run_in_shell(shown.command, Path(folder)).splitlines())

            write_page(page, answer)


if __name__ == "__main__":
    main()
