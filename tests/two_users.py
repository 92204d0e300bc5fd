"""Commands as unprivileged users of this machine, for tests that root runs."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
# A Python below a folder that only root may enter is shown to this command alone: the folder is covered by an empty
# one, and Python's own folder is mounted into it again.
UNCOVER = """
set -e
if [ -n "$1" ]; then
    mount --make-rprivate /
    mkdir -p "$3"
    mount --bind "$2" "$3"
    mount -t tmpfs -o mode=755 tmpfs "$1"
    mkdir -p "$2"
    mount --bind "$3" "$2"
fi
shift 3
exec "$@"
"""


def _closed_folder(path: Path) -> str:
    """Return the highest folder above `path` that other users may not enter; empty if they may enter all."""
    return next((str(each) for each in reversed(path.parents) if not each.stat().st_mode & 0o001), "")


@dataclass(frozen=True)
class User:
    """A user without a name, with a home below `folder`."""

    uid: int
    folder: Path

    @property
    def home(self) -> Path:
        return self.folder / f"home-{self.uid}"

    def __post_init__(self) -> None:
        self.home.mkdir(mode=0o700)
        os.chown(self.home, self.uid, self.uid)

    def command(self, *words: str) -> list[str]:
        """Return `python WORDS` as this user, below `unshare`."""
        prefix = Path(sys.base_prefix)
        cover = [_closed_folder(prefix), str(prefix), str(self.folder / "python")]
        as_user = ["setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups", "--inh-caps=-all"]
        return ["unshare", "--mount", "sh", "-c", UNCOVER, "sh", *cover, *as_user, sys.executable, *words]

    @property
    def environment(self) -> dict[str, str]:
        """Return an environment with the user's own home."""
        kept = {
            name: each
            for name, each in os.environ.items()
            if not name.startswith(("TRIMARAN", "XDG", "PYTEST", "TORCH", "TRITON"))
        }
        return kept | {"HOME": str(self.home), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}

    def start(self, *words: str, cwd: Path, output: Path, **environment: str) -> subprocess.Popen[bytes]:
        """Start `trimaran WORDS` in the background."""
        command = self.command("-m", "trimaran", *words)
        with output.open("wb") as file:
            return subprocess.Popen(command, cwd=cwd, env=self.environment | environment, stdout=file, stderr=file)

    def run(self, words: Sequence[str], *, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run `trimaran WORDS` to its end."""
        return subprocess.run(self.command("-m", "trimaran", *words), cwd=cwd, env=self.environment | environment,
                              capture_output=True, text=True, check=False, timeout=300)  # fmt: skip
