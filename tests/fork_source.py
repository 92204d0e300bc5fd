"""`python -m tests.fork_source SOCKET PARENT`: a process that the commands and ranks of tests are forked from.

It is started before tests are collected. It imports torch and trimaran, has one thread and runs no test. So a fork is
as good as a new interpreter, without three seconds of imports. `tests/forked.py` talks to it.

A request is the length of a pickled dict, the dict, and descriptors. It asks for one process: `module` to run as
`python -m module arguments`, or `function` to call. The answers are JSON lines: the process id, then the exit code.
"""

import atexit
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import pickle
import runpy
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import trimaran
from trimaran.runs import die_with_parent, set_process_name

LENGTH_BYTES = 8
# Packages with all their modules: a rank would import what it needs of them again and again.
PACKAGES = ("checkpoint", "loop", "nets", "parallel", "train")
IMPORTED = (
    "encodings.idna",
    "numpy.ma",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "torch.profiler._cupti_monitor",
    "transformers.modeling_utils",
    "trimaran.app.main",
    "trimaran.app.train.resume",
    "trimaran.app.train.train",
    "trimaran.launch.__main__",
)


class QuickExit:
    """Called at the end of all that is registered for the exit: to free torch's objects takes half a second."""

    code = 0

    def __call__(self) -> None:
        for each in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # a closed pipe, which the command has handled
                each.flush()
        os._exit(self.code)


exit_quickly = QuickExit()
if __name__ == "__main__":
    atexit.register(exit_quickly)  # first, so that it is called last


class ForkSource:
    """Forks processes on request, and reports how they ended."""

    def __init__(self, listener: socket.socket) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._listener = listener
        self._num_threads = num_threads()  # one; beside a GPU, libraries may start more that hold no lock of ours
        self._forked: dict[int, socket.socket] = {}  # by process id: who asked
        woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nothing is written to the wakeup descriptor
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._selector.register(woken, selectors.EVENT_READ)
        self._woken, self._wake = woken, wake

    def serve(self) -> "Request":
        """Serve forever. Returns in forked processes only, with what each is to do."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._woken:
                    os.read(self._woken, 4096)
                    self._reap()
                elif key.fileobj is self._listener and (request := self._fork()) is not None:
                    return request

    def _fork(self) -> "Request | None":
        client, _ = self._listener.accept()
        try:
            request = Request.receive(client)
            importlib.import_module(request.imports)
            started = num_threads() - self._num_threads
            assert not started, f"importing {request.imports} started {started} threads"
            gc.freeze()  # what was just imported, too: a collection in a fork neither visits nor copies it
        except Exception:
            client.sendall(json.dumps({"error": traceback.format_exc()}).encode() + b"\n")
            client.close()
            return None
        parent = os.getpid()
        if (pid := os.fork()) == 0:
            for each in (self._listener, client, *self._forked.values()):
                each.close()
            for each in (self._woken, self._wake):
                os.close(each)
            self._selector.close()
            request.settle(parent)
            return request
        request.close()
        self._forked[pid] = client
        client.sendall(json.dumps({"pid": pid}).encode() + b"\n")
        return None

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if (client := self._forked.pop(pid, None)) is not None:
                with contextlib.suppress(OSError), client:  # who asked may have ended
                    client.sendall(json.dumps({"code": os.waitstatus_to_exitcode(status)}).encode() + b"\n")


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


class Request:
    """What a forked process is to do, in which folder, with which environment and descriptors."""

    def __init__(self, fields: Mapping[str, Any], descriptors: list[int]) -> None:
        self.module: str | None = fields.get("module")
        self.function: Callable[..., Any] | str = fields.get("function", "")
        self.arguments: Any = fields["arguments"]
        self.environment: dict[str, str] = fields["environment"]
        self.folder: str = fields["folder"]
        self.descriptors = descriptors  # standard input, output and error; of a call: also the result and native stacks
        self.imports = fields["imports"]

    @classmethod
    def receive(cls, client: socket.socket) -> "Request":
        data, descriptors, _, _ = socket.recv_fds(client, 1 << 20, 8)
        while len(data) < LENGTH_BYTES or len(data) < LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "big"):
            more = client.recv(1 << 20)
            assert more, "a request ended early"
            data += more
        return cls(pickle.loads(data[LENGTH_BYTES:]), descriptors)

    def close(self) -> None:
        for each in self.descriptors:
            os.close(each)

    def settle(self, parent: int) -> None:
        """Give the forked process the state of a new interpreter: signals, environment, folder, standard streams."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        for number, each in enumerate(self.descriptors[:3]):
            os.dup2(each, number)
            os.close(each)
        sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
        sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
        sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        # What a failed test has left ends with the session.
        die_with_parent(signal.SIGKILL if self.module is None else signal.SIGTERM, parent=parent)

    def run(self) -> NoReturn:
        if self.module is None:
            self._call()
        known = set(sys.path)
        sys.path[0] = self.folder
        sys.path[1:1] = [each for each in self.environment.get("PYTHONPATH", "").split(":") if each not in known]
        sys.argv = ["", *self.arguments]
        sys.modules.pop(f"{self.module}.__main__", None)  # imported above; runpy would warn
        try:
            runpy.run_module(self.module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            if end.code is not None and not isinstance(end.code, int):
                print(end.code, file=sys.stderr)
            exit_quickly.code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
            exit_quickly.code = 1
        raise SystemExit  # threads are waited for, and what was registered for the exit runs

    def _call(self) -> NoReturn:
        """Send the pickled result or error of the function, and wait to be killed: other ranks may need a store."""
        result, stacks = self.descriptors[3:]
        faulthandler.enable(stacks)
        import torch  # noqa: PLC0415  it is imported already; this module starts without it

        # Threads of gloo crash without a Python stack. This prints those of all threads, then calls faulthandler.
        torch._C._set_print_stack_traces_on_fatal_signal(True)
        gc.unfreeze = lambda: None  # which a change of the plan calls, for the sake of CUDA graphs
        try:
            function, arguments = pickle.loads(self.arguments)
            answer = pickle.dumps((function(*arguments), None))
        except BaseException:
            answer = pickle.dumps((None, traceback.format_exc()))
        with open(result, "wb") as pipe:
            pipe.write(answer)
        sys.stdout.flush()
        sys.stderr.flush()
        while True:
            signal.pause()


def modules_of_packages() -> Iterator[str]:
    for package in PACKAGES:
        folder = Path(trimaran.__file__).parent / package
        for path in sorted(folder.rglob("*.py")):
            if path.stem not in ("__main__", "__init__") and 'if __name__ == "__main__"' not in path.read_text():
                yield ".".join(("trimaran", package, *path.relative_to(folder).with_suffix("").parts))


def main() -> None:
    path, parent = Path(sys.argv[1]), int(sys.argv[2])
    die_with_parent(signal.SIGKILL, parent=parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_process_name("fork-source")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(64)  # who asks early waits
    gc.disable()
    for name in (*IMPORTED, *modules_of_packages()):
        with contextlib.suppress(ModuleNotFoundError):  # of an optional package
            importlib.import_module(name)
    import torch  # noqa: PLC0415
    from tqdm import tqdm  # noqa: PLC0415

    torch.set_num_threads(1)
    tqdm.monitor_interval = 0  # no thread of its own
    gc.enable()
    gc.freeze()  # a garbage collection in a fork would write to the shared pages, and so copy them
    request = ForkSource(listener).serve()
    # torch replaces its thread pool in the fork at the first use, and two threads at once would find none.
    torch.set_num_threads(1)
    request.run()


if __name__ == "__main__":
    main()
