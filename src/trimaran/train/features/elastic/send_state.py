"""Sends the state of a replica to others that join, rank by rank, from memory to memory."""

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.parallel.rank_share import TORCH_DTYPES, copy_values, meta_of
from trimaran.parallel.tensor_regions import IndexEntry, TensorMeta
from trimaran.parallel.tensor_shards import CheckpointState, TensorShard


@torch.no_grad()
def send_state(state: CheckpointState, step: int, group: dist.ProcessGroup) -> None:
    """Send the state of this rank to the other ranks of `group`, which is its first rank."""
    state.gather()
    shards = [*_by_place(state.shards()).values()]
    rows = [[each.key, meta_of(each).dtype, each.shape, each.start, tuple(each.tensor.shape)] for each in shards]
    _broadcast_json({"step": step, "progress": state.progress(), "shards": rows}, group)
    for shard in shards:
        values = torch.empty(tuple(shard.tensor.shape), dtype=shard.tensor.dtype)
        copy_values(shard.tensor, values)
        _broadcast(values, group)


@torch.no_grad()
def receive_state(state: CheckpointState, group: dist.ProcessGroup) -> tuple[int, dict[str, Any]]:
    """Fill the shards of this rank with what `send_state` sends; return its step and its progress.

    `state.restore` completes it.
    """
    header = _broadcast_json(None, group)
    rows = [
        (key, dtype, tuple(shape), tuple(start), tuple(size)) for key, dtype, shape, start, size in header["shards"]
    ]
    index = {key: IndexEntry(TensorMeta(dtype, shape), ()) for key, dtype, shape, _, _ in rows}
    targets: dict[tuple[str, tuple[int, ...]], list[TensorShard]] = {}
    for shard in state.shards_from(index):
        targets.setdefault((shard.key, tuple(shard.start)), []).append(shard)
    for key, dtype, _, start, size in rows:
        values = torch.empty(size, dtype=TORCH_DTYPES[dtype])
        _broadcast(values, group)
        for shard in targets.pop((key, start)):
            shard.tensor.copy_(values)
    if targets:
        raise RuntimeError(f"the other replica has no {next(iter(targets))[0]}")
    return header["step"], header["progress"]


def _by_place(shards: Sequence[TensorShard]) -> dict[tuple[str, tuple[int, ...]], TensorShard]:
    """Return the shards by key and start, each once: tied parameters are the same tensor."""
    return {(each.key, tuple(each.start)): each for each in shards}


def _broadcast(values: Tensor, group: dist.ProcessGroup) -> None:
    if values.numel():
        as_bytes = values.contiguous().reshape(-1).view(torch.uint8)
        dist.broadcast(as_bytes, group=group, group_src=0)


def _broadcast_json(value: Any, group: dist.ProcessGroup) -> Any:
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    size = torch.tensor([len(data)])
    dist.broadcast(size, group=group, group_src=0)
    data = data if group.rank() == 0 else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, group=group, group_src=0)
    return json.loads(data.numpy().tobytes())
