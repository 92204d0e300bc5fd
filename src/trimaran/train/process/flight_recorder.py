"""Reports which communication a rank has started: collectives from torch's flight recorder, and point-to-point counts.

The recorders run when TORCH_FR_BUFFER_SIZE was set before torch was imported. The one for gloo records collectives, and
of each only whether it has ended. It records neither point-to-point messages nor the members of groups. NCCL has its
own recorder, whose entries have the same keys. A group with both backends counts its operations once for each.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

_recorder: Any = torch._C._distributed_c10d  # its stubs leave the recorder out

MAX_OPERATIONS = 600  # recorder entries in a rank report
MAX_MESSAGES = 400
NCCL_SUFFIX = "/nccl"  # after the name of a group: its operations on GPUs


class MessageCounts:
    """Counts the sends and receives that this rank has started, by peer. One per process."""

    def __init__(self) -> None:
        self.sent: dict[int, int] = {}
        self.received: dict[int, int] = {}
        self.recent: deque[dict[str, Any]] = deque(maxlen=MAX_MESSAGES)

    def start(self) -> Callable[[], None]:
        """Start to count; return a function that stops it.

        Every message that Python code sends, batched or not, passes through `ProcessGroup.send` and `recv`, and C++
        code sends none. No backend has a hook for them, so both methods are wrapped: about a microsecond per call.
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


def group_members() -> dict[str, list[int]]:
    """Return the ranks of each process group that this rank belongs to, by group name."""
    # For a group without this rank, new_group leaves a number instead of a group.
    groups = [(_world.pg_names.get(group), ranks) for group, ranks in list(_world.pg_group_ranks.items())]
    members = {name: sorted(ranks) for name, ranks in groups if name is not None}
    return members | ({f"{name}{NCCL_SUFFIX}": ranks for name, ranks in members.items()} if _has_nccl() else {})


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
    """Return whether this process may have started NCCL operations."""
    return hasattr(_recorder, "_dump_nccl_trace_json") and torch.cuda.is_initialized()
