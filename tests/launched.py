"""A launched job as a user drives it: commands, secrets in the environment, and where they appear."""

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from tests import forked
from tests.environment import environment
from tests.fault.harness import TINY, lines, wait_for
from trimaran.app import JOB_TARGETS
from trimaran.runs import RunDirectory

STEPS = 24
PAUSE_SECONDS = 6  # of each step until the job was stopped: commands are slow on a busy machine
SETTINGS = (*TINY, "cluster=2x1xcpu", f"train.steps={STEPS}", "checkpoint.every=5", "faults.hang_seconds=120")
SECRETS = {"HF_TOKEN": "hf_canary_7d1f0c", "WANDB_API_KEY": "canary5e2a91wandb"}
SAMPLE_SECONDS = 0.25
Call = Callable[[Sequence[str]], subprocess.CompletedProcess[str]]


def digest(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()[:16]


def secret_digests() -> dict[str, str]:
    return {name: digest(value) for name, value in SECRETS.items()}


class CommandLine:
    """The commands of a user in `folder`, with an own record of jobs; `call` may run them on another machine."""

    def __init__(self, folder: Path, variables: dict[str, str] | None = None, *, call: Call | None = None) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self._call = folder, call or self._run
        ours = {"XDG_STATE_HOME": str(folder / "state"), "XDG_CONFIG_HOME": str(folder / "config")}
        self.environment = environment(**ours | (variables or {}))

    def _run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        _, _, module, *words = command
        return forked.run(module, *words, cwd=self.folder, env=self.environment, timeout=400)

    def trimaran(self, *words: str, code: int = 0) -> str:
        """Return what a command prints; fail if its exit code is another one."""
        done = self._call([sys.executable, "-m", "trimaran", *words])
        said = f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
        assert done.returncode == code, said
        assert not found_in(said.encode()), "a secret was printed"
        return done.stdout

    def json(self, *words: str, code: int = 0) -> Any:
        return json.loads(self.trimaran(*words, "--json", code=code))

    def launch(self, target: str, *words: str) -> dict[str, Any]:
        """Launch the small run; return the job."""
        return self.json("launch", "--on", target, *(f"--set={each}" for each in SETTINGS), *words)


def found_in(data: bytes) -> list[str]:
    """Return the secrets whose value is in `data`."""
    return [name for name, value in SECRETS.items() if value.encode() in data]


def files_with_secrets(*folders: Path) -> list[tuple[Path, list[str]]]:
    """Return the files below `folders` that contain the value of a secret."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 10, "there is nothing to look at"
    return [(path, found) for path in files if (found := found_in(path.read_bytes()))]


class CommandLines:
    """Looks at the command lines of all processes of this machine, in all namespaces, until the end of `with`."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    line = path.read_bytes()
                except OSError:
                    continue
                if found_in(line):
                    self.found.add(line.replace(b"\0", b" ").decode(errors="replace"))


def kill_processes(folder: Path) -> None:
    """Kill what a failed test has left: processes whose command line has its folder."""
    for each in psutil.process_iter():
        try:
            if str(folder) in " ".join(each.cmdline()):
                each.kill()
        except psutil.Error:
            continue


def last_step(run: RunDirectory) -> int:
    found = lines(run.metrics)
    return found[-1]["step"] if found else 0


def assert_answers(line: CommandLine, run: RunDirectory) -> None:
    """Fail unless the commands about a run answer on this one as on a local run."""
    path = str(run.path)
    shown = line.json("watch", path)
    assert (shown["status"], shown["total_steps"]) == ("training", STEPS)
    slow_machine = ("straggler", "network")  # a busy machine may have these
    assert [each for each in line.json("incidents", path) if each["cause"] not in slow_machine] == []
    assert line.json("doctor", path)["step"] >= 3
    line.trimaran("report", path)
    assert (run.path / "report.html").stat().st_size > 10_000


def stop_and_resume(line: CommandLine, job: dict[str, Any], run: RunDirectory) -> dict[str, Any]:
    """Look at a running job, stop it and resume it through the command; return the resumed job."""
    wait_for(lambda: last_step(run) >= 3, 120)
    (row,) = [each for each in line.trimaran("jobs").splitlines() if each.startswith(f"{job['id']} ")]
    assert "  running" in row, row
    assert_answers(line, run)
    if job["target"] in JOB_TARGETS:
        assert line.json("jobs", job["id"], "--resume", code=2)["error"]["code"] == "L016"
    line.trimaran("jobs", job["id"], "--stop")
    line.trimaran("jobs", job["id"], "--wait", code=75)
    reached = last_step(run)
    assert 3 <= reached < STEPS
    assert line.json("jobs", job["id"])["state"]["state"] == "stopped"
    (run.path / "no-pause").touch()
    again = line.json("jobs", job["id"], "--resume", "--wait")
    assert (again["exit"], again["state"]["state"]) == (0, "done")
    listed = line.json("jobs")["jobs"]
    assert listed[0]["id"] == again["id"]
    resumes = [each["data"]["from_step"] for each in lines(run.events(0)) if each["kind"] == "resume"]
    assert resumes == [reached], "no step was lost"
    return again
