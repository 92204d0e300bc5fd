"""`python -m trimaran.train.process.warm_fork_server FOLDER IDLE_SECONDS`: a fork server without a run, for many runs.

A user has at most one. It imports torch, listens on a socket in FOLDER, which only this user can open, and forks a fork
server for each run that asks, if all that matters is equal (`run.warm_protocol.fingerprint`) and no imported file has
changed since. A fork serves the connection that it was asked on, as in `fork_server`, and outlives this process.
Requests and answers are JSON lines: `{"fork": FINGERPRINT}`, `{"status": true}`, `{"stop": true}`. It ends after
IDLE_SECONDS without a request for a fork.
"""

import gc
import os
import signal
import sys
import time
from pathlib import Path

from trimaran.runs import SOCKET, difference, take_lock
from trimaran.runs.warm_protocol import fingerprint

_STARTED = time.time()
_ENVIRONMENT = dict(os.environ)  # noqa: TID251 - an entry point
if __name__ == "__main__":
    _LOCK = take_lock(Path(sys.argv[1]))
    if _LOCK is None or os.fork():
        os._exit(0)  # another process is the warm fork server; or this one's child, which has no parent now
    os.setsid()
    gc.disable()
    for _number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
        signal.signal(_number, signal.SIG_IGN)
    from trimaran.runs.compile_cache import use_bytecode_cache

    use_bytecode_cache(_ENVIRONMENT)
    from trimaran.runs.compile_cache import compile_cache

    os.environ.update(compile_cache(_ENVIRONMENT))  # noqa: TID251

import contextlib  # noqa: E402
import json  # noqa: E402
import socket  # noqa: E402
import struct  # noqa: E402
from importlib import import_module  # noqa: E402
from typing import Any  # noqa: E402

from trimaran.runs.process_control import set_process_name  # noqa: E402
from trimaran.train.process.fork_server import ForkServer, freeze_imports  # noqa: E402

# What ranks of some plans import, in a second or two each: the compiler, sharded tensors, pipelines.
ANY_PLAN = ("torch._inductor.compile_fx", "trimaran.parallel.axes.tp", "trimaran.train.steppers.pipeline_stepper")
REQUEST_SECONDS = 5.0  # for a client to send its line
MAX_REQUEST_BYTES = 1 << 22


def main() -> None:
    folder, idle_seconds = Path(sys.argv[1]), float(sys.argv[2])
    set_process_name("trimaran-warm")
    for name in ANY_PLAN:
        import_module(name)
    freeze_imports()
    with contextlib.suppress(FileNotFoundError):
        (folder / SOCKET).unlink()  # of one that was killed: this process holds the lock
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(folder / SOCKET))
    os.chmod(folder / SOCKET, 0o600)
    listener.listen(16)
    os.chdir("/")
    WarmForkServer(listener, idle_seconds).serve()
    with contextlib.suppress(FileNotFoundError):
        (folder / SOCKET).unlink()


class WarmForkServer:
    """Answers requests one after another."""

    def __init__(self, listener: socket.socket, idle_seconds: float) -> None:
        self._listener, self._idle_seconds = listener, idle_seconds
        self._fingerprint = fingerprint(_ENVIRONMENT)
        # Time and size of the files of all imported modules; None if a file is newer than this process.
        paths = {path for module in list(sys.modules.values()) if (path := getattr(module, "__file__", None))}
        found = {path: each for path in paths if (each := _version(path))}  # some modules of torch name no real file
        self._files = {path: None if each[0] >= _STARTED * 1e9 else each for path, each in found.items()}
        self._num_forks, self._last = 0, time.monotonic()
        self._stopping = False
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forks

    def serve(self) -> None:
        """Serve until asked to stop, or idle for too long, or useless because files have changed."""
        while not self._stopping and (left := self._last + self._idle_seconds - time.monotonic()) > 0:
            self._listener.settimeout(left)
            with contextlib.suppress(OSError):  # also the timeout
                connection, _ = self._listener.accept()
                with connection:
                    self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(REQUEST_SECONDS)
        _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.geteuid():
            return
        try:
            received = b""
            while not received.endswith(b"\n"):
                data = connection.recv(1 << 16)
                received += data
                if not data or len(received) > MAX_REQUEST_BYTES:
                    raise ValueError("no request")
            request = json.loads(received)
        except ValueError:
            return
        if "fork" in request:
            answer = self._fork(connection, request["fork"])
        else:
            self._stopping = bool(request.get("stop"))
            answer = {
                "pid": os.getpid(),
                "started": _STARTED,
                "forks": self._num_forks,
                "idle_seconds": time.monotonic() - self._last,
                "ends_after_seconds": self._idle_seconds,
                "python": sys.executable,
            }
        connection.sendall(json.dumps(answer).encode() + b"\n")

    def _fork(self, connection: socket.socket, theirs: dict[str, Any]) -> dict[str, Any]:
        """Fork a fork server that goes on with this connection, and return the answer to send."""
        for path, before in self._files.items():
            if before is None or _version(path) != before:
                self._stopping = True  # it stays useless: the next run starts another
                return {"refused": f"{path} has changed since it was imported"}
        if differs := difference(self._fingerprint, theirs):
            return {"refused": f"it differs from this run in {differs}; end it with `trimaran warm --stop`"}
        self._num_forks, self._last = self._num_forks + 1, time.monotonic()
        server = os.getpid()
        if (pid := os.fork()) == 0:  # it writes nothing before it is asked, which is after this answer
            try:
                self._listener.close()
                if __name__ == "__main__" and _LOCK is not None:
                    os.close(_LOCK)  # the lock is held as long as any process has it open
                os.setsid()
                signal.signal(signal.SIGHUP, signal.SIG_DFL)
                connection.settimeout(None)
                ForkServer(connection).serve()
            finally:
                os._exit(1)
        return {"pid": pid, "server": server}


def _version(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


if __name__ == "__main__":
    main()
