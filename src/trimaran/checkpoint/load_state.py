"""Fills the shards of a rank from a saved state, whatever the sharding of that one was."""

from collections.abc import Callable, Iterable, Sequence
from math import prod

import numpy as np
import torch

from trimaran.checkpoint.compact_index import Overlap, overlaps
from trimaran.checkpoint.file_parts import ThreadProgress, map_in_threads
from trimaran.checkpoint.ownership import Gather
from trimaran.checkpoint.rank_share import meta_of
from trimaran.checkpoint.tensor_shards import CheckpointSource, TensorShard
from trimaran.core import UserError, did_you_mean

MAX_NAMED_TENSORS = 5
SAME_MODEL = "resume with the model and optimizer that it was saved with"
ANOTHER_CHECKPOINT = "resume from another checkpoint: `trimaran checkpoints verify RUN` says which are intact"
MatchedShard = tuple[TensorShard, list[Overlap]]


def fill_shards(
    shards: Sequence[TensorShard],
    source: CheckpointSource,
    report_progress: Callable[[], None] = lambda: None,
    *,
    num_threads: int = 1,
) -> None:
    """Copy the values of every shard from `source`, bit for bit. All shards are checked before the first is written.

    `report_progress` is called in this thread as tensors have been copied, which `num_threads` do.
    Raises UserError if the source lacks a tensor, has it with another shape or dtype, or has only some of its values.
    """
    fill_matched(match_shards(shards, source), source, report_progress, num_threads=num_threads)


def match_shards(shards: Sequence[TensorShard], source: CheckpointSource) -> list[MatchedShard]:
    """Return each shard with what it needs of the regions of `source`. Raises as `fill_shards` does."""
    return [(shard, _matching_regions(shard, source)) for shard in shards]


def cuda_device_of(shards: Iterable[TensorShard]) -> int | None:
    """Return the device that threads must set before they fill these shards; None if they are on the CPU.

    Without it a thread would create a context on GPU 0.
    """
    return torch.cuda.current_device() if any(shard.tensor.is_cuda for shard in shards) else None


def fill_matched(
    matched: Sequence[MatchedShard],
    source: CheckpointSource,
    report_progress: Callable[[], None],
    *,
    num_threads: int,
) -> None:
    """Copy the values that `match_shards` found."""
    device, progress = cuda_device_of(shard for shard, _ in matched), ThreadProgress(report_progress)

    def fill(each: MatchedShard) -> None:
        shard, regions = each
        if device is not None:
            torch.cuda.set_device(device)  # per thread
        with torch.no_grad():  # per thread, too
            for region, start, size in regions:
                values = source.read(shard.key, region)[window(start, size, region.start)]
                shard.tensor[window(start, size, shard.start)].copy_(values)
        progress.count()

    map_in_threads(fill, matched, num_threads=num_threads, while_waiting=progress.report)


def refuse_unused_tensors(
    shards: Sequence[TensorShard], source: CheckpointSource, *, gather: Gather, allowed: Sequence[str] = ()
) -> None:
    """Raise UserError if `source` has tensors that no rank loads. Every rank must call it.

    `allowed` are prefixes of keys that may be unused, such as `optimizer/` if only weights are loaded.
    """
    keys = sorted(source.index)
    wanted = {shard.key for shard in shards}
    bits = np.packbits(np.array([key in wanted for key in keys], dtype=bool))
    words = np.zeros(-(-len(bits) // 8), dtype=np.int64)
    words.view(np.uint8)[: len(bits)] = bits
    used_anywhere = np.bitwise_or.reduce(gather(words), axis=0)
    is_used = np.unpackbits(used_anywhere.view(np.uint8), count=len(keys))
    unused = [key for key, used in zip(keys, is_used, strict=True) if not used and not key.startswith(tuple(allowed))]
    if unused:
        some = ", ".join(unused[:MAX_NAMED_TENSORS]) + (", ..." if len(unused) > MAX_NAMED_TENSORS else "")
        what = f"has {len(unused)} tensors that this run does not use: {some}"
        raise _mismatch("K005", what, unused[0], source, SAME_MODEL)


def _matching_regions(shard: TensorShard, source: CheckpointSource) -> list[Overlap]:
    """Return the regions that overlap `shard`, each with start and size of the overlap. Together they cover it."""
    if not all(shard.shape):
        return []
    wants, entry = meta_of(shard), source.index.get(shard.key)
    if entry is None:
        what = f"does not have {shard.key}{did_you_mean(shard.key, source.index)}"
        raise _mismatch("K001", what, shard.key, source, SAME_MODEL)
    has = entry.meta
    if wants.shape != has.shape:
        what = f"has {shard.key} as {_shape(has.shape)}, this run wants {_shape(wants.shape)}"
        raise _mismatch("K003", what, shard.key, source, SAME_MODEL)
    if wants.dtype != has.dtype:
        what = f"has {shard.key} as {has.dtype}, this run wants {wants.dtype}"
        raise _mismatch(
            "K002", what, shard.key, source, "resume with the precision and optimizer that it was saved with"
        )
    size = tuple(shard.tensor.shape)
    found = overlaps(entry.regions, shard.start, size)
    num_values = sum(prod(extent) for _, _, extent in found)
    if num_values != shard.tensor.numel():
        what = f"has {num_values:,} of the {shard.tensor.numel():,} values of {shard.key} that this run needs"
        raise _mismatch("K004", what, shard.key, source, ANOTHER_CHECKPOINT)
    return found


def window(start: tuple[int, ...], size: tuple[int, ...], origin: tuple[int, ...]) -> tuple[slice, ...]:
    """Return the region as slices of a tensor that begins at `origin`."""
    return tuple(slice(low - base, low - base + n) for low, n, base in zip(start, size, origin, strict=True))


def _mismatch(code: str, what: str, key: str, source: CheckpointSource, fix: str) -> UserError:
    return UserError(code, f"the checkpoint of step {source.step} {what}", where=key, fix=fix)


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) if shape else "a scalar"
