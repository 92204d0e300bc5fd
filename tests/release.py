"""`make release`: builds wheel and source distribution into dist/, checks both, and writes the SBOM of the wheel.

Everything is built from the commit, never from the working tree. On every Python of PYTHONS that is on this machine an
empty environment gets the wheel, then the source distribution, and trains with each. A Python that is missing, or for
which the index has no torch, is skipped with a line that says so.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
from hashlib import sha256
from pathlib import Path

from tests.wheel import ROOT, packed, run, sources, train

PYTHONS = ("3.11", "3.12", "3.13")
TOOLS = ("build", "twine", "cyclonedx-bom")
CONSTRAINTS = ["--constraint", str(ROOT / "constraints.txt")]
NEEDED = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt", "src/trimaran/__init__.py")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pythons", nargs="*", default=PYTHONS, help="versions to install and train with")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    asked = parser.parse_args()
    assert not (changed := git("status", "--porcelain")), f"commit or remove these first:\n{changed}"
    with tempfile.TemporaryDirectory(prefix="trimaran-release-") as name:
        folder = Path(name)
        tools = tool_environment(folder / "tools")
        wheel, sdist = build_both(tools, asked.out, folder)
        check_contents(wheel, sdist)
        run([tools / "twine", "check", "--strict", wheel, sdist], cwd=ROOT)
        trained = [train_on(version, wheel, sdist, folder) for version in asked.pythons]
        environments = [each for each in trained if each is not None]
        if environments:
            write_sbom(tools, environments[0], asked.out / f"{wheel.name.split('-py3')[0]}.cdx.json")
    sums = [f"{digest(path)}  {path.name}" for path in sorted(asked.out.iterdir()) if path.name != "SHA256SUMS"]
    (asked.out / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    say("\n".join(sums))
    return 0 if environments else 1


def tool_environment(folder: Path) -> Path:
    """Return the folder of programs of a new environment with what builds and checks."""
    venv.create(folder, with_pip=True)
    run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", *CONSTRAINTS, *TOOLS], cwd=ROOT)
    return folder / "bin"


def build_both(tools: Path, out: Path, folder: Path) -> tuple[Path, Path]:
    """Return the wheel, built from the source distribution, and the source distribution, both in `out`.

    The times in the wheel are that of the commit, so that a second build gives the same bytes: the wheel that is built
    from the tree itself must equal the other.
    """
    shutil.rmtree(out, ignore_errors=True)
    os.environ["SOURCE_DATE_EPOCH"] = git("log", "-1", "--format=%ct").strip()
    for name in ("tree", "again"):
        (folder / name).mkdir()
        # Files of mode 644, as pip's builds have them; git's own default is 664.
        run(["git", "-c", "tar.umask=0022", "archive", "--output", folder / f"{name}.tar", "HEAD"], cwd=ROOT)
        run(["tar", "--extract", "--file", folder / f"{name}.tar", "--directory", folder / name], cwd=ROOT)
    run([tools / "python", "-m", "build", "--outdir", out, folder / "tree"], cwd=folder)
    run([tools / "python", "-m", "build", "--wheel", "--outdir", folder / "again", folder / "again"], cwd=folder)
    (wheel,), (again,), (sdist,) = out.glob("*.whl"), (folder / "again").glob("*.whl"), out.glob("*.tar.gz")
    differ = packed(wheel) ^ packed(again)
    assert not differ, f"the wheels from the sdist and from the tree differ in {sorted(differ)[:5]}"
    assert digest(wheel) == digest(again), "the wheels from the sdist and from the tree have different bytes"
    say(f"{wheel.name}: the same {len(packed(wheel))} files, byte for byte, from the sdist and from the tree")
    return wheel, sdist


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def check_contents(wheel: Path, sdist: Path) -> None:
    """Fail if a file that git knows is missing from the wheel, or one that a build needs from the sdist."""
    assert not (missing := sources() - packed(wheel)), f"the wheel lacks {sorted(missing)[:5]}"
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    lacking = {*NEEDED, *(f"src/{each}" for each in sources())} - names
    assert not lacking, f"the sdist lacks {sorted(lacking)[:5]}"
    assert not (extra := [name for name in names if name.startswith("tests/")]), f"the sdist has {extra[:5]}"


def train_on(version: str, wheel: Path, sdist: Path, folder: Path) -> Path | None:
    """Return the environment in which both were installed and trained; None if this Python cannot be had."""
    if (python := interpreter(version)) is None:
        say(f"SKIPPED Python {version}: there is no python{version} on PATH, nor in ~/.pyenv")
        return None
    home = folder / f"python{version}"
    home.mkdir()
    run([python, "-m", "venv", home / "env"], cwd=home)
    pip = [home / "env" / "bin" / "python", "-m", "pip", "install", "--quiet", *CONSTRAINTS]
    torch = subprocess.run([*pip, "--no-deps", "torch"], cwd=home, capture_output=True, text=True)
    if torch.returncode:
        say(f"SKIPPED Python {version}: {torch.stderr.strip().splitlines()[-1]}")
        return None
    for package in (wheel, sdist):
        (away := home / package.suffix[1:]).mkdir()
        run([*pip, package], cwd=home)
        train(home / "env" / "bin", away)
        run([home / "env" / "bin" / "python", "-m", "pip", "uninstall", "--quiet", "--yes", "trimaran"], cwd=home)
    run([*pip, wheel], cwd=home)
    say(f"Python {version}: {wheel.name} and {sdist.name} install into an empty environment and train there")
    return home / "env"


def interpreter(version: str) -> Path | None:
    """Return a Python of this version: this one, one on PATH, or one of pyenv that is no link to a missing file."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return Path(sys.executable)
    kept = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    found = [*kept, *(Path(each) for each in [shutil.which(f"python{version}")] if each)]
    return next((each for each in found if _works(each, version)), None)


def _works(python: Path, version: str) -> bool:
    asked = subprocess.run([python, "--version"], capture_output=True, text=True)
    return asked.returncode == 0 and asked.stdout.startswith(f"Python {version}.")


def write_sbom(tools: Path, environment: Path, out: Path) -> None:
    """Write what the environment holds beside pip as CycloneDX 1.6, validated against its schema, with licences."""
    run([environment / "bin" / "python", "-m", "pip", "uninstall", "--quiet", "--yes", "pip"], cwd=ROOT)
    # The root is the wheel: with its version, which pyproject.toml has from the code, and without the extras.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    fields = {key: project[key] for key in ("name", "description", "license", "dependencies")}
    fields["version"] = out.name.removesuffix(".cdx.json").partition("-")[2]
    root = environment.parent / "pyproject.toml"
    root.write_text("[project]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in fields.items()))
    run([tools / "cyclonedx-py", "environment", "--pyproject", root, "--mc-type", "library", "--spec-version", "1.6",
         "--output-reproducible", "--short-PURLs", "--validate", "--output-file", out, environment / "bin" / "python"],
        cwd=ROOT)  # fmt: skip
    document = json.loads(out.read_text())
    parts = {re.sub(r"[-_.]+", "-", each["name"]).lower(): each for each in document["components"]}
    assert "torch" in parts, f"the SBOM has {len(parts)} components, and torch is none of them"
    silent = sorted(name for name, each in parts.items() if not each.get("licenses"))
    say(f"{out.name}: {len(parts)} components" + (f"; without a licence in their metadata: {silent}" if silent else ""))


def digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
