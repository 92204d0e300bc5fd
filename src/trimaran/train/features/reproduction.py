"""Says whether a NaN or Inf comes again when another rank computes the same batch: from the data, or from a device.

The ranks of each data-parallel group send their batch to the next group, and all compute again. A group is all ranks
that share a batch (tp, cp and pp), since none of them can compute it alone.
"""

import base64
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.core import Mesh
from trimaran.data.step_batch import StepBatch
from trimaran.parallel.comm.json_exchange import recv_json, send_json


def data_rank_of(rank: int, mesh: Mesh) -> int:
    """Return the number of the data-parallel group of a rank."""
    return rank // (mesh.cp * mesh.tp) % mesh.dp


def receive_neighbour_batch(batch: StepBatch, mesh: Mesh) -> StepBatch:
    """Send this rank's batch, which is on the host, to the next data-parallel group; return that of the one before.

    Every rank must call it, and there must be two groups or more.
    """
    rank, here, width = dist.get_rank(), data_rank_of(dist.get_rank(), mesh), mesh.cp * mesh.tp
    receiver, sender = (rank + ((here + shift) % mesh.dp - here) * width for shift in (1, -1))
    if here % 2:  # in a ring, not all may send first
        received = recv_json(sender)
        send_json(_encode(batch), receiver)
    else:
        send_json(_encode(batch), receiver)
        received = recv_json(sender)
    return _decode(received, batch)


def judge_reproduction(
    first: dict[str, Any], again: dict[str, Any], suspects: Sequence[int], mesh: Mesh
) -> dict[str, Any]:
    """Return the `reproduced` field of a `skip` event.

    `first` is what the ranks found with their own batches, `again` what they found with those of their neighbours;
    empty if nothing. `suspects` are the ranks with a bad loss in the step itself. `on_rank` is the rank that computed
    the batch again, None if unknown.
    """
    ranks = [*first.get("ranks", ())] or [*suspects]
    sources = {data_rank_of(each, mesh) for each in ranks}
    if mesh.dp == 1:
        return _answer(first.get("rank"), _on_the_same_device(first), again=bool(first), same_device=True)
    if len(sources) != 1:  # the gradients of all ranks were reduced, so none of them is known to be the first
        outcome = "it came again: the data or the model" if again else "all were finite: suspect the hardware"
        return _answer(again.get("rank"), f"each batch was computed on another rank, and {outcome}", again=bool(again))
    source, rank = sources.pop(), first.get("rank", ranks[0])
    target = (source + 1) % mesh.dp
    on_rank = rank + (target - source) * mesh.cp * mesh.tp
    found_in = {data_rank_of(each, mesh) for each in again.get("ranks", ())}
    if target in found_in:
        verdict = f"the same batch gives it again on rank {on_rank}: the data or the model, not the device"
    else:
        more = f", and rank {rank} fails with another batch too" if source in found_in else ""
        verdict = f"the same batch is finite on rank {on_rank}{more}: suspect the device of rank {rank}, not the data"
    return _answer(on_rank, verdict, again=target in found_in)


def _answer(on_rank: int | None, verdict: str, *, again: bool, same_device: bool = False) -> dict[str, Any]:
    return {"on_rank": on_rank, "again": again, "same_device": same_device, "verdict": verdict}


def _on_the_same_device(first: dict[str, Any]) -> str:
    if not first:
        return "the same batch is finite again on the same device: a one-off, such as a hardware error"
    return "the same batch gives it again on the same device; no other rank can compute it, so it may be the data or " \
           "the device"  # fmt: skip


def _encode(batch: StepBatch) -> dict[str, Any]:
    arrays = {name: [str(each.dtype).removeprefix("torch."), [*each.shape], _text(each)]
              for name, each in batch.arrays.items()}  # fmt: skip
    return {"arrays": arrays, "offsets": {name: [*each] for name, each in batch.offsets.items()},
            "num_valid": batch.num_valid, "sample_ids": [*batch.sample_ids]}  # fmt: skip


def _decode(tree: dict[str, Any], own: StepBatch) -> StepBatch:
    arrays = {name: _tensor(dtype, shape, text) for name, (dtype, shape, text) in tree["arrays"].items()}
    offsets = {name: tuple(each) for name, each in tree["offsets"].items()}
    sample_ids = tuple(tree["sample_ids"])
    return replace(own, arrays=arrays, offsets=offsets, num_valid=tree["num_valid"], sample_ids=sample_ids)


def _text(tensor: Tensor) -> str:
    flat = tensor.contiguous().reshape(-1)
    return base64.b64encode(flat.view(torch.uint8).numpy().tobytes() if len(flat) else b"").decode()


def _tensor(dtype: str, shape: Sequence[int], text: str) -> Tensor:
    data = bytearray(base64.b64decode(text))
    if not data:
        return torch.empty(*shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(data, dtype=torch.uint8).view(getattr(torch, dtype)).reshape(*shape)
