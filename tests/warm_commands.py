"""Starts Trimaran's commands, supervisors and fork servers as forks of this process instead of new interpreters.

A new interpreter imports torch in seconds, and `trimaran train` starts three. A fork has it imported. It is the same
process to the outside: a child of the same parent, with the arguments, environment, folder, descriptors, signals and
session that the caller asked for. Inside it starts from what the tests have imported, without their state. The
processes that it starts are forks as well. Tests with the marker `cold` start new interpreters, as users do, and so
does every command with a variable that a library reads when it is imported. See docs/decisions/0083.
"""

import asyncio
import atexit
import ctypes
import faulthandler
import functools
import gc
import io
import itertools
import logging
import mmap
import multiprocessing.process
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import random
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from trimaran.train.process.fork_server import LAZY_MODULES

START_PROGRAM: Callable[..., int] = subprocess._fork_exec  # type: ignore[attr-defined]
MODULES = ("trimaran", "trimaran.launch", "trimaran.train.process.fork_server", "torch.distributed.run")
# Of variables with these prefixes some are read when a library is imported.
READ_AT_IMPORT = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "OMP_", "MKL_", "KMP_", "TORCH", "PYTORCH", "CUDA", "HF_",
                  "TRANSFORMERS_", "HUGGINGFACE_", "WANDB_", "NICEGUI_", "DS_", "RAY_", "_TYPER", "TERMINAL_WIDTH",
                  "FORCE_COLOR", "NO_COLOR", "_TRIMARAN_COMPLETE")  # fmt: skip
READ_LATER = ("PYTHONPATH", "PYTHONUNBUFFERED", "TORCH_FR_BUFFER_SIZE", "PYTORCH_NVML_BASED_CUDA_CHECK",
              "TORCHELASTIC_", "TORCH_NCCL_", "WANDB_SERVICE")  # fmt: skip
ENVIRONMENT = dict(os.environ)  # in which torch was imported
THREADS = frozenset(threading.enumerate())
IDLE_THREADS = (
    "run-directory",
    "lease",
    "RendezvousKeepAliveTimer",
    "wandb-",
    "Otel",
)  # beginnings of the names of threads that only wait
PYTHON_SIGNALS = {signal.SIGPIPE: signal.SIG_IGN, signal.SIGXFSZ: signal.SIG_IGN,
                  signal.SIGINT: signal.default_int_handler}  # fmt: skip
TORCH_SEED = torch.initial_seed()  # of a new interpreter
KEPT: list[object] = []  # whose ends would close descriptors of others


class Start(NamedTuple):
    """The arguments of `_posixsubprocess.fork_exec`, in their order."""

    args: Sequence[bytes]
    executables: Sequence[bytes]
    close_fds: bool
    kept_fds: Sequence[int]
    folder: str | bytes | None
    environment: Sequence[bytes] | None
    p2cread: int
    p2cwrite: int
    c2pread: int
    c2pwrite: int
    errread: int
    errwrite: int
    errpipe_read: int
    errpipe_write: int
    restore_signals: bool
    start_new_session: bool
    process_group: int
    group: int | None
    groups: Sequence[int] | None
    user: int | None
    umask: int
    preexec_fn: Callable[[], object] | None
    use_vfork: bool


def start_warm_commands() -> None:
    """Fork Trimaran's commands from now on."""
    subprocess._fork_exec = fork_or_start  # type: ignore[attr-defined]


def start_cold_commands() -> None:
    """Start a new interpreter for every command from now on."""
    subprocess._fork_exec = START_PROGRAM  # type: ignore[attr-defined]


def fork_or_start(*arguments: Any) -> int:
    """Return the process id of a fork that runs the module which the arguments name; or of the program itself."""
    if len(arguments) != len(Start._fields):
        return START_PROGRAM(*arguments)
    start = Start(*arguments)
    words = [os.fsdecode(each) for each in start.args]
    environment = dict(os.environ) if start.environment is None else _parse_environment(start.environment)
    if (command := _module_and_arguments(words)) is None or not _can_fork(start, environment):
        return START_PROGRAM(*arguments)
    _import_modules()
    paths = _paths()
    if (pid := os.fork()) == 0:
        _run_and_exit(start, words, environment, [*command], paths)
    return pid


def _parse_environment(lines: Sequence[bytes]) -> dict[str, str]:
    pairs = (os.fsdecode(line).partition("=") for line in lines)
    return {name: value for name, _, value in pairs}


def _module_and_arguments(words: Sequence[str]) -> Sequence[str] | None:
    """Return the module of a command and its arguments; None unless it is one of MODULES."""
    program = Path(words[0])
    if program.name == "trimaran" and program.parent == Path(sys.executable).parent:
        return ["trimaran", *words[1:]]
    if words[0] != sys.executable:
        return None
    rest = words[2:] if words[1:2] == ["-u"] else words[1:]
    return rest[1:] if rest[:1] == ["-m"] and rest[1:2] and rest[1] in MODULES else None


