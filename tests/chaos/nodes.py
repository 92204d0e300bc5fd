"""Machines as network namespaces with their own host name, pids and network, and a run on both."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from tests.chaos.wire import ALL_ADDRESSES
from tests.fault.harness import ROOT, TINY, lines, start_module, wait_for
from trimaran.core import Incident, parse_recipe
from trimaran.data import cache_folder, prepare
from trimaran.machine import parse_cluster
from trimaran.models import spec_of
from trimaran.planner import choose
from trimaran.runs import RunDirectory, create_run, read_incidents

PAUSE = 0.05  # seconds added to each step


def make_run(path: Path, *settings: str, nodes: int = 2) -> RunDirectory:
    """Create a run of one rank per node."""
    overrides = [*TINY, f"cluster={nodes}x1xcpu", *settings]
    recipe = parse_recipe("", name="test", overrides=overrides)
    prepare(recipe.data, cache=cache_folder(os.environ))
    return create_run(path, recipe, choose(recipe, spec_of(recipe.model), parse_cluster(recipe.cluster)))


class Machine:
    """The supervisor of one node, in its own network namespace if `namespace` is given.

    Flags may say `--address auto`; otherwise it has `address`. It cannot see the folder `hidden`, as if that were
    on the disk of another machine.
    """

    def __init__(self, run: RunDirectory, address: str, flags: Sequence[str], *, namespace: str = "",
                 environment: Mapping[str, str] | None = None, hidden: Path | None = None) -> None:  # fmt: skip
        self.run, self.address, self.namespace, self.flags = run, address, namespace, flags
        self.environment, self.hidden = dict(environment or {}), hidden
        self.log = run.path.parent / f"node-{address}.log" if hidden else run.path / "logs" / f"node-{address}.log"
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        named = [] if "auto" in self.flags else ["--address", self.address]
        within: list[str] = []
        if self.namespace:
            hide = f"mount -t tmpfs none {shlex.quote(str(self.hidden))}; " if self.hidden else ""
            rename = f'hostname {self.namespace}; {hide}exec "$@"'
            inner = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", rename, "_"]
            within = ["ip", "netns", "exec", self.namespace, *inner]
        plugin = {"TRIMARAN_TEST_PLUGIN": "tests.fault.plugin", "TRIMARAN_TEST_PAUSE": str(PAUSE)}
        words = ("trimaran.launch", str(self.run.path), *named, *self.flags)
        with self.log.open("ab") as log:
            return start_module(*words, output=log, environment=plugin | self.environment, within=within)

    def request_stop(self) -> None:
        """Send SIGTERM to the supervisor, which is the first process of its machine."""
        inside = next(each for each in psutil.Process(self.process.pid).children(recursive=True) if _is_first(each.pid))
        inside.terminate()

    def lose(self) -> None:
        """Kill every process of the machine at once."""
        self.process.kill()
        self.process.wait()

    def come_back(self) -> None:
        self.process = self._start()

    def incidents(self) -> list[dict[str, Any]]:
        """Return the incidents of this node, each as it was last written."""
        found = [line for path in self.run.path.glob(f"incidents-*{self.address}.jsonl") for line in lines(path)]
        return list({each["id"]: each for each in found}.values())

    def wait(self, seconds: float) -> int:
        return self.process.wait(seconds)


def _is_first(pid: int) -> bool:
    """Return whether a process is number 1 in its pid namespace."""
    status = Path(f"/proc/{pid}/status").read_text()
    return status.partition("NSpid:")[2].splitlines()[0].split()[-1:] == ["1"]


class TwoMachines:
    """Two machines, the network between them, and a run on both; everything is removed at the end of `with`.

    There may be more of them, up to four: as many as `environments`.

    `other_run`: the second machine has a run directory of its own, and neither can see that of the other.
    """

    def __init__(self, run: RunDirectory, *flags: str, wire: Sequence[str] = (),
                 environments: Sequence[Mapping[str, str]] = ({}, {}),
                 other_run: RunDirectory | None = None) -> None:  # fmt: skip
        self.run, self._other_run = run, other_run
        self._names = [f"tm{os.getpid()}{letter}" for letter in "abcd"[: len(environments)]]
        self._flags, self._wire_flags = ["--nodes", str(len(self._names)), *flags], wire
        self._environments = environments
        self.all: list[Machine] = []

    def __enter__(self) -> Self:
        for name in self._names:
            subprocess.run(["ip", "netns", "add", name], check=True)
            subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        command = [sys.executable, "-m", "tests.chaos.wire", *self._names, *self._wire_flags]
        self.wire = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        assert self.wire.stdout is not None
        assert self.wire.stdout.readline() == b"up\n"
        runs = [self.run, *[self._other_run or self.run] * (len(self._names) - 1)]
        for number, (name, address) in enumerate(zip(self._names, ALL_ADDRESSES, strict=False)):
            hidden = runs[1 - number].path.parent if self._other_run else None
            kwargs: dict[str, Any] = {"environment": self._environments[number], "hidden": hidden}
            self.all.append(Machine(runs[number], address, self._flags, namespace=name, **kwargs))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for machine in self.all:
            machine.lose()
        self.wire.kill()
        self.wire.wait()
        for name in self._names:
            subprocess.run(["ip", "netns", "delete", name], check=False)

    def toggle_wire(self) -> None:
        """Cut the network, or restore it."""
        self.wire.send_signal(signal.SIGUSR1)

    def shape_wire(self, *, delay: float = 0.0, loss: float = 0.0, rate: float = 0.0) -> None:
        """Change the network: seconds each way, fraction of packets that are lost, Mbit/s (0: no limit)."""
        assert self.wire.stdin is not None
        self.wire.stdin.write(f"{delay} {loss} {rate}\n".encode())
        self.wire.stdin.flush()

    @property
    def coordinator(self) -> Machine:
        terms = sorted(self.run.lease.glob("term-*.json"))
        address = json.loads(terms[-1].read_text())["address"].rpartition(":")[0]
        return next(each for each in self.all if each.address == address)

    @property
    def other(self) -> Machine:
        return next(each for each in self.all if each is not self.coordinator)

    @property
    def incidents(self) -> list[Incident]:
        return read_incidents(self.run)

    def step(self) -> int:
        found = lines(self.run.metrics)
        return found[-1]["step"] if found else 0

    def world_size(self) -> int:
        """Return how many ranks the newest attempt has."""
        return [each["world_size"] for each in lines(self.run.attempts) if "world_size" in each][-1]

    def wait_for_step(self, step: int, seconds: float = 120.0) -> None:
        wait_for(lambda: self.step() >= step, seconds)

    def wait_for_new_step(self, seconds: float = 40.0) -> float:
        """Return after how many seconds the run finished a new step."""
        before, began = self.step(), time.monotonic()
        wait_for(lambda: self.step() > before, seconds)
        return time.monotonic() - began
