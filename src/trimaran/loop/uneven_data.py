"""Ranks whose own data ends at different times go on together until the last of them is out."""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten, treespec_dumps, treespec_loads

from trimaran.core import UserError
from trimaran.train.agreement import Poll

NOTHING: Any = object()


def rounds(batches: Iterable[Any], device: torch.device, weigh: Callable[[bool], None]) -> Iterator[Any]:
    """Yield this rank's batches on `device`, and then its last one again until every rank is out of batches.

    Before each batch `weigh` is told whether it counts. Whether any rank has another is asked while this one is
    computed.
    """
    source = iter(batches)
    batch = next(source, NOTHING)
    if not Poll(batch is not NOTHING).wait():
        return
    last = _example(batch)
    try:
        while True:
            weigh(batch is not NOTHING)
            following = next(source, NOTHING) if batch is not NOTHING else NOTHING
            more = Poll(following is not NOTHING)
            yield tree_map(lambda each: each.to(device, non_blocking=True) if isinstance(each, Tensor) else each, last)
            if not more.wait():
                return
            batch, last = following, last if following is NOTHING else following
    finally:
        weigh(True)


def _example(batch: Any) -> Any:
    """Return `batch`, or the first batch of another rank where there is none: something to compute on."""
    haves = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(haves, torch.tensor([int(batch is not NOTHING)]))
    if all(haves):
        return batch
    giver = next(rank for rank, have in enumerate(haves) if have)
    mine = dist.get_rank() == giver
    leaves, layout = tree_flatten(batch) if mine else ([], None)
    text = _told(_words(leaves, layout) if mine else "", giver)
    if not text:
        raise UserError("T061", "a rank has no batch at all, and those of the others cannot be lent to it: they are "
                        "not made of tensors, numbers and text in dicts, lists and tuples alone",
                        where="rounds(batches)", fix="give every rank at least one batch")  # fmt: skip
    words = json.loads(text)
    found: list[Any] = []
    for number, word in enumerate(words["leaves"]):
        if "shape" in word:
            empty = torch.empty(word["shape"], dtype=getattr(torch, word["dtype"]))
            tensor = leaves[number].detach().cpu().contiguous() if mine else empty
            dist.broadcast(tensor.view(-1).view(torch.uint8) if tensor.numel() else torch.zeros(1), src=giver)
            found.append(tensor)
        else:
            found.append(word["value"])
    return batch if batch is not NOTHING else tree_unflatten(found, treespec_loads(words["layout"]))


def _words(leaves: list[Any], layout: Any) -> str:
    """Return what the leaves are and how they hang together, as JSON; an empty text when JSON cannot say it."""
    try:
        told = [
            {"shape": each.shape, "dtype": str(each.dtype).removeprefix("torch.")}
            if isinstance(each, Tensor)
            else {"value": each}
            for each in leaves
        ]
        return json.dumps({"leaves": told, "layout": treespec_dumps(layout)})
    except (TypeError, ValueError, NotImplementedError):
        return ""


def _told(text: str, giver: int) -> str:
    """Return the giver's text."""
    data = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
    size = torch.tensor([len(text.encode())])
    dist.broadcast(size, src=giver)
    if not size.item():
        return ""
    data = data if dist.get_rank() == giver else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, src=giver)
    return bytes(data.tolist()).decode()
