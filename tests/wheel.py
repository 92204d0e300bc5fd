"""`make wheel`: builds the wheel, installs it into an empty environment and trains there, away from the repository.

The environment gets the wheel and its dependencies from the package index and nothing else: what the wheel lacks, a
module, a YAML table or a template, fails here.
"""

import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="trimaran-wheel-") as folder:
        wheel = build(Path(folder) / "dist")
        missing = sources() - packed(wheel)
        assert not missing, f"the wheel lacks {sorted(missing)[:5]}"
        (away := Path(folder) / "away").mkdir()
        train(install(wheel, Path(folder) / "env"), away)
    sys.stdout.write(f"{wheel.name} installs into an empty environment and trains there\n")


def build(out: Path) -> Path:
    """Return the wheel that `python -m build` makes of the repository, by way of its source distribution."""
    run([sys.executable, "-m", "build", "--outdir", str(out), str(ROOT)], cwd=ROOT)
    (wheel,) = out.glob("*.whl")
    return wheel


def sources() -> set[str]:
    """Return every file of the package that git knows, as the wheel names it."""
    tracked = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return {line.removeprefix("src/") for line in tracked.splitlines()}


def packed(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def install(wheel: Path, folder: Path) -> Path:
    """Return the folder of programs of a new environment with `wheel` and its dependencies."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    run([python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel], cwd=folder)
    return folder / "bin"


def train(programs: Path, away: Path) -> None:
    """Plan, train two steps and write a report with the Trimaran of `programs`, in the folder `away`."""
    trimaran = programs / "trimaran"
    run([trimaran, "plan", "llama-3-8b", "--cluster", "8xH100", "--json"], cwd=away)
    run([trimaran, "train", "--set", "train.steps=2", "--set", "cluster=1xcpu", "--run-dir", "run"], cwd=away)
    assert (away / "run" / "model" / "model.safetensors").exists(), "the run left no weights"
    run([trimaran, "report", "run"], cwd=away)
    run([trimaran, "doctor", "run", "--json"], cwd=away)


def run(command: list[str | Path], *, cwd: Path) -> None:
    """Run `command` without the variables that could lead it back into this repository."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"


if __name__ == "__main__":
    main()