def _can_fork(start: Start, environment: Mapping[str, str]) -> bool:
    """Return whether a fork would be as good as a new interpreter."""
    has_another_user = (start.group, start.groups, start.user) != (None, None, None) or start.umask >= 0
    differing = {name for name in environment.keys() | ENVIRONMENT.keys()
                 if environment.get(name) != ENVIRONMENT.get(name)}  # fmt: skip
    return (
        start.close_fds
        and not has_another_user
        and _can_set_command_line()
        and not any(name.startswith(READ_AT_IMPORT) and not name.startswith(READ_LATER) for name in differing)
        and not dist.is_initialized()
        and not torch.cuda.is_available()  # a driver that was asked for its devices does not survive a fork
        and asyncio._get_running_loop() is None  # other libraries remember that one runs in this thread
        and threading.current_thread() is threading.main_thread()
        and all(_is_idle(each) for each in threading.enumerate())
    )


def _is_idle(thread: threading.Thread) -> bool:
    """Return whether a thread holds no lock that a fork would inherit."""
    return thread is threading.main_thread() or thread in THREADS or thread.name.startswith(IDLE_THREADS)


@functools.cache
def _can_set_command_line() -> bool:
    """Return whether the kernel lets a process change its command line, which some containers forbid."""
    if pid := os.fork():
        return os.waitpid(pid, 0)[1] == 0
    try:
        _set_command_line([sys.executable], {})
        os._exit(0)
    finally:
        os._exit(1)


@functools.cache
def _import_modules() -> None:
    """Import what the forks need, once."""
    for name in (*LAZY_MODULES, *MODULES[:-1], "trimaran.app.commands.train", "torch.distributed.run"):
        import_module(f"{name}.__main__" if name in MODULES[:2] else name)


