"""The object store of a run: what its ranks fetch from it at the start, and send to it while they train."""

import platform
import time
from typing import Any

from trimaran.checkpoint.rank_layout import RankLayout
from trimaran.checkpoint.store.store_client import START_RETRY_SECONDS, UPLOAD_NICENESS, StoreClient
from trimaran.checkpoint.store.store_fetch import StoreFetcher, run_identity
from trimaran.checkpoint.store.store_uploads import StoreUploads
from trimaran.checkpoint.write_checkpoint import KeyValueStore
from trimaran.core import CheckpointSection
from trimaran.runs import RunDirectory
from trimaran.runs.held_directory import descriptor_of
from trimaran.runs.run_directory import MARKER


def open_fetcher(run: RunDirectory, section: CheckpointSection, layout: RankLayout, *, own_disk: bool) -> StoreFetcher:
    """Return the checkpoints in the store. `own_disk`: every node has its own files."""
    client = StoreClient(section.store, descriptors=_descriptors(run), delays=START_RETRY_SECONDS)
    return StoreFetcher(client, run.checkpoints, layout, _owner(run), own_disk=own_disk)


def open_uploads(
    run: RunDirectory,
    section: CheckpointSection,
    layout: RankLayout,
    messages: KeyValueStore,
    *,
    own_disk: str,
    nonce: str,
) -> StoreUploads:
    """Return what sends the checkpoints of a node to the store. `own_disk` is the name of a node with its own files."""
    client = StoreClient(section.store, descriptors=_descriptors(run), niceness=UPLOAD_NICENESS)
    return StoreUploads(
        run.checkpoints, layout, messages, client, section, own_disk=own_disk, owner=_owner(run), nonce=nonce
    )


def _owner(run: RunDirectory) -> dict[str, Any]:
    """Return how this run identifies itself in its object store."""
    identity = run_identity(run.path / MARKER)
    return {"run": identity, "host": platform.node(), "path": str(run.location.absolute()), "time": time.time()}


def _descriptors(run: RunDirectory) -> list[int]:
    """Return the descriptors that a process needs for the paths of `run`."""
    descriptor = descriptor_of(run)
    return [] if descriptor is None else [descriptor]
