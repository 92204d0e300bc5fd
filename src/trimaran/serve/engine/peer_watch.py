"""Ends this process when another rank has exited: a collective that waits for it would wait for minutes.

Every rank keeps a connection to rank 0. The kernel closes it when a process dies, however it dies, so the others know
at once, also while they wait inside a collective or have nothing to do. A rank whose connection stays open but says
nothing for long is frozen, or cut off from the network.
"""

import contextlib
import hmac
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable

from torch.distributed import Store

RANK_LOST_EXIT = 74
BEAT_SECONDS = 1.0
MAX_SILENT_SECONDS = 120.0
ADDRESS_KEY = "peer-watch"
BEAT, GOODBYE = b".", b"x"
HELLO_SECONDS = 10.0  # until a connection has said who it is
GOODBYE_SECONDS = 2.0  # until the other end has closed it, too

log = logging.getLogger(__name__)


class PeerWatch:
    """The connections of this rank: to all others on rank 0, to rank 0 on the others. `lost` is called with a rank."""

    def __init__(
        self,
        peers: dict[socket.socket, int],
        *,
        lost: Callable[[int, str], None] | None = None,
        max_silent: float = MAX_SILENT_SECONDS,
    ) -> None:
        self._lost, self._max_silent = lost or end_process, max_silent
        now = time.monotonic()
        self._peers, self._heard = peers, dict.fromkeys(peers, now)
        self._selector, self._closed = selectors.DefaultSelector(), threading.Event()
        for peer in peers:
            peer.setblocking(False)
            self._selector.register(peer, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._watch, name="peer-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Say goodbye: from now on the end of this process, and of the others, is no fault."""
        self._closed.set()
        self._thread.join()
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.send(GOODBYE)
                peer.shutdown(socket.SHUT_WR)
        for peer in self._peers:  # closing a connection with unread bytes would discard our goodbye
            peer.settimeout(GOODBYE_SECONDS)
            with contextlib.suppress(OSError):
                while peer.recv(4096):
                    pass
            peer.close()
        self._selector.close()

    def _watch(self) -> None:
        due = 0.0
        while not self._closed.is_set() and self._selector.get_map():
            for key, _ in self._selector.select(timeout=BEAT_SECONDS / 4):
                assert isinstance(key.fileobj, socket.socket)
                self._hear(key.fileobj)
            if (now := time.monotonic()) < due:
                continue
            due = now + BEAT_SECONDS
            for key in list(self._selector.get_map().values()):
                peer = key.fileobj
                assert isinstance(peer, socket.socket)
                with contextlib.suppress(OSError):  # a full buffer, or an end that `_hear` reads
                    peer.send(BEAT)
                if now - self._heard[peer] > self._max_silent:
                    self._selector.unregister(peer)
                    self._report(self._peers[peer], f"it said nothing for {self._max_silent:.0f} s")

    def _hear(self, peer: socket.socket) -> None:
        try:
            said = peer.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if said.endswith(GOODBYE):
            self._selector.unregister(peer)
        elif said:
            self._heard[peer] = time.monotonic()
        else:
            self._selector.unregister(peer)
            self._report(self._peers[peer], "its process ended")

    def _report(self, rank: int, why: str) -> None:
        if not self._closed.is_set():
            self._lost(rank, why)


def end_process(rank: int, why: str) -> None:
    """End this process at once: its main thread may be inside a collective that never returns."""
    log.error("rank %d is lost: %s; this rank ends, too", rank, why)
    os._exit(RANK_LOST_EXIT)


def watch_peers(store: Store, *, rank: int, world: int, host: str, timeout: float) -> PeerWatch:
    """Connect this rank and return its watch. Every rank must call it. `host` is an address of rank 0."""
    if rank > 0:
        address, port, token = store.get(ADDRESS_KEY).decode().split(" ")
        peer = socket.create_connection((address, int(port)), timeout=timeout)
        peer.sendall(f"{token} {rank:08d}".encode())
        return PeerWatch({peer: 0})
    token = secrets.token_hex(16)  # the store has it: nobody else is accepted
    peers: dict[socket.socket, int] = {}
    deadline = time.monotonic() + timeout
    with socket.create_server((host, 0), backlog=world) as listener:
        store.set(ADDRESS_KEY, f"{host} {listener.getsockname()[1]} {token}")
        while len(peers) < world - 1:
            listener.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                peer, _ = listener.accept()
            except TimeoutError:
                missing = sorted({*range(1, world)} - {*peers.values()})
                raise TimeoutError(f"ranks {missing} did not connect within {timeout:.0f} s") from None
            peer.settimeout(HELLO_SECONDS)
            hello, size = b"", len(token) + 9
            with contextlib.suppress(OSError):
                while len(hello) < size and (part := peer.recv(size - len(hello))):
                    hello += part
            said, _, number = hello.decode(errors="replace").partition(" ")
            other = int(number) if hmac.compare_digest(said, token) and number.isdigit() else 0
            if not 0 < other < world or other in peers.values():
                peer.close()
            else:
                peers[peer] = other
    return PeerWatch(peers)
