"""`python -m trimaran.train.process.fork_server RUN FD PARENT`: imports torch once and forks the ranks of a run out of itself.

It obeys lines of JSON on the socket FD, and answers with some: `{"start": [{"rank": 0, "environment": {...}}, ...]}`
is answered by `{"told": "started", "rank": 0, "pid": 4711}` and, whenever that is, by `{"told": "ended", "rank": 0,
"pid": 4711, "code": -9, "time": ...}` (monotonic clock). A rank's environment comes on top of the fork server's own.

The fork server has one thread and never touches CUDA: neither would survive a fork. Ranks that it has not forked yet are
what others keep as warm spares. They die with it, and it dies with PARENT, the supervisor.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36  # of Linux's prctl.h


def die_with(parent: int) -> None:
    """Have the kernel end this process when `parent`, or rather the thread of it that started us, does."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it was gone before we could ask


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a question to the supervisor, which some send to all of a job
    die_with(int(sys.argv[3]))  # before torch is imported, which takes seconds

import faulthandler  # noqa: E402
import gc  # noqa: E402
import json  # noqa: E402
import logging  # noqa: E402
import select  # noqa: E402
import socket  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402
from collections.abc import Iterator, Mapping  # noqa: E402
from importlib import import_module  # noqa: E402
from pathlib import Path  # noqa: E402
from types import FrameType  # noqa: E402
from typing import Any, NoReturn  # noqa: E402

import torch  # noqa: E402

from trimaran.data import cache_folder  # noqa: E402
from trimaran.run import open_run  # noqa: E402
from trimaran.train.process.rank_info import read_rank_info  # noqa: E402
from trimaran.train.process.supervisor_link import supervisor_link_of  # noqa: E402
from trimaran.train.worker import run_worker  # noqa: E402

PLUGIN = "TRIMARAN_TEST_PLUGIN"  # for tests: a module that a rank imports before it works, to break things on purpose
# What ranks import when they come to it, and each of them for itself if it was not done here.
LATER = ("torch._dynamo", "encodings.idna", "numpy.ma")


def main() -> None:
    run, control = Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    for name in LATER:
        import_module(name)
    assert not torch.cuda.is_initialized(), "a fork cannot use the CUDA of its parent"
    ForkServer(run, control).serve()


class ForkServer:
    """Forks ranks when told to, and tells how they ended."""

    def __init__(self, run: Path, control: socket.socket) -> None:
        self._run, self._control = run, control
        self._ranks: dict[int, int] = {}
        self._heard = b""

    def serve(self) -> None:
        """Obey until the supervisor hangs up."""
        woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, _note)  # a handler there must be, for the wakeup to be written
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # stopping is the supervisor's to decide
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # whom a dead rank leaves behind is ours to bury
        gc.collect()
        gc.freeze()  # a collection in a rank would write to pages that all of them share
        self._tell(told="warm")
        while True:
            readable, _, _ = select.select([self._control, woken], [], [])
            if woken in readable:
                os.read(woken, 4096)
            self._bury()
            if self._control in readable:
                for order in self._orders():
                    for each in order["start"]:
                        self._fork(each["rank"], each["environment"])

    def _orders(self) -> Iterator[dict[str, Any]]:
        data = self._control.recv(1 << 20)
        if not data:
            os._exit(0)  # and the ranks with us
        *lines, self._heard = (self._heard + data).split(b"\n")
        return (json.loads(line) for line in lines)

    def _tell(self, **told: Any) -> None:
        self._control.sendall(json.dumps(told).encode() + b"\n")

    def _fork(self, rank: int, environment: Mapping[str, str]) -> None:
        parent = os.getpid()
        if (pid := os.fork()) == 0:
            self._control.close()
            _live(self._run, parent, environment)
        os.setpgid(pid, pid)  # here and in the rank: whoever comes first
        self._ranks[pid] = rank
        self._tell(told="started", rank=rank, pid=pid)

    def _bury(self) -> None:
        """Tell of every rank that has ended since the last look."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if (rank := self._ranks.pop(pid, None)) is not None:
                code = os.waitstatus_to_exitcode(status)
                self._tell(told="ended", rank=rank, pid=pid, code=code, time=time.monotonic())


def _live(run: Path, parent: int, environment: Mapping[str, str]) -> NoReturn:
    """Be a rank, from the fork to the exit. It never returns to the fork server's code."""
    try:
        code = _rank(run, parent, environment)
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _rank(run: Path, parent: int, environment: Mapping[str, str]) -> int:
    die_with(parent)
    os.setpgid(0, 0)  # so that a kill reaches this rank's loader processes, too
    os.environ.update(environment)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # SIGTERM stays unheard until the worker listens to it
    signal.signal(
        signal.SIGUSR2, signal.SIG_IGN
    )  # and so does the supervisor's question, until there is a heartbeat thread
    ctypes.CDLL(None).prctl(PR_SET_NAME, f"trimaran-{environment['RANK']}".encode())
    log = os.open(run / "logs" / f"rank-{environment['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    if environment.get("TRIMARAN_ATTEMPT", "0") != "0":
        print(f"-- start {int(environment['TRIMARAN_ATTEMPT']) + 1} --", flush=True)  # noqa: T201
    faulthandler.enable()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")

    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    if plugin := os.environ.get(PLUGIN):
        import_module(plugin)
    place, link = read_rank_info(os.environ), supervisor_link_of(os.environ)
    return run_worker(open_run(run), place, cache=cache_folder(os.environ), link=link)


def _note(number: int, frame: FrameType | None) -> None:
    """The wakeup pipe has it already."""


if __name__ == "__main__":
    main()
