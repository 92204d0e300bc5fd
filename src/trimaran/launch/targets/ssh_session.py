"""A connection to one host of the ssh target, with a process that answers questions; see `host_probe`."""

import contextlib
import json
import os
import select
import shlex
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from trimaran.core import UserError
from trimaran.launch.targets import host_probe
from trimaran.launch.targets.hostfile import SshHost
from trimaran.launch.targets.script_text import NO_CONNECTION

START_SECONDS = 60.0  # for Python to start and to read its packages from a cold network disk
ANSWER_SECONDS = 60.0
END_SECONDS = 5.0
# The first line of stdin is the probe. `__name__` tells it that it runs as one.
LOADER = "import json,sys;exec(compile(json.loads(sys.stdin.readline()),'host_probe','exec'),{'__name__':'__probe__'})"
# What ssh says, in lower case: what that means, and what to do. The first that matches counts.
SSH_ERRORS = (
    ("remote host identification has changed", "its key is not the one that is known here",
     "make sure that this is the same machine, then remove the old key: ssh-keygen -R {host}"),
    ("host key verification failed", "its key is not known here",
     "connect once by hand, `ssh {host}`, and compare the key's fingerprint with the one its owner tells you"),
    ("permission denied", "it refuses the login",
     "copy your public key there: ssh-copy-id {host}; or load your key: ssh-add"),
    ("could not resolve hostname", "its name is unknown", "correct the name, or use its address"),
    ("connection refused", "no sshd listens there", "start sshd there, or name its port: HOST:PORT"),
    ("timed out", "it does not answer", "check that it is up and that its port is open: ssh -v {host}"),
    ("no route to host", "there is no route to it", "check that it is up, and your network: ping {host}"),
    ("network is unreachable", "there is no route to it", "check your network: ip route get {host}"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SshAccess:
    """How hosts are reached: the ssh command without the host, and the words that start Python there."""

    ssh: Sequence[str]
    python: Sequence[str]
    connect_seconds: float


class HostSession:
    """A process on a host that answers questions, until `close`."""

    def __init__(self, access: SshAccess, host: SshHost) -> None:
        self.host, self._access = host, access
        self._stderr, self._left = TemporaryFile(), b""  # noqa: SIM115 - `close` closes it
        remote = shlex.join([*access.python, "-c", LOADER])
        self._process = subprocess.Popen(
            [*access.ssh, *host.arguments, remote],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,  # Ctrl-C ends the check, and `close` the process
        )
        self._send(json.dumps(Path(host_probe.__file__).read_text(encoding="utf-8")))

    def ask(self, do: str, *, within: float = ANSWER_SECONDS, **question: Any) -> dict[str, Any]:
        """Return the answer to a question. Raises UserError if the host cannot be reached, or cannot run Python."""
        self._send(json.dumps({"do": do, **question}))
        line = self._line(time.monotonic() + within)
        if line is None:
            raise self._lost()
        return json.loads(line)

    def first_facts(self, folder: str) -> dict[str, Any]:
        """Return the answer to the first question, which takes as long as the connection and Python's start."""
        return self.ask("facts", within=self._access.connect_seconds + START_SECONDS, folder=folder)

    def close(self) -> None:
        """End the process and the connection."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):  # what was not yet sent to a host that is gone
            self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._stderr.close()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the answer will not come, and then the reason is reported
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def _line(self, until: float) -> str | None:
        """Return the next answer; None if the connection has ended or there was none in time."""
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while True:
            while b"\n" in self._left:
                line, _, self._left = self._left.partition(b"\n")
                if line.startswith(host_probe.MARK.encode()):
                    return line[len(host_probe.MARK) :].decode(errors="replace")
            ready, _, _ = select.select([pipe], [], [], max(0.0, until - time.monotonic()))
            data = os.read(pipe, 1 << 16) if ready else b""
            if not data:
                return None
            self._left += data

    def _lost(self) -> UserError:
        """Return why there is no answer."""
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return UserError("L026", f"{self.host.label} did not answer in time", where=self.host.spec,
                             fix=f"look at its load and disks: ssh {self.host.host} uptime")  # fmt: skip
        self._stderr.seek(0)
        said = self._stderr.read().decode(errors="replace").strip()
        if code == NO_CONNECTION:
            return connection_error(self.host, said)
        last = said.splitlines()[-1] if said else f"exit code {code}"
        return UserError("L027", f"Python does not run on {self.host.label}: {last}", where=self.host.spec,
                         fix="name the Python that has Trimaran there: --site python=/path/to/python")  # fmt: skip


def connection_error(host: SshHost, said: str) -> UserError:
    """Return the error for what ssh said before it gave up."""
    for words, what, fix in SSH_ERRORS:
        if words in said.casefold():
            named = host.host if not host.port else f"-p {host.port} {host.host}"
            if words.startswith("remote") and host.port:
                named = shlex.quote(f"[{host.host}]:{host.port}")
            return UserError("L026", f"{host.label} cannot be reached: {what}", where=host.spec,
                             fix=fix.format(host=named))  # fmt: skip
    last = said.splitlines()[-1] if said else "ssh gave no reason"
    return UserError("L026", f"{host.label} cannot be reached: {last}", where=host.spec,
                     fix=f"see why: ssh -v {host.host}")  # fmt: skip
