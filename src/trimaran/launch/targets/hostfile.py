"""Hosts of the ssh target: `[USER@]HOST[:PORT]` in a list, or in a hostfile as Open MPI and DeepSpeed write it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trimaran.core import UserError
from trimaran.core.regular_files import read_regular_bytes

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
        raise UserError("L010", f"the hostfile cannot be read: {error.strerror}", where=str(path),
                        fix="name a file with one host on each line, or the hosts: --hosts a,b") from None  # fmt: skip
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise UserError("L010", "this is not a hostfile", where=str(path),
                        fix="write one host on each line, such as `gpu-1 slots=8`")  # fmt: skip
    lines = ((number, line.partition("#")[0].strip()) for number, line in enumerate(text.splitlines(), start=1))
    hosts = [_parse_line(line, where=f"{path}, line {number}") for number, line in lines if line]
    if not hosts:
        raise UserError("L010", "the hostfile names no host", where=str(path),
                        fix="write one host on each line, such as `gpu-1 slots=8`")  # fmt: skip
    return [host.spec for host in hosts]


def parse_host(text: str, *, where: str = "--hosts") -> SshHost:
    """Return the host that `text` names; raise UserError if it is not `[USER@]HOST[:PORT]`."""
    match = HOST.fullmatch(text)
    if match is None:
        raise UserError("L010", f"{text!r} is not a host", where=where, fix=FORM)
    port = int(match["port"] or 0)
    if match["port"] and port < LOWEST_PORT:
        raise UserError("L010", f"port {port} of '{text}' is not one of ssh", where=where,
                        fix="write the number of slots as `HOST slots=N` in a hostfile")  # fmt: skip
    if port > 65535:
        raise UserError("L010", f"'{text}' has no valid port", where=where, fix=FORM)
    host = match["bracketed"] or match["name"] or match["bare"]
    return SshHost(host=host, user=match["user"] or "", port=port, slots=int(match["slots"] or 0))


def parse_hosts(specs: Sequence[str], *, where: str = "--hosts") -> tuple[SshHost, ...]:
    """Return the hosts; raise UserError if one is not valid or is named twice."""
    hosts = tuple(parse_host(spec, where=where) for spec in specs)
    labels = [host.label for host in hosts]
    for label in labels:
        if labels.count(label) > 1:
            raise UserError("L010", f"the host '{label}' is named twice", where=where,
                            fix="name each host once; one supervisor runs all ranks of a host")  # fmt: skip
    return hosts


def _parse_line(line: str, *, where: str) -> SshHost:
    name, _, rest = line.partition(" ") if "\t" not in line else line.replace("\t", " ").partition(" ")
    if SETTING.sub("", rest).strip():
        raise UserError("L010", f"{SETTING.sub('', rest).strip()!r} is not known in a hostfile", where=where,
                        fix="write a line as `HOST`, `HOST slots=N` or `USER@HOST:PORT slots=N`")  # fmt: skip
    host, slots = parse_host(name, where=where), dict(SETTING.findall(rest)).get("slots", "")
    return SshHost(host=host.host, user=host.user, port=host.port, slots=int(slots or host.slots))
