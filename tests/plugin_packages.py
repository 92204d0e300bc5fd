"""Installed distributions for tests of plug-ins: the example package, built by pip, and others made of two files."""

import shutil
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "plugin"


def install_example(folder: Path) -> Path:
    """Build the example package from a copy, install it below `folder` as pip does, and return where."""
    source, site = folder / "source", folder / "site"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(site)]
    done = subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], capture_output=True,
                          text=True, timeout=300, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return site


def make_distribution(site: Path, name: str, entry_points: dict[str, dict[str, str]], *, version: str = "1.0") -> None:
    """Write the metadata of an installed distribution with these entry points by group."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = [
        f"[{group}]\n" + "".join(f"{key} = {target}\n" for key, target in points.items())
        for group, points in entry_points.items()
    ]
    (folder / "entry_points.txt").write_text("\n".join(groups))
