"""Brings the files of a checkpoint to the nodes that need them, from the nodes that have them on their own disks.

Every rank makes the same calls together. The first rank of each node reads and writes for its node. What was received
is verified like every other file before it is used, and stays in the folder of the checkpoint.
"""

import os
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from trimaran.checkpoint.load_state import MatchedShard, packed_bits
from trimaran.checkpoint.manifest import INDEX, MANIFEST, MAX_INDEX_BYTES, MAX_MANIFEST_BYTES, Manifest, read_limited
from trimaran.checkpoint.rank_layout import RankLayout, all_true, barrier
from trimaran.checkpoint.step_files import files_here
from trimaran.core import open_regular_file, replace_file, write_atomically
from trimaran.parallel import all_gather_int64, broadcast_json

CHUNK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTransfer:
    """A file that the first rank of a node sends to that of another."""

    name: str
    sender: int
    receiver: int


def share_manifest(path: Path, layout: RankLayout) -> bool:
    """Write rank 0's manifest and index of a checkpoint on every node that lacks them; return whether all have them."""
    mine: list[str] = []
    if layout.rank == 0:
        texts = read_limited(path / MANIFEST, MAX_MANIFEST_BYTES), read_limited(path / INDEX, MAX_INDEX_BYTES)
        mine = [b64encode(text).decode() for text in texts]
    manifest, index = map(b64decode, broadcast_json(mine))
    is_written = True
    if layout.rank == layout.node:
        try:
            for name, text in ((INDEX, index), (MANIFEST, manifest)):
                if not (path / name).is_file() or (path / name).read_bytes() != text:
                    path.mkdir(parents=True, exist_ok=True)
                    write_atomically(path / name, text, sync=True)
        except OSError:
            is_written = False
    return all_true(is_written)


def gather_held(path: Path, manifest: Manifest, layout: RankLayout) -> dict[int, set[str]]:
    """Return the files of the manifest that each node has; a node is identified by its first rank."""
    is_first = layout.rank == layout.node
    return _gather_names(manifest, files_here(path, manifest) if is_first else (), layout.nodes)


def gather_needed(manifest: Manifest, matched: Sequence[MatchedShard], layout: RankLayout) -> dict[int, set[str]]:
    """Return the files that the ranks of each node need to fill their shards."""
    needed = {region.file for _, overlaps in matched for region, _, _ in overlaps}
    return _gather_names(manifest, needed, layout.nodes)


def plan_transfers(held: dict[int, set[str]], needed: dict[int, set[str]]) -> tuple[list[FileTransfer], set[str]]:
    """Return what has to be sent, in the order for all ranks, and the needed files that no node has."""
    transfers, missing = list[FileTransfer](), set[str]()
    for name in sorted(set[str]().union(*needed.values())):
        senders = [node for node in sorted(held) if name in held[node]]
        receivers = [node for node in sorted(needed) if name in needed[node] and name not in held[node]]
        if not senders:
            missing.add(name)
            continue
        # Taking turns, so that no node sends everything.
        transfers += [
            FileTransfer(name=name, sender=senders[number % len(senders)], receiver=receiver)
            for number, receiver in enumerate(receivers)
        ]
    return transfers, missing


def transfer_files(
    path: Path,
    manifest: Manifest,
    transfers: Sequence[FileTransfer],
    layout: RankLayout,
    report_progress: Callable[[], None],
) -> str:
    """Send and receive files. Returns why a node could not write one; an empty text if all did."""
    failed = ""
    for each in transfers:
        num_bytes = manifest.files[each.name].bytes
        if layout.rank == each.sender:
            with open_regular_file(path / each.name) as file:
                for at in range(0, num_bytes, CHUNK_BYTES):  # zeros for what cannot be read: the checksum tells
                    chunk = torch.zeros(min(CHUNK_BYTES, num_bytes - at), dtype=torch.uint8)
                    data = os.pread(file.fileno(), len(chunk), at)
                    chunk[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else chunk[:0]
                    dist.send(chunk, dst=each.receiver)
                    report_progress()
        elif layout.rank == each.receiver:
            chunks = _received(num_bytes, each.sender, report_progress)
            try:
                with replace_file(path / each.name, sync=True) as file:
                    for chunk in chunks:
                        file.write(chunk)
            except OSError as error:
                failed = failed or f"{each.name} cannot be written: {error.strerror or error}"
                for _ in chunks:  # what the sender sends has to be received
                    pass
    barrier()
    return failed


def _gather_names(manifest: Manifest, names: Collection[str], nodes: Sequence[int]) -> dict[int, set[str]]:
    """Return the names that the ranks of each node give. They are sent as bits: there may be thousands of each."""
    files = [name for name in manifest.files if name != INDEX]
    found: dict[int, set[str]] = {node: set() for node in nodes}
    for node, row in zip(nodes, all_gather_int64(packed_bits(files, names)), strict=True):
        given = np.unpackbits(np.ascontiguousarray(row).view(np.uint8), count=len(files))
        found[node].update(name for name, is_given in zip(files, given, strict=True) if is_given)
    return found


def _received(num_bytes: int, sender: int, report_progress: Callable[[], None]) -> Iterator[memoryview]:
    for at in range(0, num_bytes, CHUNK_BYTES):
        chunk = torch.empty(min(CHUNK_BYTES, num_bytes - at), dtype=torch.uint8)
        dist.recv(chunk, src=sender)
        report_progress()
        yield chunk.numpy().data
