"""`python -m trimaran.train.process.fork_server FD PARENT`: imports torch once and forks the ranks.

It reads JSON lines from the socket FD and writes JSON lines back. Descriptors come with empty lines. `{"bind": {"run":
PATH, "is_open": true}}` names the run; if it `is_open`, the last descriptor is that of its directory, and files are
opened below it. The answer is `{"event": "warm"}`. `{"start": [{"rank": 0, "environment": {...}, "descriptors":
{"NAME": [0]}}, ...]}` is answered by `{"event": "started", "rank": 0, "pid": 4711}` and, when the rank ends, by
`{"event": "ended", "rank": 0, "pid": 4711, "code": -9, "time": ...}` (monotonic clock). A rank's environment is added
to the fork server's own; the variables in `descriptors` get the numbers of descriptors, given by their order.
`{"measure": {"kind": "cpu", "devices": 1, "seconds": 1.0, "environment": {...}}}` is answered by `{"event": "speed",
"speed": 81.5}`, see `measure_speed.py`; without an answer if it failed.

The fork server has one thread and never initialises CUDA: neither survives a fork. It replaces warm spare ranks, as a
new rank does not have to import torch. Ranks end with the fork server. It ends with PARENT, the supervisor, and when
the socket is closed.
"""

import gc
import os
import signal
import sys

if __name__ == "__main__":
    # A request to the supervisor to show its ranks; some schedulers send it to every process of a job.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    gc.disable()  # imports leave little garbage, and looking for it takes a seventh of their time

from trimaran.runs import adopt_orphans, die_with_parent, raise_soft_limits, set_process_name, use_bytecode_cache

if __name__ == "__main__":
    die_with_parent(signal.SIGKILL, parent=int(sys.argv[2]))  # before torch is imported, which takes seconds
    use_bytecode_cache(os.environ)

from trimaran.runs import compile_cache

if __name__ == "__main__":
    os.environ.update(compile_cache(os.environ))  # torch reads it when it is imported

import faulthandler
import json
import logging
import select
import socket
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from trimaran.core import append_regular_file, open_regular_fd
from trimaran.data import cache_folder
from trimaran.machine import openmp_threads
from trimaran.runs import DESCRIPTORS, RunDirectory, open_run
from trimaran.train.process.rank_setup import read_rank_info
from trimaran.train.process.supervisor_link import read_supervisor_link
from trimaran.train.worker import import_for, run_worker

MAX_DESCRIPTORS = 253  # of one message, the kernel's limit
PLUGIN = "TRIMARAN_TEST_PLUGIN"  # for tests: a module that a rank imports first, to inject faults
EVERY_RANK = ("encodings.idna", "numpy.ma")  # what every rank imports later; here, not each has to


def main() -> None:
    freeze_imports()
    ForkServer(socket.socket(fileno=int(sys.argv[1]))).serve()


def freeze_imports() -> None:
    """Import what every rank imports later, and prepare this process for forks."""
    for name in EVERY_RANK:
        import_module(name)
    assert not torch.cuda.is_initialized(), "a forked process cannot use CUDA that its parent initialised"
    gc.enable()
    gc.freeze()  # a garbage collection in a rank would write to the shared pages, and so copy them


