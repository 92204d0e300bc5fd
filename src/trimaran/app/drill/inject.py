"""Injects faults into the processes and files of a run. What lasts is undone at the end of its `with` block."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import psutil

from trimaran.app.drill.disk_fill import filled_disk
from trimaran.app.drill.fault_kinds import DrillFault, FaultName
from trimaran.app.drill.find_processes import RunProcesses
from trimaran.app.drill.network_cut import cut_network, find_peers
from trimaran.checkpoint.step_dirs import newest_step, step_path
from trimaran.core import UserError
from trimaran.core.regular_files import write_atomically
from trimaran.runs import RunDirectory
from trimaran.runs.run_requests import request_kill, write_change_request

SLOW_PERIOD_SECONDS = 0.08  # in each, a slow rank runs for a part; shorter than most steps
MAX_CUT_SECONDS = 600.0


@contextmanager
def inject(processes: RunProcesses, fault: DrillFault) -> Iterator[None]:
    """Inject `fault`. What it has changed and still exists is restored at the end."""
    with INJECTIONS[fault.kind.name](processes, fault):
        yield


def send_signal(process: psutil.Process, number: signal.Signals) -> None:
    """Send a signal; psutil refuses if the pid belongs to another process by now."""
    process.send_signal(number)


@contextmanager
def stopped_process(process: psutil.Process) -> Iterator[None]:
    """Stop a process with SIGSTOP; continue it at the end if it still exists."""
    try:  # before the signal: Ctrl-C may follow it at once
        send_signal(process, signal.SIGSTOP)
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            send_signal(process, signal.SIGCONT)


@contextmanager
def slowed_process(process: psutil.Process, factor: float) -> Iterator[None]:
    """Let a process run for only 1/`factor` of the time, in short turns, until the end of the block."""
    over = threading.Event()

    def take_turns() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            while not over.is_set():
                with stopped_process(process):
                    over.wait(SLOW_PERIOD_SECONDS * (1 - 1 / factor))
                over.wait(SLOW_PERIOD_SECONDS / factor)

    thread = threading.Thread(target=take_turns, name="slow-rank", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def damage_checkpoint(run: RunDirectory) -> Path:
    """Flip one bit in the middle of the largest file of the newest checkpoint, and return that file."""
    step = newest_step(run.checkpoints)
    if step is None:
        raise UserError("S033", "this run has no complete checkpoint yet", where=str(run.checkpoints),
                        fix="save one earlier: --set checkpoint.every=10")  # fmt: skip
    folder = step_path(run.checkpoints, step)
    file = max(folder.glob("*.safetensors"), key=lambda path: (path.stat().st_size, path.name))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    write_atomically(file, bytes(data))  # another checkpoint may share the file through a hard link
    return file


@contextmanager
def _send(process: psutil.Process, number: signal.Signals) -> Iterator[None]:
    send_signal(process, number)
    yield


def oldest_loader(processes: RunProcesses, rank: int) -> psutil.Process:
    """Return the oldest loader process of `rank`; raise if it has none."""
    loaders = processes.loaders(rank)
    if not loaders:
        raise UserError("S033", f"rank {rank} has no loader processes: a thread loads its batches",
                        where="--kill-loader", fix="start the run with --set data.workers=1")  # fmt: skip
    return loaders[0]


@contextmanager
def _damage_and_kill(processes: RunProcesses, fault: DrillFault) -> Iterator[None]:
    """Damage the newest checkpoint once nothing can save another one, and end the run with its copies in memory."""
    with stopped_process(processes.supervisor):
        for process in processes.ranks.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                send_signal(process, signal.SIGKILL)
        damage_checkpoint(processes.run)
        send_signal(processes.supervisor, signal.SIGKILL)
        yield


@contextmanager
def _kill_in_change(processes: RunProcesses, fault: DrillFault) -> Iterator[None]:
    """Have the rank die in a change of the plan that moves no values and changes no results."""
    run = processes.run
    request_kill(run, _rank(fault), fault.phase)
    try:
        reason = f"drill: {fault.title}"
        write_change_request(run, {"plan.cuda_graphs": not run.read_plan().cuda_graphs}, reason=reason)
        yield
    finally:
        run.kill_request.unlink(missing_ok=True)


def _rank(fault: DrillFault) -> int:
    assert fault.rank is not None, f"{fault.kind.name} needs a rank"
    return fault.rank


INJECTIONS: dict[FaultName, Callable[[RunProcesses, DrillFault], AbstractContextManager[object]]] = {
    "kill": lambda processes, fault: _send(processes.rank(_rank(fault)), signal.SIGKILL),
    "kill-in-change": _kill_in_change,
    "stop": lambda processes, fault: stopped_process(processes.rank(_rank(fault))),
    "slow": lambda processes, fault: slowed_process(processes.rank(_rank(fault)), fault.factor),
    "kill-loader": lambda processes, fault: _send(oldest_loader(processes, _rank(fault)), signal.SIGKILL),
    "kill-fork-server": lambda processes, _: _send(processes.fork_server, signal.SIGKILL),
    "fill-disk": lambda processes, _: filled_disk(processes.run.path),
    "cut": lambda processes, fault: cut_network(find_peers(processes, fault.node), seconds=MAX_CUT_SECONDS),
    "terminate": lambda processes, _: _send(processes.supervisor, signal.SIGTERM),
    "kill-supervisor": lambda processes, _: _send(processes.supervisor, signal.SIGKILL),
    "damage-checkpoint": _damage_and_kill,
}
