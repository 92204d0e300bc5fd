"""Runs a rehearsed rank in a process of its own, whose crash is an answer. Imports no torch."""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from trimaran.core import UserError
from trimaran.core.child_process import kill_tree
from trimaran.planner.measure.rank_task import RankAnswer, RankTask
from trimaran.runs.compile_cache import compile_cache
from trimaran.runs.out_of_memory import says_out_of_memory
from trimaran.runs.rank_environment import worker_environment

MAX_LOG_BYTES = 1 << 16  # that are read of the end of a rank's output


def run_rank(task: RankTask, environment: Mapping[str, str], *, limit_seconds: float) -> RankAnswer:
    """Return how the rank ended. Raises the UserError with which the trainer would refuse it.

    `environment` is the caller's; the rank gets the variables of the plan's real ranks on top of it.
    """
    own = worker_environment(environment, task.plan, on_cpu=task.on_cpu, deterministic=task.recipe.train.deterministic)
    with tempfile.TemporaryDirectory(prefix="trimaran-rehearse-") as folder:
        files = [Path(folder) / name for name in ("task.json", "answer.json", "log.txt")]
        files[0].write_text(task.as_json(), encoding="utf-8")
        command = [sys.executable, "-m", "trimaran.train.rehearsal", str(files[0]), str(files[1])]
        with files[2].open("wb") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                       env={**environment, **own, **compile_cache(environment)})  # fmt: skip
            try:
                code = process.wait(limit_seconds)
            except subprocess.TimeoutExpired:
                return RankAnswer(status="failed", message=f"it took more than {limit_seconds:,.0f} s")
            finally:
                kill_tree(process)
        if code == 0 and files[1].is_file():
            return _answer(files[1].read_text(encoding="utf-8"))
        return _crash(code, files[2])


def _answer(text: str) -> RankAnswer:
    answer = RankAnswer.from_json(text)
    if answer.error is not None:
        first = answer.error
        raise UserError(first["code"], first["what"], where=first["where"], fix=first["fix"])
    return answer


def _crash(code: int, log: Path) -> RankAnswer:
    """Return the answer for a process that ended without one: a signal, or the last line of its output."""
    text = log.read_bytes()[-MAX_LOG_BYTES:].decode(errors="replace")
    if code == -signal.SIGKILL:
        message = "the system killed it (SIGKILL), most likely because the host's memory was full"
        return RankAnswer(status="out of memory", message=message)
    lines = [line for line in text.splitlines() if line.strip()] or ["it wrote nothing"]
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    status = "out of memory" if says_out_of_memory(lines[-1]) else "failed"
    return RankAnswer(status=status, message=f"{name}: {lines[-1][:300]}")
