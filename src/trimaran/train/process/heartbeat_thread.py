"""A thread beside the training loop: it writes the rank's heartbeat, and a rank report when the supervisor asks.

The supervisor asks through the heartbeat board; `incidents/question-N.json` names the folder of the report. If the
thread cannot run because other code holds the GIL, SIGUSR2 still writes the main thread's stack to
`logs/rank-N.stacks`.

The report says which communication this rank has started. Torch's flight recorders run when TORCH_FR_BUFFER_SIZE was
set before torch was imported. The one for gloo records collectives, and of each only whether it has ended. It records
neither point-to-point messages nor the members of groups. NCCL has its own recorder, whose entries have the same keys.
A group with both backends counts its operations once for each.
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
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from trimaran.core import append_regular_file, read_regular_text, write_atomically
from trimaran.runs import RunDirectory
from trimaran.train.process.supervisor_link import SupervisorLink

log = logging.getLogger(__name__)

_recorder: Any = torch._C._distributed_c10d  # its stubs leave the recorder out

MAX_OPERATIONS = 600  # recorder entries in a rank report
MAX_MESSAGES = 400
NCCL_SUFFIX = "/nccl"  # after the name of a group: its operations on GPUs
BEAT_SECONDS = 0.25
MAX_FRAMES = 8


class MessageCounts:
    """Counts the sends and receives that this rank has started, by peer. One per process."""

    def __init__(self) -> None:
        self.sent: dict[int, int] = {}
        self.received: dict[int, int] = {}
        self.recent: deque[dict[str, Any]] = deque(maxlen=MAX_MESSAGES)

    def start(self) -> Callable[[], None]:
        """Start to count; return a function that stops it.

        Every message of Python code passes `ProcessGroup.send` or `recv`, which are wrapped, as no backend has a hook.
        """
        kind: Any = dist.ProcessGroup
        send, receive = kind.send, kind.recv

        def counted_send(group: Any, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Any:
            self._count(group, self.sent, "send", peer)
            return send(group, tensors, peer, tag)

        def counted_receive(group: Any, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Any:
            self._count(group, self.received, "receive", peer)
            return receive(group, tensors, peer, tag)

        def unwrap() -> None:
            kind.send, kind.recv = send, receive

        kind.send, kind.recv = counted_send, counted_receive
        return unwrap

    def _count(self, group: Any, counts: dict[int, int], op: str, peer: int) -> None:
        peer = dist.get_global_rank(group, peer)
        counts[peer] = counts.get(peer, 0) + 1
        self.recent.append({"op": op, "peer": peer, "number": counts[peer], "time": time.time()})


def operations() -> list[dict[str, Any]]:
    """Return the last collectives that this rank has started, oldest first. `number` counts those of one group.

    `state` stays `scheduled` with gloo; with NCCL it becomes `completed`, or `started` if torch times collectives.
    """
    found = read_operations(_recorder._dump_fr_trace_json())
    if _has_nccl():
        found += read_operations(_recorder._dump_nccl_trace_json(), suffix=NCCL_SUFFIX)
    return sorted(found, key=lambda each: each["time"])[-MAX_OPERATIONS:]


def read_operations(dump: str | bytes, *, suffix: str = "") -> list[dict[str, Any]]:
    """Return the collectives in a recorder's JSON dump, oldest first. `suffix` is added to the names of groups."""
    return [
        {
            "group": f"{entry['process_group'][0]}{suffix}",
            "number": entry["collective_seq_id"],
            "op": entry["profiling_name"].rpartition(":")[2],
            "sizes": entry["input_sizes"],
            "dtypes": entry["input_dtypes"],
            "state": entry["state"],
            "done": bool(entry["retired"]) or entry["state"] == "completed",
            "time": entry["time_created_ns"] / 1e9,
        }
        for entry in json.loads(dump).get("entries", [])
        # NCCL records messages too, but `MessageCounts` has them. A batch of them is `coalesced` and has no own number.
        if not entry["is_p2p"] and entry["profiling_name"] != "nccl:coalesced"
    ]


def _has_nccl() -> bool:
    return hasattr(_recorder, "_dump_nccl_trace_json") and torch.cuda.is_initialized()


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
        folder.mkdir(parents=True, exist_ok=True)
        frames = sys._current_frames()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        main = threading.main_thread().ident
        order = sorted(frames, key=lambda ident: (ident != main, ident))
        parts = [f"thread {names.get(each, each)}\n{''.join(traceback.format_stack(frames[each]))}" for each in order]
        write_atomically(folder / f"rank-{self._rank}.stacks.txt", "\n".join(parts))
        heartbeat = self._link.heartbeat
        assert heartbeat is not None
        # The process groups of this rank. For a group without this rank, new_group leaves a number instead of a group.
        groups = [(_world.pg_names.get(group), ranks) for group, ranks in list(_world.pg_group_ranks.items())]
        members = {name: sorted(ranks) for name, ranks in groups if name is not None}
        if _has_nccl():
            members |= {f"{name}{NCCL_SUFFIX}": ranks for name, ranks in members.items()}
        memory = {"resident": psutil.Process().memory_info().rss}
        if torch.cuda.is_initialized():  # safe from any thread: it does not wait for the device
            stats = [torch.cuda.memory_stats(index) for index in range(torch.cuda.device_count())]
            for name in ("allocated", "reserved"):
                memory[name] = sum(each.get(f"{name}_bytes.all.current", 0) for each in stats)
        # How long threads were runnable without getting a core, in ns; 0 where the kernel does not say.
        starved = 0
        for path in Path("/proc/self/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, IndexError, ValueError):
                starved += int(path.read_text(encoding="ascii").split()[1])
        frame = frames.get(self._main or 0)
        calls = traceback.extract_stack(frame)[::-1][:MAX_FRAMES] if frame is not None else []
        facts = {
            "rank": self._rank,
            "pid": os.getpid(),
            "host": platform.node(),
            "time": time.time(),
            "starved": starved / 1e9,
            "memory": memory,
            "section": heartbeat.section,
            "step": heartbeat.step,
            "entered_seconds_ago": time.monotonic() - heartbeat.entered,
            "frames": [
                {"file": each.filename, "line": each.lineno, "function": each.name, "text": each.line or ""}
                for each in calls
            ],
            "groups": members,
            "operations": operations(),
            "sent": self._messages.sent,
            "received": self._messages.received,
            "messages": list(self._messages.recent),
        }
        write_atomically(folder / f"rank-{self._rank}.json", json.dumps(facts, separators=(",", ":")))
