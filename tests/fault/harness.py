"""A supervised run of two tiny ranks for fault tests: start it, wait for a step, inject a fault, read the incidents."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from tests import forked
from tests.environment import environment
from tests.forked import Forked
from trimaran.core import Incident, parse_recipe
from trimaran.data import cache_folder, prepare
from trimaran.launch import WARM, ask_warm
from trimaran.machine import parse_cluster
from trimaran.models import spec_of
from trimaran.planner import choose
from trimaran.runs import RunDirectory, create_run, read_incidents

ROOT = Path(__file__).parents[2]
TINY = (
    "model.shape={layers: 2, hidden: 32, heads: 4, kv_heads: 2, ffn: 64}",
    "data.seq_len=32",
    "train.global_batch=8",
    "train.sample.tokens=0",
    "train.evaluate.batches=0",
    "train.deterministic=true",
)


SECONDS = 300.0  # for whatever is waited for: no busy machine needs as long


def start_module(
    module: str,
    *arguments: str,
    output: IO[bytes] | int,
    environment: Mapping[str, str] | None = None,
    within: Sequence[str] = (),
) -> subprocess.Popen[bytes]:
    """Start `python -m module arguments`, which finds the tests, too. Fault tests start all their processes here.

    It is a new interpreter, in the namespaces and control groups of this process.

    `within` is a command that runs it, for instance in a network namespace.
    """
    command = [*within, sys.executable, "-m", module, *map(str, arguments)]
    paths = [str(ROOT), (environment or {}).get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))]
    own = {"OMP_NUM_THREADS": "1"} | dict(environment or {}) | {"PYTHONPATH": ":".join(filter(None, paths))}
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=os.environ | own)


def wait_for(condition: Callable[[], Any], seconds: float = SECONDS, *, pause: float = 0.1) -> Any:
    """Return the first true result of `condition`, which is asked every `pause` seconds; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(pause)
    return answer


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process is gone, or waits only for its parent to notice."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a journal that may still be written."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


@dataclass
class Supervised:
    """A run and its supervisor, `python -m trimaran.launch`."""

    run: RunDirectory
    process: Forked

    @classmethod
    def start(
        cls,
        path: Path,
        *settings: str,
        ranks: int = 2,
        fault: str = "",
        pause: float = 0.0,
        extra: Mapping[str, str] | None = None,
    ) -> "Supervised":
        """Create a run of `ranks` replicas at `path` and start its supervisor; see `plugin` for `fault` and `pause`.

        `extra` is added to the environment.
        """
        overrides = [*TINY, f"cluster={ranks}xcpu", f"plan.mesh.dp_replicate={ranks}", *settings]
        recipe = parse_recipe("", name="test", overrides=overrides)
        prepare(recipe.data, cache=cache_folder(os.environ))
        run = create_run(path, recipe, choose(recipe, spec_of(recipe.model), parse_cluster(recipe.cluster)))
        return cls.again(run, fault=fault, pause=pause, extra=extra)

    @classmethod
    def again(
        cls, run: RunDirectory, *, fault: str = "", pause: float = 0.0, extra: Mapping[str, str] | None = None
    ) -> "Supervised":
        """Start a supervisor for an existing run."""
        plugin = {"TRIMARAN_TEST_PLUGIN": "tests.fault.plugin", "TRIMARAN_TEST_PAUSE": str(pause)} if pause else {}
        if fault:
            plugin |= {"TRIMARAN_TEST_PLUGIN": "tests.fault.plugin", "TRIMARAN_TEST_FAULT": fault}
        own = environment(**plugin | dict(extra or {}))
        with run.agent_log.open("ab") as log:  # without the check, which takes half a second
            words = ("trimaran.launch", str(run.path), "--no-check", WARM)
            return cls(run, forked.start(*words, env=own, stdout=log, stderr=log))

    def __enter__(self) -> "Supervised":
        return self

    def __exit__(self, *_: object) -> None:
        """Leave no process behind."""
        left = self.processes()
        self.process.kill()
        self.process.wait()
        wait_for(lambda: all(map(has_ended, left)))

    @property
    def incidents(self) -> list[Incident]:
        return read_incidents(self.run)

    @property
    def faults(self) -> list[Incident]:
        """Return the incidents without slow ranks and networks, which a busy machine can cause."""
        return [each for each in self.incidents if each.cause not in ("straggler", "network")]

    def step(self) -> int:
        """Return the last step in the metrics of rank 0."""
        found = lines(self.run.metrics)
        return found[-1]["step"] if found else 0

    def wait_for_step(self, step: int, seconds: float = SECONDS) -> None:
        wait_for(lambda: self.step() >= step, seconds)

    def pid(self, rank: int) -> int:
        """Return the process of `rank` in the newest attempt."""
        starts = [each for each in lines(self.run.events(rank)) if each["kind"] == "start"]
        return starts[-1]["data"]["pid"]

    def events(self, rank: int, kind: str) -> list[dict[str, Any]]:
        return [each for each in lines(self.run.events(rank)) if each["kind"] == kind]

    def wait_for_events(self, rank: int, kind: str, number: int, seconds: float = SECONDS) -> None:
        """Return when a rank has written `number` events of a kind, over all attempts."""
        wait_for(lambda: len(self.events(rank, kind)) >= number, seconds)

    def send_signal(self, rank: int, number: signal.Signals) -> float:
        """Send a signal to a rank and return the time, in seconds since the epoch."""
        now = time.time()
        os.kill(self.pid(rank), number)
        return now

    def wait_for_fault(self, known: int, seconds: float = SECONDS) -> Incident:
        """Return the incident after the first `known` ones, once its cost is known."""

        def settled() -> Incident | None:
            found = self.faults[known:]
            return found[0] if found and ("seconds_to_recover" in found[0].cost or self._is_over(found[0])) else None

        return wait_for(settled, seconds)

    @staticmethod
    def _is_over(incident: Incident) -> bool:
        return incident.action in ("stopped", "skipped", "rewound", "continued", "saved")

    def remove_pause(self) -> None:
        """Remove the pause that is added to every step."""
        (self.run.path / "no-pause").touch()

    def attempts(self) -> int:
        return sum("world_size" in each for each in lines(self.run.attempts))

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the run below its supervisor: fork server, ranks, their loaders, sidecar."""
        found = list[psutil.Process]()
        for parent in (self.process.pid, *self._fork_servers()):
            with contextlib.suppress(psutil.NoSuchProcess):
                found += psutil.Process(parent).children(recursive=True)
        return found + [psutil.Process(each) for each in self._fork_servers()]

    def fork_server(self) -> psutil.Process:
        """Return the process that forks the ranks."""
        return psutil.Process(self._fork_servers()[0])

    def _fork_servers(self) -> list[int]:
        """Return forks of the session's warm fork server that write to this run's log."""
        found, status = list[int](), ask_warm(os.environ, {"status": True})
        for each in psutil.Process(status["pid"]).children() if status else ():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{each.pid}/fd/1").readlink() == self.run.agent_log.absolute():
                    found.append(each.pid)
        return found

    def wait(self, seconds: float = SECONDS) -> int:
        """Return the exit code of the supervisor."""
        return self.process.wait(seconds)
