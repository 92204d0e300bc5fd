"""Cuts the network between this machine and the other nodes of a run, with routes that discard packets."""

import ipaddress
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psutil

from trimaran.app.drill.find_processes import RunProcesses, other_machine
from trimaran.core import UserError

# Removes the routes when its standard input is closed, also by the death of this process, or after the time limit.
RESTORE = 'timeout "$1" cat >/dev/null; shift; for peer; do ip route del blackhole "$peer"; done'


def find_peers(processes: RunProcesses, node: str) -> list[str]:
    """Return the addresses of the other nodes; raise unless `node` is this machine and the network can be cut here.

    They are those that the supervisor and the ranks of this machine are connected to.
    """
    here = {platform.node(), *own_addresses()}
    if node not in here:
        if node not in processes.hosts.values() and not _is_address(node):
            known = ", ".join(sorted(set(processes.hosts.values())))
            raise UserError("A001", f"'{node}' is not a node of this run", where="--cut", fix=f"name one of {known}")
        raise other_machine(processes.run, f"{node} is not this machine ({platform.node()})", node)
    peers = {
        connection.raddr.ip
        for process in (processes.supervisor, *processes.ranks.values())
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_ESTABLISHED and connection.raddr
    }
    peers = {each for each in peers if not ipaddress.ip_address(each).is_loopback} - here
    if not peers:
        raise UserError("S033", "this run has no connection to another node", where="--cut",
                        fix="cut a node of a run on several nodes")  # fmt: skip
    if os.geteuid() != 0 or not shutil.which("ip"):
        raise UserError("S033", "the network can be cut only by root, with the command `ip`", where="--cut",
                        fix="run the drill as root, and install iproute2")  # fmt: skip
    return sorted(peers)


@contextmanager
def cut_network(peers: Sequence[str], *, seconds: float) -> Iterator[None]:
    """Discard all packets to `peers`; restored at the end, after `seconds`, and if this process is killed."""
    networks = [f"{each}/{ipaddress.ip_address(each).max_prefixlen}" for each in peers]
    command = ["sh", "-c", RESTORE, "restore", f"{seconds:.0f}", *networks]
    restore = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        for network in networks:
            added = subprocess.run(["ip", "route", "add", "blackhole", network], capture_output=True, check=False)
            if added.returncode:
                raise UserError("S033", f"the network cannot be cut: {added.stderr.decode(errors='replace').strip()}",
                                where="--cut", fix="run the drill as root, with the capability NET_ADMIN")  # fmt: skip
        yield
    finally:
        restore.communicate()


def own_addresses() -> set[str]:
    return {each.address.partition("%")[0] for found in psutil.net_if_addrs().values() for each in found}


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