class ForkServer:
    """Forks ranks on request, and reports how they ended."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._run = Path()
        self._descriptors: list[int] = []
        self._ranks: dict[int, int] = {}  # by process id
        self._measuring: dict[int, int] = {}  # the ends of pipes by process id
        self._unparsed = b""

    def serve(self) -> None:
        """Serve requests until the supervisor closes the socket."""
        woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nothing is written to the descriptor
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # the supervisor decides when to stop
        adopt_orphans()  # so that processes which a dead rank leaves behind are reaped here
        raise_soft_limits()
        while True:
            readable, _, _ = select.select([self._control, woken], [], [])
            if woken in readable:
                os.read(woken, 4096)
            self._reap()
            if self._control in readable:
                for request in self._requests():
                    if "bind" in request:
                        self._bind(**request["bind"])
                    if "measure" in request:
                        self._measure(**request["measure"])
                    if "start" in request:
                        # Import what ranks need only for the plan of the run, so that not every rank has to.
                        gc.disable()
                        with suppress(Exception):  # the ranks meet the error, too, and report it
                            import_for(open_run(self._run))
                        freeze_imports()
                    for each in request.get("start", ()):
                        numbers = {
                            name: ",".join(str(self._descriptors[place]) for place in places)
                            for name, places in each["descriptors"].items()
                        }
                        self._fork(each["rank"], each["environment"] | numbers)

    def _requests(self) -> Iterator[dict[str, Any]]:
        data, passed, _, _ = socket.recv_fds(self._control, 1 << 20, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        if not data:
            os._exit(0)  # the ranks end with this process
        self._descriptors += passed
        *lines, self._unparsed = (self._unparsed + data).split(b"\n")
        return (json.loads(line) for line in lines)

    def _bind(self, run: str, *, is_open: bool, process: Mapping[str, Any] | None = None) -> None:
        """Serve `run` from now on, and print to its log. `process` is what a fork of the warm fork server changes."""
        if process is not None:  # have this process look as if the run had started it
            os.environ.clear()
            os.environ.update(process["environment"])
            os.environ.update(compile_cache(process["environment"]))
            os.chdir(process["folder"])
            sys.path[0] = process["folder"]
        self._run = Path(f"{DESCRIPTORS}{self._descriptors[-1]}" if is_open else run)
        with append_regular_file(RunDirectory(self._run).agent_log) as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        self._send(event="warm")

    def _send(self, **fields: Any) -> None:
        self._control.sendall(json.dumps(fields).encode() + b"\n")

    def _fork(self, rank: int, environment: Mapping[str, str]) -> None:
        parent, code = os.getpid(), 1
        if (pid := os.fork()) == 0:  # the rank must never return to the code of the fork server
            self._control.close()
            try:
                code = _run_rank(self._run, parent, environment)
            except BaseException:
                traceback.print_exc()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(code)
        os.setpgid(pid, pid)  # the rank does it too, as either process may run first
        self._ranks[pid] = rank
        self._send(event="started", rank=rank, pid=pid)

    def _measure(self, *, environment: Mapping[str, str], **how: Any) -> None:
        """Fork a process that measures how fast the devices compute."""
        parent, (receives, sends) = os.getpid(), os.pipe2(os.O_CLOEXEC)
        if (pid := os.fork()) == 0:
            self._control.close()
            code = 1
            try:
                die_with_parent(signal.SIGKILL, parent=parent)
                os.environ.update(environment)
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                if threads := openmp_threads(os.environ.get("OMP_NUM_THREADS")):
                    torch.set_num_threads(threads)
                if plugin := os.environ.get(PLUGIN):
                    import_module(plugin)
                from trimaran.train.process.measure_speed import measure_speed  # noqa: PLC0415  ranks do not need it

                os.write(sends, str(measure_speed(**how)).encode())
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        os.close(sends)
        self._measuring[pid] = receives

    def _reap(self) -> None:
        """Report every rank that has ended since the last call."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if (receives := self._measuring.pop(pid, None)) is not None:
                if answer := os.read(receives, 4096):
                    self._send(event="speed", speed=float(answer))
                os.close(receives)
            if (rank := self._ranks.pop(pid, None)) is not None:
                code = os.waitstatus_to_exitcode(status)
                self._send(event="ended", rank=rank, pid=pid, code=code, time=time.monotonic())


def _run_rank(run: Path, parent: int, environment: Mapping[str, str]) -> int:
    die_with_parent(signal.SIGKILL, parent=parent)
    os.setpgid(0, 0)  # so that a kill of the group also reaches this rank's loader processes
    os.environ.update(environment)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # SIGTERM stays ignored until the worker handles it
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # until the heartbeat thread handles it
    set_process_name(f"trimaran-{environment['RANK']}")
    path, flags = run / "logs" / f"rank-{environment['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND
    log = open_regular_fd(path, flags, mode=0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    if environment.get("TRIMARAN_ATTEMPT", "0") != "0":
        print(f"-- start {int(environment['TRIMARAN_ATTEMPT']) + 1} --", flush=True)  # noqa: T201
    faulthandler.enable()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")

    # Always: torch replaces its thread pool at its first use in a fork, and two threads at once would find none.
    torch.set_num_threads(openmp_threads(os.environ.get("OMP_NUM_THREADS")) or torch.get_num_threads())
    if plugin := os.environ.get(PLUGIN):
        import_module(plugin)
    rank_info, link = read_rank_info(os.environ), read_supervisor_link(os.environ)
    return run_worker(open_run(run), rank_info, cache=cache_folder(os.environ), link=link, environment=os.environ)


if __name__ == "__main__":
    main()
