"""Closes the ports of gloo to strangers. Imports no torch.

For each process group, gloo listens on a port of each rank, and takes every connection there for as long as the group
lives: each costs a file descriptor for good, and the process aborts when none is left. Only the ranks of the group need
the port, and only until they are connected. After that, the kernel drops every packet that would open a connection.
Connections that exist are not affected, and a later group listens on a port of its own.
"""

import contextlib
import ctypes
import logging
import os
import socket
import stat
import struct
from collections.abc import Iterator

log = logging.getLogger(__name__)

SO_ATTACH_FILTER, SO_GET_FILTER, SO_DOMAIN, SO_MEMINFO = 26, 26, 39, 55  # of Linux; not in Python's socket module
MEMORY_COUNTS = struct.Struct("=9I")
DROPPED_PACKETS = 8  # index into MEMORY_COUNTS
DROP_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0)  # a classic BPF program of one instruction: return 0 bytes
LAZY_CONNECTIONS = "TORCH_GLOO_LAZY_INIT"  # torch's setting to connect ranks when they first communicate


@contextlib.contextmanager
def closed_listeners() -> Iterator[None]:
    """Close the ports that gloo opens within the block, in which process groups are created, when the block ends.

    The constructor of a group returns when its ranks are connected, unless torch connects them lazily.
    NCCL's ports, which it uses later, stay open: gloo polls its ports with epoll, NCCL does not.
    """
    before = _listening_sockets()
    yield
    if os.environ.get(LAZY_CONNECTIONS, "0") != "0":  # noqa: TID251 - torch reads it in this process too
        return
    polled = _polled_descriptors()
    for inode, fd in _listening_sockets().items():
        if inode not in before and fd in polled:
            try:
                with _socket_of(fd) as listener:
                    code = ctypes.create_string_buffer(DROP_ALL, len(DROP_ALL))
                    program = struct.pack("@HP", 1, ctypes.addressof(code))  # struct sock_fprog
                    listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
            except OSError as error:  # a sandbox may forbid it
                log.warning("a port of gloo stays open to everyone who can reach it: %s", error)


def count_refused_packets() -> int:
    """Return how many packets that would open a connection were dropped at closed ports of this process.

    A program that tries to connect sends one at once and more after 1, 3, 7 and more seconds.
    """
    total = 0
    for fd in _listening_sockets().values():
        with contextlib.suppress(OSError), _socket_of(fd) as listener:
            if listener.getsockopt(socket.SOL_SOCKET, SO_GET_FILTER, len(DROP_ALL)):
                counts = listener.getsockopt(socket.SOL_SOCKET, SO_MEMINFO, MEMORY_COUNTS.size)
                total += MEMORY_COUNTS.unpack(counts)[DROPPED_PACKETS]
    return total


@contextlib.contextmanager
def _socket_of(fd: int) -> Iterator[socket.socket]:
    """Yield a socket object for `fd`, which stays open. Its family is not that of `fd`: to ask would take longer."""
    borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=fd)
    try:
        yield borrowed
    finally:
        borrowed.detach()


def _listening_sockets() -> dict[int, int]:
    """Return the TCP sockets of this process that listen: descriptors by inode."""
    found: dict[int, int] = {}
    for fd in _descriptors():
        with contextlib.suppress(OSError):
            status = os.fstat(fd)
            if not stat.S_ISSOCK(status.st_mode):
                continue
            with _socket_of(fd) as each:
                if (
                    each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    and each.getsockopt(socket.SOL_SOCKET, SO_DOMAIN) in (socket.AF_INET, socket.AF_INET6)
                    and each.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_STREAM
                ):
                    found[status.st_ino] = fd
    return found


def _polled_descriptors() -> set[int]:
    polled: set[int] = set()
    for fd in _descriptors():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}") == "anon_inode:[eventpoll]":
                with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as lines:
                    polled |= {int(line.split()[1]) for line in lines if line.startswith("tfd:")}
    return polled


def _descriptors() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:  # not Linux, or no descriptor is left
        return []