@functools.cache
def _paths() -> list[str]:
    """Return where an interpreter looks for modules, without the current folder and PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", "import sys; print(*sys.path[1:], sep='\\n')"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()


def _run_and_exit(
    start: Start, words: Sequence[str], environment: Mapping[str, str], command: list[str], paths: Sequence[str]
) -> NoReturn:
    """Become the process that was asked for, run the module, and exit as an interpreter does."""
    try:
        gc.freeze()  # a garbage collection among the objects of the tests takes a second and copies their pages
        gc.unfreeze = lambda: None  # which a change of the plan calls, for the sake of CUDA graphs
        _set_up_process(start)
        _forget_tests()
        _set_command_line(words, environment)
        os.environ.clear()
        os.environ.update(environment)
        outer = [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each]
        sys.path[:] = [os.getcwd(), *map(os.path.abspath, outer), *paths]
        _forget_own_modules()
        _reset_libraries()
        _open_standard_streams(unbuffered=bool(environment.get("PYTHONUNBUFFERED")))
    except BaseException:
        os.write(start.errpipe_write, b"SubprocessError:0:" + traceback.format_exc().encode())
        os._exit(255)
    os.close(start.errpipe_write)
    code = _run(command)
    os._exit(code)


def _set_up_process(start: Start) -> None:
    """Do what happens between a fork and the execution of a program, in the order of `_posixsubprocess.c`."""
    _connect_standard_streams([start.p2cread, start.c2pwrite, start.errwrite])
    if start.folder is not None:
        os.chdir(start.folder)
    if start.start_new_session:
        os.setsid()
    if start.process_group >= 0:
        os.setpgid(0, start.process_group)
    _reset_signals()
    if start.preexec_fn is not None:
        start.preexec_fn()
    first = 3
    for kept in sorted({*start.kept_fds, start.errpipe_write}):
        os.closerange(first, kept)
        first = max(first, kept + 1)
    os.closerange(first, max(os.sysconf("SC_OPEN_MAX"), 1 << 16))


def _connect_standard_streams(ends: list[int]) -> None:
    """Give the standard streams the descriptors in `ends`; those with -1 stay as they are."""
    for number, end in enumerate(ends):
        if 0 <= end < number:  # it would be overwritten
            ends[number] = os.dup(end)
    for number, end in enumerate(ends):
        if end >= 0 and end != number:
            os.dup2(end, number)
        elif end == number:
            os.set_inheritable(number, True)


def _reset_signals() -> None:
    """Forget handlers: ignored signals stay ignored, and Python has its own for three others."""
    signal.set_wakeup_fd(-1)
    faulthandler.disable()
    faulthandler.cancel_dump_traceback_later()
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if number not in (signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL):
            faulthandler.unregister(number)
        if number in PYTHON_SIGNALS:
            if number != signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, PYTHON_SIGNALS[signal.Signals(number)])
        elif signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _forget_tests() -> None:
    """Leave out what pytest and the tests have registered in the standard library."""
    finalizers: Any = weakref.finalize
    KEPT.extend((logging.root.handlers[:], sys.meta_path[:], dict(finalizers._registry)))
    atexit._clear()
    finalizers._registry.clear()
    finalizers._registered_with_atexit = False
    atexit.register(logging.shutdown)
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
    multiprocessing.process._children = set()  # type: ignore[attr-defined]
    multiprocessing.process._process_counter = itertools.count(1)  # type: ignore[attr-defined]
    tracker: Any = multiprocessing.resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None
    asyncio._set_running_loop(None)
    asyncio.set_event_loop_policy(None)
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    sys.meta_path[:] = [each for each in sys.meta_path if not type(each).__module__.startswith("_pytest")]
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category, append=True)
    warnings.showwarning = _show_warning


def _show_warning(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
    (file or sys.stderr).write(warnings.formatwarning(message, category, filename, lineno, line))


def _forget_own_modules() -> None:
    """Forget modules that are neither installed nor Trimaran's, whose imports inject faults, and Trimaran's caches."""
    roots = (sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(os.__file__)))
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.partition(".")[0] == "trimaran":
            for each in _caches(module):
                each()
        elif name == "tests" or name.startswith("tests.") or (isinstance(file, str) and not file.startswith(roots)):
            KEPT.append(sys.modules.pop(name))


def _caches(module: ModuleType) -> Iterator[Callable[[], None]]:
    for each in list(vars(module).values()):
        if callable(clear := getattr(each, "cache_clear", None)) and getattr(each, "__module__", "") == module.__name__:
            yield clear


def _reset_libraries() -> None:
    """Give torch and the generators of random numbers the state that they have in a new interpreter."""
    random.seed()
    np.random.seed()
    torch.manual_seed(TORCH_SEED)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)


def _open_standard_streams(*, unbuffered: bool) -> None:
    """Open the standard streams of this process anew: pytest has put its own there."""
    KEPT.extend((sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__))
    for number, name, errors in ((0, "stdin", "strict"), (1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        try:
            raw = io.FileIO(number, "r" if number == 0 else "w", closefd=False)
        except OSError:
            stream = None
        else:
            raw.name = f"<{name}>"  # type: ignore[misc]
            binary = io.BufferedReader(raw) if number == 0 else raw if unbuffered else io.BufferedWriter(raw)
            stream = io.TextIOWrapper(binary, encoding="utf-8", errors=errors,  # type: ignore[arg-type]
                                      line_buffering=number == 2 or raw.isatty(), write_through=unbuffered)  # fmt: skip
            stream.mode = "r" if number == 0 else "w"  # type: ignore[attr-defined]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(command: list[str]) -> int:
    """Run a module as `python -m` does and return the exit code."""
    sys.argv[:] = command
    is_package = hasattr(sys.modules.get(command[0]), "__path__")
    KEPT.append(sys.modules.pop(f"{command[0]}.__main__" if is_package else command[0], None))  # it runs anew
    try:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = _exit_code(error)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = -signal.SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except OSError:
            code = code or 120
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return code & 0xFF


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code
    print(error.code, file=sys.stderr)
    return 1


class _MemoryMap(ctypes.Structure):
    """`prctl_mm_map` of the kernel."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("start_code", "end_code", "start_data", "end_data", "start_brk", "brk",
                                               "start_stack", "arg_start", "arg_end", "env_start", "env_end", "auxv")),
        ("auxv_size", ctypes.c_uint32), ("exe_fd", ctypes.c_uint32),
    ]  # fmt: skip


PR_SET_NAME, PR_SET_MM, PR_SET_MM_MAP = 15, 35, 14
# Places in /proc/self/stat, counted from 1.
STAT_FIELDS = {"start_code": 26, "end_code": 27, "start_stack": 28, "start_data": 45, "end_data": 46, "start_brk": 47}


def _set_command_line(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Have the kernel show these arguments and this environment for this process, by which tests find it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    arguments = b"".join(os.fsencode(each) + b"\0" for each in words)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    memory = mmap.mmap(-1, len(arguments) + len(variables), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(arguments + variables)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    KEPT.append(memory)
    middle, end = start + len(arguments), start + len(arguments) + len(variables)
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    fields = {name: int(stat[place - 3]) for name, place in STAT_FIELDS.items()}
    shown = _MemoryMap(**fields, brk=libc.sbrk(0), arg_start=start, arg_end=middle, env_start=middle, env_end=end,
                       auxv=0, auxv_size=0, exe_fd=0xFFFFFFFF)  # fmt: skip
    if libc.prctl(PR_SET_MM, PR_SET_MM_MAP, ctypes.byref(shown), ctypes.sizeof(shown), 0):
        raise OSError(ctypes.get_errno(), "prctl")
    libc.prctl(PR_SET_NAME, os.fsencode(os.path.basename(words[0]))[:15], 0, 0, 0)
