"""Lets ranks whose own data ends at different times take the same number of steps."""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten, treespec_dumps, treespec_loads

from trimaran.core import UserError
from trimaran.parallel.comm.json_exchange import broadcast_json
from trimaran.train.agreement import FlagAllReduce

NO_BATCH: Any = object()


def uneven_batches(
    batches: Iterable[Any], device: torch.device, set_counted: Callable[[bool], None]
) -> Iterator[Any]:  # fmt: skip
    """Yield this rank's batches on `device`, then its last one again until every rank has run out.

    Before each batch, `set_counted` gets whether it counts: a repeated one does not. The all-reduce that asks whether
    any rank has another batch runs while this one is computed.
    """
    source = iter(batches)
    batch = next(source, NO_BATCH)
    if not FlagAllReduce(batch is not NO_BATCH).wait():
        return
    last = _own_or_borrowed(batch)
    try:
        while True:
            set_counted(batch is not NO_BATCH)
            following = next(source, NO_BATCH) if batch is not NO_BATCH else NO_BATCH
            more = FlagAllReduce(following is not NO_BATCH)
            yield tree_map(lambda each: each.to(device, non_blocking=True) if isinstance(each, Tensor) else each, last)
            if not more.wait():
                return
            batch, last = following, last if following is NO_BATCH else following
    finally:
        set_counted(True)


def _own_or_borrowed(batch: Any) -> Any:
    """Return `batch`, or the first batch of another rank if this rank has none. Every rank must call it."""
    has_batch = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(has_batch, torch.tensor([int(batch is not NO_BATCH)]))
    if all(has_batch):
        return batch
    source = next(rank for rank, each in enumerate(has_batch) if each)
    is_source = dist.get_rank() == source
    leaves, layout = tree_flatten(batch) if is_source else ([], None)
    description = broadcast_json(_describe(leaves, layout) if is_source else None, src=source)
    if description is None:
        raise UserError("T061", "a rank has no batch at all, and cannot borrow one from another rank: batches must be "
                        "made of tensors, numbers and text in dicts, lists and tuples",
                        where="uneven_batches(batches)", fix="give every rank at least one batch")  # fmt: skip
    borrowed: list[Any] = []
    for number, leaf in enumerate(description["leaves"]):
        if "shape" in leaf:
            empty = torch.empty(leaf["shape"], dtype=getattr(torch, leaf["dtype"]))
            tensor = leaves[number].detach().cpu().contiguous() if is_source else empty
            dist.broadcast(tensor.view(-1).view(torch.uint8) if tensor.numel() else torch.zeros(1), src=source)
            borrowed.append(tensor)
        else:
            borrowed.append(leaf["value"])
    return batch if batch is not NO_BATCH else tree_unflatten(borrowed, treespec_loads(description["layout"]))


def _describe(leaves: list[Any], layout: Any) -> dict[str, Any] | None:
    """Return the leaves of a batch without the values of tensors, and their tree; None if JSON cannot hold them."""
    described = [
        {"shape": each.shape, "dtype": str(each.dtype).removeprefix("torch.")}
        if isinstance(each, Tensor)
        else {"value": each}
        for each in leaves
    ]
    try:
        description = {"leaves": described, "layout": treespec_dumps(layout)}
        json.dumps(description)  # raises where JSON cannot hold a value
    except (TypeError, ValueError, NotImplementedError):
        return None
    return description
