"""What a checkpointer asks its saver to do without slots in memory, and what it reports of that."""

import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from trimaran.checkpoint.copier import Copier
from trimaran.checkpoint.memory_copies import CopyMetadata, RankMemory
from trimaran.checkpoint.saver import SaveRequest, SaveResult
from trimaran.checkpoint.step_dirs import refuse, step_of, without_manifest
from trimaran.checkpoint.tensor_shards import TensorShard


def request_from_file(
    folder: Path, copier: Copier, metadata: CopyMetadata, shards: Sequence[TensorShard], progress: dict[str, Any]
) -> SaveRequest:
    """Return a request whose memory is a file in `folder`, where `shards` are copied to."""
    began, share, step = time.perf_counter(), copier.share, metadata.step
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            rank_memory = RankMemory(file.fileno())
            rank_memory.create_slots(1, num_bytes=share.num_bytes, items_bytes=len(copier.items))
        copier.copy(rank_memory.slots[0], metadata, shards)
    except OSError as error:
        return SaveRequest(step=step, share=share, memory=torch.empty(0), failure=str(error))
    memory, stall = rank_memory.slots[0].data[: share.num_bytes], time.perf_counter() - began
    return SaveRequest(step=step, share=share, memory=memory, progress=progress, stall_seconds=stall)


def refuse_without_manifest(folder: Path) -> list[dict[str, Any]]:
    """Rename what is named like a checkpoint but has no manifest, and return what was renamed."""
    refused, why = [], "there is no manifest in it"
    with suppress(OSError):  # on a read-only disk it does no harm
        for path in without_manifest(folder):
            refuse(path, why)
            refused.append({"tier": "disk", "step": step_of(path), "why": why})
    return refused


def event_fields(result: SaveResult) -> dict[str, Any]:
    """Return the fields of the `checkpoint` event of a save."""
    fields = {
        "path": result.path,
        "seconds": result.seconds,
        "stall_seconds": result.stall_seconds,
        "bytes": result.bytes,
        "written_bytes": result.written_bytes,
        "saved_bytes": result.saved_bytes,
    }
    return fields | ({"failed": result.failed} if result.failed else {})
