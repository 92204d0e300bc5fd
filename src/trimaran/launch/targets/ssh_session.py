"""Hosts of the ssh target, and a connection to one of them with a process that answers questions; see `host_probe`.

A host is `[USER@]HOST[:PORT]` in a list, or in a hostfile as Open MPI and DeepSpeed write it.
"""

import contextlib
import json
import os
import re
import select
import shlex
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from trimaran.core import UserError, read_regular_bytes, templated
from trimaran.launch.targets import host_probe
from trimaran.launch.targets.target import NO_CONNECTION

MAX_FILE_BYTES = 1 << 20
LOWEST_PORT = 22  # MPICH writes the slots of a host as HOST:SLOTS; ssh does not listen on such low ports
FORM = "write [USER@]HOST[:PORT], an IPv6 address as [ADDRESS]:PORT"
# No part can begin with a hyphen, which ssh would read as an option, or holds what a shell would read.
HOST = re.compile(
    r"(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9_.+-]{0,63})@)?"
    r"(?:\[(?P<bracketed>[0-9A-Fa-f][0-9A-Fa-f:.]*|::[0-9A-Fa-f:.]*)\]|(?P<name>[A-Za-z0-9_][A-Za-z0-9_.-]{0,252})"
    r"|(?P<bare>[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.]*))"
    r"(?::(?P<port>\d{1,5}))?(?:=(?P<slots>\d{1,6}))?"
)
SETTING = re.compile(r"(slots|max_slots|max-slots)\s*=\s*(\d{1,6})")


@dataclass(frozen=True, slots=True, kw_only=True)
class SshHost:
    """One host: how ssh reaches it, and how many ranks it may hold. Empty and 0 mean what ssh's configuration says."""

    host: str
    user: str = ""
    port: int = 0
    slots: int = 0

    @property
    def label(self) -> str:
        """The host's name in logs and file names: letters, digits, dots, underscores and hyphens."""
        return re.sub(r"[^A-Za-z0-9._-]+", "-", f"{self.host}-{self.port}" if self.port else self.host).lstrip(".-")

    @property
    def spec(self) -> str:
        """The host as a user writes it in a list; `=SLOTS` stands for the hostfile's `slots=SLOTS`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        user, port = f"{self.user}@" if self.user else "", f":{self.port}" if self.port else ""
        return f"{user}{host}{port}" + (f"={self.slots}" if self.slots else "")

    @property
    def arguments(self) -> list[str]:
        """The arguments of ssh that name this host, up to the remote command."""
        port, user = ["-p", str(self.port)] if self.port else [], ["-l", self.user] if self.user else []
        return [*port, *user, "--", self.host]


def read_hostfile(path: Path) -> list[str]:
    """Return the hosts in a hostfile, each as `SshHost.spec`. Raises UserError if a line is not a host."""
    try:
        raw = read_regular_bytes(path, follow_links=True, limit_bytes=MAX_FILE_BYTES + 1)
        text = raw.decode("utf-8") if len(raw) <= MAX_FILE_BYTES else "\0"
    except OSError as error:
        raise UserError("L010.hostfile-cannot-read", where=str(path), reason=error.strerror) from None
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise UserError("L010.not-hostfile", where=str(path))
    lines = ((number, line.partition("#")[0].strip()) for number, line in enumerate(text.splitlines(), start=1))
    hosts = []
    for number, line in lines:
        name, _, rest = line.replace("\t", " ").partition(" ")
        if not name:
            continue
        where, unknown = templated("{path}, line {number}", path=path, number=number), SETTING.sub("", rest).strip()
        if unknown:
            raise UserError("L010.not-known-hostfile", where=where, unknown=unknown)
        host, slots = parse_host(name, where=where), dict(SETTING.findall(rest)).get("slots", "")
        hosts.append(replace(host, slots=int(slots or host.slots)))
    if not hosts:
        raise UserError("L010.hostfile-names", where=str(path))
    return [host.spec for host in hosts]


def parse_host(text: str, *, where: str = "--hosts") -> SshHost:
    """Return the host that `text` names; raise UserError if it is not `[USER@]HOST[:PORT]`."""
    match = HOST.fullmatch(text)
    if match is None:
        raise UserError("L010.not-host", where=where, text=text)
    port = int(match["port"] or 0)
    if match["port"] and port < LOWEST_PORT:
        raise UserError("L010.port-not-ssh", where=where, port=port, text=text)
    if port > 65535:
        raise UserError("L010.no-valid-port", where=where, text=text)
    host = match["bracketed"] or match["name"] or match["bare"]
    return SshHost(host=host, user=match["user"] or "", port=port, slots=int(match["slots"] or 0))


def parse_hosts(specs: Sequence[str], *, where: str = "--hosts") -> tuple[SshHost, ...]:
    """Return the hosts; raise UserError if one is not valid or is named twice."""
    hosts = tuple(parse_host(spec, where=where) for spec in specs)
    labels = [host.label for host in hosts]
    for label in labels:
        if labels.count(label) > 1:
            raise UserError("L010.host-named-twice", where=where, label=label)
    return hosts


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
        self.host = host
        self.first_answer_seconds = access.connect_seconds + START_SECONDS  # of ssh, and of Python's start
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

    def close(self) -> None:
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
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return UserError("L026.did-not-answer", where=self.host.spec, host=self.host.label, address=self.host.host)
        self._stderr.seek(0)
        said = self._stderr.read().decode(errors="replace").strip()
        if code == NO_CONNECTION:
            return connection_error(self.host, said)
        last = said.splitlines()[-1] if said else f"exit code {code}"
        return UserError("L027.python-not-run", where=self.host.spec, host=self.host.label, last=last)


def connection_error(host: SshHost, said: str) -> UserError:
    """Return the error for what ssh said before it gave up."""
    for words, what, fix in SSH_ERRORS:
        if words in said.casefold():
            named = host.host if not host.port else f"-p {host.port} {host.host}"
            if words.startswith("remote") and host.port:
                named = shlex.quote(f"[{host.host}]:{host.port}")
            return UserError(
                "L026.cannot-be-reached", where=host.spec, fix=fix.format(host=named), host=host.label, text=what
            )
    last = said.splitlines()[-1] if said else "ssh gave no reason"
    return UserError("L026.cannot-reached", where=host.spec, host=host.label, last=last, address=host.host)
