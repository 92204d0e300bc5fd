"""A thread beside the training loop: it writes the rank's heartbeat, and a rank report when the supervisor asks.

The supervisor asks through the heartbeat board; `incidents/question-N.json` names the folder of the report. If the
thread cannot run because other code holds the GIL, SIGUSR2 still writes the main thread's stack to
`logs/rank-N.stacks`.
"""

import contextlib
import faulthandler
import json
import logging
import os
import platform
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import psutil
import torch

from trimaran.core.regular_files import append_regular_file, read_regular_text
from trimaran.run import RunDirectory
from trimaran.train.process.flight_recorder import MessageCounts, group_members, operations
from trimaran.train.process.supervisor_link import SupervisorLink

log = logging.getLogger(__name__)

BEAT_SECONDS = 0.25
MAX_FRAMES = 8


class HeartbeatThread:
    """Runs a rank's heartbeat thread inside a `with` block. Does nothing for a rank without a supervisor."""

    def __init__(self, run: RunDirectory, rank: int, link: SupervisorLink) -> None:
        self._run, self._rank, self._link = run, rank, link
        self._main, self._stopped = threading.main_thread().ident, threading.Event()
        self._messages = MessageCounts()
        self._thread = threading.Thread(target=self._beat, name="trimaran-heartbeat", daemon=True)

    def __enter__(self) -> Self:
        if self._link.board is not None:
            # Stays open while the handler is registered: the handler writes to its descriptor.
            self._stacks = append_regular_file(self._run.stacks(self._rank))
            self._stacks.truncate(0)
            # Only the main thread's stack: reading the stacks of running threads crashed about 1 rank in 100.
            faulthandler.register(signal.SIGUSR2, file=self._stacks, all_threads=False)
            self._stop_counting = self._messages.start()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._link.board is not None:
            self._stopped.set()
            self._thread.join()
            self._stop_counting()
            faulthandler.unregister(signal.SIGUSR2)
            self._stacks.close()

    def _beat(self) -> None:
        board, local_rank = self._link.board, self._link.local_rank
        assert board is not None
        answered = board.read(local_rank).answered
        while not self._stopped.wait(BEAT_SECONDS):
            question = board.request
            if question != answered:
                try:
                    self._write_report()
                except Exception:  # must not end the rank; the question counts as answered
                    log.exception("the rank report could not be written")
                answered = question
            board.beat(local_rank, answered=answered)

    def _write_report(self) -> None:
        question = json.loads(read_regular_text(self._run.report_request(self._rank)))
        folder = self._run.path / question["folder"]
        frames = sys._current_frames()
        write_atomically(folder / f"rank-{self._rank}.stacks.txt", format_stacks(frames))
        write_atomically(folder / f"rank-{self._rank}.json", json.dumps(self._report(frames), separators=(",", ":")))

    def _report(self, frames: dict[int, FrameType]) -> dict[str, Any]:
        assert self._link.board is not None
        heartbeat = self._link.board.read(self._link.local_rank)
        return {
            "rank": self._rank,
            "pid": os.getpid(),
            "host": platform.node(),
            "time": time.time(),
            "starved": cpu_starved_seconds(),
            "memory": memory_in_use(),
            "section": heartbeat.section,
            "step": heartbeat.step,
            "entered_seconds_ago": time.monotonic() - heartbeat.entered,
            "frames": frames_of(frames.get(self._main or 0)),
            "groups": group_members(),
            "operations": operations(),
            "sent": self._messages.sent,
            "received": self._messages.received,
            "messages": list(self._messages.recent),
        }


def memory_in_use() -> dict[str, int]:
    """Return this process's bytes: resident on the host, and allocated and reserved by its CUDA allocator."""
    num_bytes = {"resident": psutil.Process().memory_info().rss}
    if torch.cuda.is_initialized():  # safe from any thread: it does not wait for the device
        stats = [torch.cuda.memory_stats(index) for index in range(torch.cuda.device_count())]
        for name in ("allocated", "reserved"):
            num_bytes[name] = sum(each.get(f"{name}_bytes.all.current", 0) for each in stats)
    return num_bytes


def cpu_starved_seconds() -> float:
    """Return how long this process's threads were runnable without getting a core; 0 where the kernel does not say."""
    total = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            total += int(path.read_text(encoding="ascii").split()[1])  # nanoseconds
    return total / 1e9


def frames_of(frame: FrameType | None) -> list[dict[str, Any]]:
    """Return the innermost calls of a thread, innermost first: file, line, function, and the line's text."""
    calls = traceback.extract_stack(frame)[::-1][:MAX_FRAMES] if frame is not None else []
    return [
        {"file": each.filename, "line": each.lineno, "function": each.name, "text": each.line or ""} for each in calls
    ]


def format_stacks(frames: dict[int, FrameType]) -> str:
    """Return the stacks of all threads of this process, the main one first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    order = sorted(frames, key=lambda ident: (ident != main, ident))
    parts = [f"thread {names.get(each, each)}\n{''.join(traceback.format_stack(frames[each]))}" for each in order]
    return "\n".join(parts)


def write_atomically(path: Path, text: str) -> None:
    """Write a file that readers see complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
