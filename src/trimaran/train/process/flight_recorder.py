"""What a rank's communication waits for: torch's flight recorder, and a count of messages, which it leaves out.

The recorder runs when TORCH_FR_BUFFER_SIZE was in the environment before torch was imported. On gloo it knows the
collectives and, of each, only whether it is over; it knows no messages between two ranks and no members of groups.
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

NUM_OPERATIONS = 600  # of the recorder's entries, how many go into a rank report
NUM_MESSAGES = 400


class Messages:
    """Counts the messages that this rank has begun to send and to receive, by peer. One for each process."""

    def __init__(self) -> None:
        self.sent: dict[int, int] = {}
        self.received: dict[int, int] = {}
        self.recent: deque[dict[str, Any]] = deque(maxlen=NUM_MESSAGES)

    def listen(self) -> Callable[[], None]:
        """Count from now on; the answer ends it.

        Every message of Python code, batched or not, passes these two methods, and no C++ code sends any. A hook for
        them exists in no backend, so the methods are wrapped: about a microsecond each.
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
    """Return the ranks of each group that this rank belongs to."""
    # new_group leaves a number in the place of a group that this rank is not in.
    groups = [(_world.pg_names.get(group), ranks) for group, ranks in list(_world.pg_group_ranks.items())]
    return {name: sorted(ranks) for name, ranks in groups if name is not None}


def operations() -> list[dict[str, Any]]:
    """Return the last collectives that this rank has begun, oldest first; `number` counts those of one group.

    `state` is `scheduled` on gloo for ever; on NCCL it becomes `started` and `completed`.
    """
    entries = json.loads(_recorder._dump_fr_trace_json()).get("entries", [])
    return [
        {
            "group": entry["process_group"][0],
            "number": entry["collective_seq_id"],
            "op": entry["profiling_name"].rpartition(":")[2],
            "sizes": entry["input_sizes"],
            "dtypes": entry["input_dtypes"],
            "state": entry["state"],
            "done": bool(entry["retired"]),
            "time": entry["time_created_ns"] / 1e9,
        }
        for entry in entries[-NUM_OPERATIONS:]
        if not entry["is_p2p"]  # NCCL records messages too; they are counted above
    ]
