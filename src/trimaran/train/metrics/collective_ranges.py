"""Ranges around the calls of collectives, with their group and their bytes."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# The operators of torch that every collective goes through: those of Python code, of DDP and FSDP, of functional
# operators and of compiled code.
NAMES = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "barrier": "barrier",
    "broadcast_": "broadcast",
    "gather_": "gather",
    "recv_": "recv",
    "reduce_": "reduce",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "scatter_": "scatter",
    "send": "send",
}
WORLD_DESCRIPTION = "default_pg"
MESH_PREFIX = "mesh_"  # torch's, before the name of a mesh dim


# The place of our kernels: the operators of every call pass it, on their way to that of their device. It has no other
# use for collectives.
KEY = torch._C.DispatchKey.BackendSelect


class CollectiveRanges:
    """Ranges such as `all_reduce dp_shard 4194304 B`, on the thread that starts the collective.

    A range covers the call. On a GPU the collective itself runs later, on a stream of its own; the tool links both.
    """

    def __init__(self, push: Callable[[str], Any], pop: Callable[[], Any]) -> None:
        self._push, self._pop = push, pop
        self._below = torch._C._dispatch_keyset_full_after(KEY)
        self._library: Any = None

    def install(self) -> None:
        """Let every collective of this process pass our kernels, which call it in a range."""
        self._library = torch.library.Library("c10d", "IMPL")
        for operator, name in NAMES.items():
            self._library.impl(operator, self._ranged(operator, name), KEY.name, with_keyset=True)

    def remove(self) -> None:
        self._library._destroy()
        self._library = None

    def _ranged(self, operator: str, name: str) -> Callable[..., Any]:
        collective = getattr(torch.ops.c10d, operator).default

        def call(keys: Any, *values: Any) -> Any:
            self._push(f"{name} {_group_of(values)} {_num_bytes(values)} B")
            try:
                # It releases the GIL: gloo's threads need it to free tensors, while they hold a lock of new calls.
                return collective.redispatch(keys & self._below, *values)
            finally:
                self._pop()

        return call


def _group_of(values: tuple[Any, ...]) -> str:
    """Return the axis of the collective's group; `world` for all ranks."""
    boxed = next(
        each for each in values if isinstance(each, torch.ScriptObject)
    )  # before the reduction, if there is one
    group = dist.ProcessGroup.unbox(boxed)
    text = group.group_desc
    if text == WORLD_DESCRIPTION:
        return "world"
    return text.removeprefix(MESH_PREFIX) if text.startswith(MESH_PREFIX) else f"group-{group.group_name}"


def _num_bytes(values: tuple[Any, ...]) -> int:
    """Return the bytes of the larger of the collective's input and output."""
    return max((_tensor_bytes(each) for each in values), default=0)


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(_tensor_bytes, value)) if isinstance(value, list | tuple) else 0
