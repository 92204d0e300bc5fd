"""Sends JSON values and int64 arrays between ranks.

Values travel as JSON text in tensors of bytes, in place of torch's object collectives, which unpickle what they
receive. A value is anything `json.dumps` takes; it comes back as `json.loads` gives it (tuples become lists). Values
may have any size, and each rank's may have another. The tensors are on the CPU where the group has a backend for it
(gloo), else on the current CUDA device (NCCL). `group=None` is the default group; `src` and `dst` are global ranks.
"""

import json
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


def all_gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the value of every rank in the group, in rank order. Every rank of the group must call it."""
    text = json.dumps(value).encode()
    lengths = all_gather_int64(np.array([len(text)]), group)[:, 0]
    padded = _to_bytes(text.ljust(int(lengths.max())), group)
    texts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(texts, padded, group=group)
    return [_from_bytes(each[:length]) for each, length in zip(texts, lengths.tolist(), strict=True)]


def broadcast_json(value: Any, src: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """Return the value of rank `src`, as it comes out of JSON, on every rank of the group, all of which call it."""
    is_source = dist.get_rank() == src
    message = _to_bytes(json.dumps(value).encode() if is_source else b"", group)
    length = torch.tensor([len(message)], device=message.device)
    dist.broadcast(length, src=src, group=group)
    message = message if is_source else message.new_empty(int(length))
    dist.broadcast(message, src=src, group=group)
    return _from_bytes(message)


def send_json(value: Any, dst: int, group: dist.ProcessGroup | None = None) -> None:
    """Send a value to rank `dst`, which must call `recv_json`."""
    message = _to_bytes(json.dumps(value).encode(), group)
    dist.send(torch.tensor([len(message)], device=message.device), dst=dst, group=group)
    dist.send(message, dst=dst, group=group)


def recv_json(src: int, group: dist.ProcessGroup | None = None) -> Any:
    """Return the value that rank `src` sends with `send_json`."""
    length = torch.zeros(1, dtype=torch.int64, device=_communication_device(group))
    dist.recv(length, src=src, group=group)
    message = torch.empty(int(length), dtype=torch.uint8, device=length.device)
    dist.recv(message, src=src, group=group)
    return _from_bytes(message)


def all_gather_int64(numbers: np.ndarray, group: dist.ProcessGroup | None = None) -> np.ndarray:
    """Return the numbers of every rank as int64, one row per rank. All ranks must pass arrays of the same shape."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=_communication_device(group))
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    if len(mine):
        dist.all_gather(rows, mine, group=group)
    return torch.stack(rows).cpu().numpy()


def _to_bytes(text: bytes, group: dist.ProcessGroup | None) -> Tensor:
    """Return the text as a tensor on the device that the group communicates on."""
    host = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
    return host.to(_communication_device(group))


def _from_bytes(message: Tensor) -> Any:
    return json.loads(message.cpu().numpy().tobytes())


def _communication_device(group: dist.ProcessGroup | None) -> torch.device:
    backends = dist.get_backend_config(group)  # such as `cpu:gloo,cuda:nccl`
    if "cpu:" in backends:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
