"""A thread beside the training loop that shows that the rank lives, and tells what it waits for when it is asked.

The supervisor asks through the heartbeat board; `incidents/question-N.json` says in which folder the answer goes. When the
heartbeat thread cannot run, since other code holds the interpreter, SIGUSR2 still has the main thread's stack
written to `logs/rank-N.stacks`.
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

from trimaran.run import RunDirectory
from trimaran.train.process.flight_recorder import Messages, group_members, operations
from trimaran.train.process.supervisor_link import SupervisorLink

log = logging.getLogger(__name__)

BEAT_SECONDS = 0.25
NUM_FRAMES = 8


class HeartbeatThread:
    """A rank's heartbeat thread, from `with` to its end. A rank without a supervisor has one that does nothing."""

    def __init__(self, run: RunDirectory, rank: int, link: SupervisorLink) -> None:
        self._run, self._rank, self._link = run, rank, link
        self._main, self._over = threading.main_thread().ident, threading.Event()
        self._messages = Messages()
        self._thread = threading.Thread(target=self._watch, name="trimaran-witness", daemon=True)

    def __enter__(self) -> Self:
        if self._link.board is not None:
            # Kept open for as long as the process lives: the handler writes to the descriptor, whatever happens.
            self._stacks = self._run.stacks(self._rank).open("w", encoding="utf-8")
            # The main thread's own stack only: reading those of threads that run crashed 1 rank in some hundred tries.
            faulthandler.register(signal.SIGUSR2, file=self._stacks, all_threads=False)
            self._unwrap = self._messages.listen()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._link.board is not None:
            self._over.set()
            self._thread.join()
            self._unwrap()
            faulthandler.unregister(signal.SIGUSR2)
            self._stacks.close()

    def _watch(self) -> None:
        board, place = self._link.board, self._link.place
        assert board is not None
        answered = board.read(place).answered
        while not self._over.wait(BEAT_SECONDS):
            question = board.question
            if question != answered:
                try:
                    self._testify()
                except (
                    Exception
                ):  # a heartbeat thread that cannot write must not take the rank with it, and has still answered
                    log.exception("the rank report could not be filed")
                answered = question
            board.live(place, answered=answered)

    def _testify(self) -> None:
        question = json.loads(self._run.question(self._rank).read_text(encoding="utf-8"))
        folder = self._run.path / question["folder"]
        frames = sys._current_frames()
        write_whole(folder / f"rank-{self._rank}.stacks.txt", show_stacks(frames))
        write_whole(folder / f"rank-{self._rank}.json", json.dumps(self._account(frames), separators=(",", ":")))

    def _account(self, frames: dict[int, FrameType]) -> dict[str, Any]:
        assert self._link.board is not None
        heartbeat = self._link.board.read(self._link.place)
        return {
            "rank": self._rank,
            "pid": os.getpid(),
            "host": platform.node(),
            "time": time.time(),
            "starved": starved_seconds(),
            "memory": memory_now(),
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


def memory_now() -> dict[str, int]:
    """Return the bytes that this process holds: resident, and of GPUs what its allocator has given out and reserved."""
    found = {"resident": psutil.Process().memory_info().rss}
    if torch.cuda.is_initialized():  # any thread may ask: nothing waits for the device
        every = [torch.cuda.memory_stats(index) for index in range(torch.cuda.device_count())]
        for name in ("allocated", "reserved"):
            found[name] = sum(each.get(f"{name}_bytes.all.current", 0) for each in every)
    return found


def starved_seconds() -> float:
    """Return for how long threads of this process were ready to run and others had the cores; 0 where unknown."""
    total = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            total += int(path.read_text(encoding="ascii").split()[1])  # nanoseconds
    return total / 1e9


def frames_of(frame: FrameType | None) -> list[dict[str, Any]]:
    """Return the innermost calls of a thread, innermost first: file, line, function, and the line's text."""
    calls = traceback.extract_stack(frame)[::-1][:NUM_FRAMES] if frame is not None else []
    return [
        {"file": each.filename, "line": each.lineno, "function": each.name, "text": each.line or ""} for each in calls
    ]


def show_stacks(frames: dict[int, FrameType]) -> str:
    """Return the stacks of all threads of this process, the main one first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    order = sorted(frames, key=lambda ident: (ident != main, ident))
    parts = [f"thread {names.get(each, each)}\n{''.join(traceback.format_stack(frames[each]))}" for each in order]
    return "\n".join(parts)


def write_whole(path: Path, text: str) -> None:
    """Write a file that others see whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
