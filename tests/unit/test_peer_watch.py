"""A rank notices that another one has exited, and ignores one that was stopped as planned."""

import queue
import socket
import threading
from datetime import timedelta

import pytest
from torch.distributed import HashStore, TCPStore

from trimaran.serve import ADDRESS_KEY, GOODBYE, PeerWatch, watch_peers

WAIT_SECONDS = 30.0


def watched(*, max_silent: float = 1000.0) -> tuple[PeerWatch, socket.socket, "queue.Queue[tuple[int, str]]"]:
    """Return a watch over one peer, the peer's end, and what the watch reports."""
    ours, theirs = socket.socketpair()
    reports: queue.Queue[tuple[int, str]] = queue.Queue()
    watch = PeerWatch({ours: 3}, lost=lambda rank, why: reports.put((rank, why)), max_silent=max_silent)
    return watch, theirs, reports


def test_the_end_of_a_process_is_reported() -> None:
    watch, theirs, reports = watched()
    theirs.close()
    assert reports.get(timeout=WAIT_SECONDS) == (3, "its process ended")
    watch.close()


def test_a_goodbye_is_no_loss() -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    reports: queue.Queue[tuple[int, str]] = queue.Queue()
    watch = PeerWatch(
        {ours: rank for rank, (ours, _) in enumerate(pairs)}, lost=lambda rank, why: reports.put((rank, why))
    )
    pairs[0][1].send(GOODBYE)
    for _, theirs in pairs:
        theirs.close()
    assert reports.get(timeout=WAIT_SECONDS) == (1, "its process ended")
    watch.close()
    assert reports.empty()


def test_a_peer_that_says_nothing_is_reported() -> None:
    watch, _theirs, reports = watched(max_silent=0.5)
    rank, why = reports.get(timeout=WAIT_SECONDS)
    assert rank == 3
    assert "said nothing" in why
    watch.close()


def test_a_watch_beats_and_says_goodbye() -> None:
    watch, theirs, _ = watched()
    theirs.settimeout(WAIT_SECONDS)
    assert theirs.recv(1) == b"."
    watch.close()
    rest = b""
    while part := theirs.recv(100):
        rest += part
    assert rest.endswith(GOODBYE)


def test_only_ranks_with_the_token_are_accepted() -> None:
    store, found = HashStore(), []
    first = threading.Thread(target=lambda: found.append(watch_peers(store, rank=0, world=2, host="127.0.0.1",
                                                                     timeout=WAIT_SECONDS)))  # fmt: skip
    first.start()
    host, port, _token = store.get(ADDRESS_KEY).decode().split(" ")
    for hello in (b"", b"0" * 32 + b" 00000001"):
        with socket.create_connection((host, int(port)), timeout=WAIT_SECONDS) as stranger:
            stranger.sendall(hello)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(1) == b""  # it is turned away
    assert first.is_alive(), "it waits for rank 1"
    second = watch_peers(store, rank=1, world=2, host="127.0.0.1", timeout=WAIT_SECONDS)
    first.join(WAIT_SECONDS)
    assert len(found) == 1
    closing = [threading.Thread(target=each.close) for each in (found[0], second)]
    for each in closing:
        each.start()
    for each in closing:
        each.join(WAIT_SECONDS)


def test_a_rank_that_never_starts_is_named() -> None:
    store = TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=10), wait_for_workers=False)
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] did not connect"):
        watch_peers(store, rank=0, world=3, host="127.0.0.1", timeout=0.3)
