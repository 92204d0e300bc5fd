"""Machines with a real sshd: network namespaces with their own pids and host name, and one to launch from."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from tests.fault.harness import ROOT

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
MISSING = "" if os.geteuid() == 0 and Path(SSHD).exists() and shutil.which("ip") else "needs root, ip and sshd"
CONFIG = """\
Port 22
ListenAddress {address}
HostKey {key}
AuthorizedKeysFile {keys}
UsePAM no
StrictModes no
PidFile none
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
"""


class SshMachines:
    """Machines `10.81.0.1` and so on with an sshd each, on one bridge; everything is removed at the end of `with`.

    `run` and `start` execute commands on a further machine, without sshd, from which runs are launched. `own_disks`:
    a folder that each machine has for itself.
    """

    def __init__(self, folder: Path, *, count: int = 2, own_disks: Path | None = None) -> None:
        self.folder, self._own_disks = folder, own_disks
        tag = f"ts{os.getpid() % 100000}"
        self._bridge, self._names = f"{tag}br", [f"{tag}{letter}" for letter in "labcdefgh"[: count + 1]]
        self.hosts = [f"10.81.0.{node + 1}" for node in range(count)]
        self.config, self.key = folder / "ssh_config", folder / "user_key"
        self._sshd: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        Path("/run/sshd").mkdir(exist_ok=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        make_key(self.key)
        shutil.copy(self.key.with_suffix(".pub"), self.folder / "authorized_keys")
        _ip(f"link add {self._bridge} type bridge")
        _ip(f"link set {self._bridge} up")
        for name, address in zip(self._names, ["10.81.0.100", *self.hosts], strict=True):
            _ip(f"netns add {name}")
            _ip(f"-n {name} link set lo up")
            _ip(f"link add {name}w type veth peer name {name}e netns {name}")
            _ip(f"link set {name}w master {self._bridge} up")
            _ip(f"-n {name} addr add {address}/24 dev {name}e")
            _ip(f"-n {name} link set {name}e up")
        for host in self.hosts:
            make_key(self.folder / f"host_key-{host}")
            self.boot(host)
        self.know_hosts()
        self.config.write_text(
            f"UserKnownHostsFile {self.folder / 'known_hosts'}\nIdentityFile {self.key}\nIdentitiesOnly yes\n"
        )
        for host in self.hosts:
            _wait_until(lambda host=host: self.ssh(host, "true").returncode == 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in list(self._sshd):
            self.lose(host)
        for name in self._names:
            subprocess.run(["ip", "netns", "delete", name], check=False)
        subprocess.run(["ip", "link", "delete", self._bridge], check=False)

    def boot(self, host: str) -> None:
        """Start a machine: its sshd is its first process."""
        name = self.namespace(host)
        config = self.folder / f"sshd_config-{host}"
        key, keys = self.folder / f"host_key-{host}", self.folder / "authorized_keys"
        config.write_text(CONFIG.format(address=host, key=key, keys=keys))
        mount = f"mount -t tmpfs none '{self._own_disks}';" if self._own_disks else ""
        script = f'hostname {name}; {mount} exec "$@"'
        inner = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", script, "_"]
        command = ["ip", "netns", "exec", name, *inner, SSHD, "-D", "-e", "-f", str(config)]
        clean = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/root")}
        with (self.folder / f"sshd-{host}.log").open("ab") as log:
            self._sshd[host] = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=clean)

    def lose(self, host: str) -> None:
        """Kill every process of a machine at once."""
        process = self._sshd.pop(host)
        process.kill()
        process.wait()

    def cut(self, host: str, *, up: bool = False) -> None:
        """Cut the network of a machine, or with `up` restore it."""
        _ip(f"link set {self.namespace(host)}w {'up' if up else 'down'}")

    def namespace(self, host: str) -> str:
        return self._names[1 + self.hosts.index(host)]

    def inside(self, host: str, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command on a machine without ssh, in its namespaces; mounts are seen by later sessions."""
        first = next(
            each for each in psutil.Process(self._sshd[host].pid).children(recursive=True) if each.name() == "sshd"
        )
        inside = ["nsenter", f"--target={first.pid}", "--mount", "--net", "--uts", "--pid", *command]
        return subprocess.run(inside, capture_output=True, text=True, check=False)

    def know_hosts(self, other: Mapping[str, str] | None = None) -> None:
        """Write the known keys of all hosts; `other` names a host whose key is expected in place of its own."""
        keys = {
            host: (self.folder / f"host_key-{(other or {}).get(host, host)}.pub").read_text() for host in self.hosts
        }
        lines = [f"{host} {' '.join(key.split()[:2])}\n" for host, key in keys.items()]
        (self.folder / "known_hosts").write_text("".join(lines))

    def ssh(self, host: str, command: str) -> subprocess.CompletedProcess[str]:
        return self.run(["ssh", "-F", str(self.config), "-o", "BatchMode=yes", host, command])

    def environment(self) -> dict[str, str]:
        state = {"XDG_STATE_HOME": str(self.folder / "state"), "XDG_CONFIG_HOME": str(self.folder / "config")}
        return os.environ | state | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

    def run(self, command: Sequence[str], seconds: float = 180.0) -> subprocess.CompletedProcess[str]:
        """Run a command on the machine that launches, and return its output."""
        inside = ["ip", "netns", "exec", self._names[0], *command]
        return subprocess.run(inside, capture_output=True, text=True, timeout=seconds, check=False,
                              env=self.environment(), stdin=subprocess.DEVNULL)  # fmt: skip

    def start(self, command: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
        """Start a command on the machine that launches, in a session of its own; its output goes to a file."""
        inside = ["ip", "netns", "exec", self._names[0], *command]
        with output.open("ab") as file:
            return subprocess.Popen(inside, stdout=file, stderr=file, stdin=subprocess.DEVNULL,
                                    env=self.environment(), start_new_session=True)  # fmt: skip

    def launch(self, run_dir: Path, *words: str, hosts: str = "", seconds: float = 180.0,
               ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Run `trimaran launch --on ssh` to its end."""
        return self.run(self.launch_command(run_dir, *words, hosts=hosts), seconds)

    def launch_command(self, run_dir: Path, *words: str, hosts: str = "") -> list[str]:
        site = [f"config_file={self.config}", "environment={OMP_NUM_THREADS: '1'}"]
        command = [sys.executable, "-m", "trimaran", "launch", "--on", "ssh", "--run-dir", str(run_dir)]
        command += ["--hosts", hosts or ",".join(self.hosts), *(f"--site={each}" for each in site)]
        return [*command, *words]


def make_key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


def _wait_until(condition: object, seconds: float = 20.0) -> None:
    assert callable(condition)
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.1)
