"""A Slurm cluster on this machine: munged, slurmctld and a few slurmd, with a configuration in a folder of its own.

Every virtual node has an address of its own in 127.0.0.0/8. Steps of a node outlive its slurmd, as on a real one.
"""

import os
import platform
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import pytest

from tests.fault.harness import wait_for

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel")
NEEDS_SLURM = pytest.mark.skipif(
    os.geteuid() != 0 or not all(shutil.which(tool) for tool in TOOLS),
    reason="needs root and Slurm: apt-get install slurm-wlm munge",
)
NUM_NODES = 3
START_SECONDS = 30.0
# `cred_expire` is also how long a requeued job waits, 120 s by default. `SlurmdTimeout`: then a node is down. A test
# cuts a time limit to less than the lead of its signal; `OverTimeLimit`, in minutes, gives the run the rest of it.
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmctldPort={port}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,batch_sched_delay=0,sched_min_interval=0
ReturnToService=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmctldTimeout=30
SlurmdTimeout=5
OverTimeLimit=1
InactiveLimit=0
KillWait=20
MinJobAge=300
{nodes}
PartitionName=debug Nodes=n[1-{num_nodes}] Default=YES MaxTime=INFINITE State=UP
PartitionName=short Nodes=n[1-2] MaxTime=10 State=UP
"""
NODE = "NodeName=n{n} NodeHostname={host} NodeAddr=127.0.0.{n} Port={port} CPUs=2 RealMemory=1000 State=UNKNOWN"


class SlurmCluster:
    """The daemons and their configuration; `environment` has SLURM_CONF. All is ended and removed after `with`."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self._ports = _free_ports(NUM_NODES + 1)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def __enter__(self) -> Self:
        host, (port, *node_ports) = platform.node(), self._ports
        nodes = [NODE.format(n=n + 1, host=host, port=each) for n, each in enumerate(node_ports)]
        values = {"host": host, "folder": self.folder, "port": port, "num_nodes": NUM_NODES, "nodes": "\n".join(nodes)}
        (self.folder / "slurm.conf").write_text(CONFIG.format(**values))
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        files = ("socket", "key-file", "pid-file", "log-file", "seed-file")
        options = [f"--{name}={self.folder}/munge.{name.partition('-')[0]}" for name in files]
        try:
            self._start("munged", "munged", "--foreground", "--force", *options)
            wait_for((self.folder / "munge.socket").exists, START_SECONDS)
            self._start("slurmctld", "slurmctld", "-D", "-c")
            for number in range(1, NUM_NODES + 1):
                (self.folder / f"spool.n{number}").mkdir()
                self.start_slurmd(f"n{number}")
            wait_for(lambda: self.states() == ["idle"] * NUM_NODES, START_SECONDS)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = [each for root in self._processes for each in _descendants(root.pid)]
        left += [each for each in psutil.process_iter() if self._is_step(each)]
        left += [child for each in left for child in _descendants(each.pid)]
        for process in [*self._processes, *left]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        for process in self._processes:
            process.wait(10)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _is_step(self, process: psutil.Process) -> bool:
        """Return whether a process is a step manager of this cluster: it holds a file of the cluster's folder."""
        try:
            if not process.name().startswith("slurmstepd"):
                return False
            return self.environment["SLURM_CONF"] in (process.environ().get("SLURM_CONF", ""),) or any(
                str(self.folder) in each.path for each in process.open_files()
            )
        except psutil.Error:
            return False

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | self.environment)
        self._processes.append(process)
        self._daemons[name] = process

    def start_slurmd(self, node: str) -> None:
        self._start(node, "slurmd", "-D", "-N", node)

    def kill_slurmd(self, node: str) -> None:
        """Kill the daemon of a node. Its steps stay, without a report of them."""
        self._daemons[node].kill()
        self._daemons[node].wait(10)

    def restore(self) -> None:
        """Wait until no job is left, and get all nodes back into service."""
        wait_for(lambda: not self.ask("squeue", "--noheader", check=False), START_SECONDS)
        for number in range(1, NUM_NODES + 1):
            if self._daemons[f"n{number}"].poll() is not None:
                self.start_slurmd(f"n{number}")
            self.ask("scontrol", "update", f"NodeName=n{number}", "State=RESUME", check=False)
        wait_for(lambda: self.states() == ["idle"] * NUM_NODES, START_SECONDS)

    def lose_node(self, node: str) -> None:
        """Kill everything on a node at once: its daemon, its step managers and their processes."""
        steps = [each for each in psutil.process_iter() if self._is_step(each) and self._node_of(each) == node]
        assert steps, f"nothing runs on {node}"
        for step in steps:
            step.send_signal(signal.SIGSTOP)  # so that it reports nothing
        processes = [child for step in steps for child in _descendants(step.pid)]
        self.kill_slurmd(node)
        for process in [*steps, *processes]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue

    def _node_of(self, step: psutil.Process) -> str:
        return next((each for child in step.children() if (each := _variable(child, "SLURMD_NODENAME"))), "")

    def ask(self, *command: str, check: bool = True) -> str:
        """Return the output of one of Slurm's commands."""
        done = subprocess.run(
            command, env=os.environ | self.environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert not check or done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.strip()

    def states(self) -> list[str]:
        """Return the state of each node."""
        return self.ask("sinfo", "--noheader", "--Node", "--partition=debug", "--format=%t", check=False).split()

    def job(self, job_id: str) -> dict[str, str]:
        """Return the fields of a job that have no blanks in them."""
        words = self.ask("scontrol", "show", "job", "--oneliner", job_id, check=False).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_state(self, job_id: str, states: Sequence[str], seconds: float = 60.0) -> dict[str, str]:
        """Return the job's fields once it is in one of `states`."""
        began = time.monotonic()
        while (job := self.job(job_id)).get("JobState") not in states:
            assert time.monotonic() - began < seconds, (job.get("JobState"), job.get("Reason"), states)
            time.sleep(0.2)
        return job


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _variable(process: psutil.Process, name: str) -> str:
    try:
        return process.environ().get(name, "")
    except psutil.Error:
        return ""


def _free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
