"""Strangers send bytes to every port and socket of a run; training stays that of an undisturbed run."""

import pickle
import random
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.chaos.fault_run import assert_as_undisturbed, remove_pause, start_run
from tests.chaos.test_ports import open_connections
from tests.fault.harness import Supervised, wait_for
from trimaran.core import EXIT_DONE

pytestmark = pytest.mark.chaos

FLOOD = 200


class TouchFile:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self._path,)


def first_bytes(proof: Path) -> dict[str, bytes]:
    """Return what each kind of stranger sends. `proof` exists later if one of them was executed."""
    return {
        "nothing": b"",
        "one byte": b"\0",
        "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "post": b"POST / HTTP/1.1\r\nContent-Length: 1000000000000\r\n\r\n{}",
        "random": random.Random(1).randbytes(4096),
        "lengths": b"\xff" * 64,
        "huge": (1 << 40).to_bytes(8, "little") + bytes(4096),
        "pickle": pickle.dumps(TouchFile(proof)),
        "json": b'{"fork": {}, "kind": "stop", "stop": true, "token": ""}\n',
        "tls": bytes.fromhex("160301020001000001fc0303") + bytes(512),
    }


def tcp_ports(supervised: Supervised) -> set[int]:
    """Return the ports on which a process of the run listens."""
    processes = [psutil.Process(supervised.process.pid), *supervised.processes()]
    ports = set()
    for each in processes:
        with suppress(psutil.Error):
            ports |= {known.laddr.port for known in each.net_connections("tcp") if known.status == "LISTEN"}
    return ports


def unix_sockets(supervised: Supervised) -> set[str]:
    """Return the named sockets of the processes of the run."""
    processes = [psutil.Process(supervised.process.pid), *supervised.processes()]
    found = set()
    for each in processes:
        with suppress(psutil.Error):
            found |= {str(known.laddr) for known in each.net_connections("unix") if known.laddr}
    return found


def connect(where: int | str) -> socket.socket | None:
    stranger = socket.socket(socket.AF_INET if isinstance(where, int) else socket.AF_UNIX)
    stranger.settimeout(1.0)
    try:
        stranger.connect(("127.0.0.1", where) if isinstance(where, int) else where.replace("@", "\0", 1))
    except OSError:
        stranger.close()
        return None
    return stranger


@contextmanager
def strangers(supervised: Supervised, proof: Path) -> Iterator[dict[str, int]]:
    """Connect to every listener, send bytes and stay until the end of the block. Yields the addresses."""
    over, reached = threading.Event(), dict[str, int]()
    kept: list[socket.socket] = []

    def disturb() -> None:
        while not over.is_set():
            for where in (*tcp_ports(supervised), *unix_sockets(supervised)):
                for name, data in first_bytes(proof).items():
                    stranger = connect(where)
                    if stranger is not None:
                        reached[name] = reached.get(name, 0) + 1
                        with suppress(OSError):
                            stranger.sendall(data)
                        kept.append(stranger)
            for each in kept[: max(0, len(kept) - 400)]:  # the newest stay open
                each.close()
                kept.remove(each)
            over.wait(0.1)

    thread = threading.Thread(target=disturb, daemon=True)
    thread.start()
    try:
        yield reached
    finally:
        over.set()
        thread.join()
        for each in kept:
            each.close()


def test_strangers_change_nothing_from_the_first_second_on(tmp_path: Path) -> None:
    proof = tmp_path / "executed"
    with start_run(tmp_path / "run", "train.steps=200", "checkpoint.memory=1") as supervised:
        with strangers(supervised, proof) as reached:
            supervised.wait_for_step(20)
            supervised.send_signal(1, signal.SIGKILL)  # they are there while the ranks meet again, too
            assert supervised.wait_for_fault(0, 90).cause == "crash"
            supervised.wait_for_step(supervised.step() + 20)
        assert min(reached[name] for name in first_bytes(proof)) >= 10, reached
        remove_pause(supervised)
        assert supervised.wait(120) == EXIT_DONE
        assert [each.cause for each in supervised.faults] == ["crash"]
    assert not proof.exists()
    assert_as_undisturbed(supervised.run, tmp_path / "calm")


def test_a_flood_of_half_open_connections_to_each_port_changes_nothing(tmp_path: Path) -> None:
    with start_run(tmp_path / "run", "train.steps=300") as supervised:
        supervised.wait_for_step(10)
        flood = open_connections([*tcp_ports(supervised)] * FLOOD, FLOOD * len(tcp_ports(supervised)))
        assert len(flood) >= 3 * FLOOD  # of the supervisor and two ranks
        supervised.wait_for_step(supervised.step() + 30)
        for each in flood:
            each.close()
        remove_pause(supervised)
        assert supervised.wait(120) == EXIT_DONE
        assert supervised.faults == []
        assert supervised.attempts() == 1
    wait_for(lambda: not supervised.processes())
    assert_as_undisturbed(supervised.run, tmp_path / "calm")
