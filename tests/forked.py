"""Commands and ranks of tests, forked from `tests/fork_source.py` instead of started as new interpreters."""

import atexit
import json
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from tests.cpu_rates import give_cpu_rates
from tests.environment import SESSION_CACHE, environment
from tests.fork_source import LENGTH_BYTES
from trimaran.launch import ask_warm

SOURCE = "TRIMARAN_TESTS_FORK_SOURCE"  # the socket of this session's fork source
START_SECONDS = 60.0


def start_fork_source() -> None:
    """Start this session's fork source, unless a process above has. It imports torch while this process goes on.

    Runs with `--warm` share a warm fork server of this session: the first one starts it.
    """
    if SOURCE in os.environ:
        return
    folder = tempfile.mkdtemp(prefix="trimaran-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["XDG_RUNTIME_DIR"] = folder
    atexit.register(ask_warm, {"XDG_RUNTIME_DIR": folder}, {"stop": True})
    os.environ[SESSION_CACHE] = f"{folder}/cache"
    give_cpu_rates(Path(folder, "cache"))
    os.environ[SOURCE] = f"{folder}/fork-source"
    command = [sys.executable, "-m", "tests.fork_source", os.environ[SOURCE], str(os.getpid())]
    with open(f"{os.environ[SOURCE]}.log", "wb") as log:
        process = subprocess.Popen(command, env=environment(OPENBLAS_NUM_THREADS="1"), stdout=log, stderr=log)
    atexit.register(process.wait)
    atexit.register(process.kill)


class Forked:
    """A forked process, used as a `subprocess.Popen` is."""

    def __init__(self, fields: Mapping[str, Any], descriptors: Sequence[int], name: str) -> None:
        self._name, self.returncode = name, None
        self._received = b""
        request = pickle.dumps(dict(fields))
        start_fork_source()
        self._source = _connect(os.environ[SOURCE])
        data = len(request).to_bytes(LENGTH_BYTES, "big") + request
        sent = socket.send_fds(self._source, [data], descriptors)
        self._source.sendall(data[sent:])
        answer = self._answer(None)
        assert answer is not None
        assert "pid" in answer, answer.get("error")
        self.pid: int = answer["pid"]
        self.stdout: IO[Any] | None = None
        self.stderr: IO[Any] | None = None
        self.returncode: int | None = None

    def _answer(self, timeout: float | None) -> dict[str, Any] | None:
        """Return the next answer of the fork source; None if it takes longer than `timeout` seconds."""
        while b"\n" not in self._received:
            if not select.select([self._source], [], [], timeout)[0]:
                return None
            data = self._source.recv(1 << 16)
            assert data, f"the fork source has ended:\n{Path(os.environ[SOURCE] + '.log').read_text()}"
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def poll(self) -> int | None:
        if self.returncode is None and (answer := self._answer(0.0)) is not None:
            self._ended(answer)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if (answer := self._answer(timeout)) is None:
                raise subprocess.TimeoutExpired(self._name, timeout or 0.0)
            self._ended(answer)
        assert self.returncode is not None
        return self.returncode

    def _ended(self, answer: Mapping[str, Any]) -> None:
        self.returncode = answer["code"]
        self._source.close()

    def communicate(self, timeout: float | None = None) -> tuple[Any, Any]:
        """Return what the process prints until its end."""
        printed: dict[str, Any] = {}

        def read(name: str, stream: IO[Any]) -> None:
            with stream:
                printed[name] = stream.read()

        streams = {"out": self.stdout, "err": self.stderr}
        readers = [threading.Thread(target=read, args=each) for each in streams.items() if each[1] is not None]
        for each in readers:
            each.start()
        self.wait(timeout)
        for each in readers:
            each.join()
        return printed.get("out"), printed.get("err")

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for each in (self.stdout, self.stderr):
            if each is not None:
                each.close()
        self.wait()


def _connect(path: str) -> socket.socket:
    """Return a connection to the fork source, which may still be starting."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(path)
        except OSError:
            connection.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return connection


def start(
    module: str,
    *arguments: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdout: int | IO[Any] | None = subprocess.PIPE,
    stderr: int | IO[Any] | None = subprocess.PIPE,
    text: bool = True,
) -> Forked:
    """Start `python -m module arguments`, without standard input, and return at once.

    `env` is by default `environment()`, with which runs share a warm fork server.
    """
    ends: list[IO[Any] | None] = []
    descriptors, ours = [os.open(os.devnull, os.O_RDONLY)], list[int]()
    for number, stream in enumerate((stdout, stderr), start=1):
        end = None
        if stream == subprocess.PIPE:
            read, write = os.pipe2(os.O_CLOEXEC)
            end = os.fdopen(read, "r" if text else "rb")
            ours.append(write)
            descriptors.append(write)
        elif stream == subprocess.STDOUT:
            descriptors.append(descriptors[1])
        elif stream == subprocess.DEVNULL:
            ours.append(os.open(os.devnull, os.O_WRONLY))
            descriptors.append(ours[-1])
        elif stream is None:
            descriptors.append(number)
        else:
            descriptors.append(stream if isinstance(stream, int) else stream.fileno())
        ends.append(end)
    fields = {
        "module": module,
        "imports": module.split(".")[0],
        "arguments": list(map(str, arguments)),
        "environment": dict(environment() if env is None else env),
        "folder": str(cwd or Path.cwd()),
    }
    try:
        process = Forked(fields, descriptors, module)
    finally:
        for each in (descriptors[0], *ours):
            os.close(each)
    process.stdout, process.stderr = ends
    return process


def run(
    module: str,
    *arguments: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m module arguments` to its end and return what it printed."""
    process = start(module, *arguments, cwd=cwd, env=env)
    try:
        out, err = process.communicate(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise
    done = subprocess.CompletedProcess([module, *arguments], process.wait(), out, err)
    if check:
        done.check_returncode()
    return done


def call(
    function: Callable[..., Any], arguments: Sequence[Any], env: Mapping[str, str], result: int, stacks: int
) -> Forked:
    """Call a function of a module in a forked process, which sends its pickled result or error and stays alive."""
    if function.__module__ == "__main__":  # of a module that was started with `python -m`
        spec = sys.modules["__main__"].__spec__
        assert spec is not None, "a function of a script cannot be found by its name"
        function = getattr(import_module(spec.name), function.__qualname__)
    fields = {
        "imports": function.__module__,
        "arguments": pickle.dumps((function, arguments)),
        "environment": dict(env),
        "folder": os.getcwd(),
    }
    return Forked(fields, [0, 1, 2, result, stacks], f"{function.__module__}.{function.__qualname__}")
