"""What the user's warm fork server and those who use it agree on: where it is, and what must be equal to use it.

Only the standard library is imported, as a supervisor connects before it imports anything else.
"""

import fcntl
import json
import os
import resource
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimaran.core import VERSION

SOCKET, LOCK, LOG = "warm.socket", "warm.lock", "warm.log"
# Variables that nothing in a run reads when it is imported: our own, and those that describe a terminal or a login. A
# rank gets those of its own run. Every other variable must be equal.
OWN_PREFIX = "TRIMARAN_"
SESSION_VARIABLES = {
    "_", "COLUMNS", "COLORTERM", "DBUS_SESSION_BUS_ADDRESS", "DISPLAY", "EDITOR", "INVOCATION_ID", "JOURNAL_STREAM",
    "LESS", "LINES", "LS_COLORS", "MAIL", "OLDPWD", "PAGER", "PS1", "PWD", "SHLVL", "SSH_AUTH_SOCK", "SSH_CLIENT",
    "SSH_CONNECTION", "SSH_TTY", "STY", "TERM", "TERM_PROGRAM", "TERM_PROGRAM_VERSION", "TMUX", "TMUX_PANE",
    "VISUAL", "VTE_VERSION", "WINDOW", "WINDOWID", "XDG_SESSION_ID", "XDG_STATE_HOME",
}  # fmt: skip


def runtime_folder(environment: Mapping[str, str]) -> Path | None:
    """Return the user's private folder for sockets; None if there is none that only this user can use."""
    user = os.geteuid()
    base = environment.get("XDG_RUNTIME_DIR")
    folder = Path(base) / "trimaran" if base else Path(f"/tmp/trimaran-{user}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    is_private = stat.S_ISDIR(found.st_mode) and found.st_uid == user and not found.st_mode & 0o077
    return folder if is_private else None


def fingerprint(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return what must be equal in two processes for one to run what the other would: versions, environment, limits.

    `environment` is that of the process, with the variables that every fork server gets.
    """
    limits = {name: resource.getrlimit(number) for name, number in vars(resource).items() if name.startswith("RLIMIT")}
    variables = {
        name: value
        for name, value in environment.items()
        if name not in SESSION_VARIABLES and not name.startswith(OWN_PREFIX)
    }
    umask = os.umask(0o022)
    os.umask(umask)
    return {
        "trimaran": [VERSION, __file__],
        "python": [sys.version, sys.executable],
        "path": [each for each in sys.path[1:] if each],  # the first is the folder of the script, or the current one
        "user": [os.getresuid(), os.getresgid(), sorted(os.getgroups())],
        "environment": variables,
        "limits": {name: [*each] for name, each in sorted(limits.items())},
        "cores": sorted(os.sched_getaffinity(0)),
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "umask": umask,
        "cgroup": _read("/proc/self/cgroup"),
        "namespaces": {name: _link(f"/proc/self/ns/{name}") for name in ("cgroup", "ipc", "mnt", "net", "pid", "user")},
        "root": _link("/proc/self/root"),
    }


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Return what differs between two fingerprints; empty if nothing does."""
    ours, theirs = json.loads(json.dumps(ours)), json.loads(json.dumps(theirs))  # tuples become lists
    found = [name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)]
    if found == ["environment"]:
        mine, other = ours["environment"], theirs["environment"]
        return "the variables " + ", ".join(sorted(name for name in mine | other if mine.get(name) != other.get(name)))
    return ", ".join(sorted(found))


def take_lock(folder: Path) -> int | None:
    """Return a descriptor that holds the lock of the user's warm fork server; None if another process holds it."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
