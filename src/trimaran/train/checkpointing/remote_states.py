"""Checkpoints beyond this node: files on the disks of several nodes, and the object store of a run."""

import platform
import time
from pathlib import Path
from typing import Any

from trimaran.checkpoint import (
    MANIFEST,
    DiskSource,
    FileRecord,
    Manifest,
    RankLayout,
    StoreClient,
    StoreUploads,
    complete_steps,
    fetch_files,
    match_shards,
    step_path,
)
from trimaran.checkpoint.manifest import INDEX
from trimaran.checkpoint.step_files import missing_files_error, nodes_of
from trimaran.checkpoint.store.store_process import START_RETRY_SECONDS, UPLOAD_NICENESS
from trimaran.checkpoint.store.store_uploads import StoreFetcher, run_identity
from trimaran.checkpoint.write_checkpoint import KeyValueStore
from trimaran.core import CheckpointSection, UserError
from trimaran.parallel import all_gather_json, broadcast_json
from trimaran.runs import MARKER, RunDirectory
from trimaran.runs.held_directory import descriptor_of
from trimaran.train.checkpointing.tiers import DiskTier, OpenedState, Report, StateOnDisk, manifest_of


def open_on_nodes(tier: DiskTier, path: Path, report_progress: Report) -> OpenedState | str:
    """Return a checkpoint's state, or why not.

    Nodes first get from each other the files that they need. Raises MissingFilesError if no node has one, unless there
    is a copy in memory.
    """
    layout = tier.rank_layout
    if not fetch_files.share_manifest(path, layout):
        return f"{MANIFEST} cannot be written on all nodes"
    source = DiskSource(path)
    manifest = source.manifest
    tier.refuse_other_recipe(manifest)
    shards = tier.state.shards_from(source.index)
    needed = fetch_files.gather_needed(manifest, match_shards(shards, source), layout)
    transfers, missing = fetch_files.plan_transfers(fetch_files.gather_held(path, manifest, layout), needed)
    if missing and tier.fetcher is not None and tier.fetcher.has(manifest.step, path):
        wanted = {node: names & missing for node, names in needed.items()}
        if why := tier.fetcher.fetch_files(path, manifest, wanted, report_progress):
            return why
        missing = set[str]()
    if missing and tier.memory.next_step() is not None:
        return missing_files_error(path, manifest.step, nodes_of(manifest, missing)).what
    if missing:
        nodes, complete = nodes_of(manifest, missing), _complete_steps(tier)
        raise missing_files_error(path, manifest.step, nodes, complete=complete)
    failed = fetch_files.transfer_files(path, manifest, transfers, layout, report_progress)
    local = [rank for rank, node in enumerate(layout.nodes) if node == layout.node]
    files = sorted(needed[layout.node])[local.index(layout.rank) :: len(local)]
    damages = tier.verify(path, manifest, files, report_progress)
    if why := tier.refuse_damaged(path, damages + ([failed] if failed else [])):
        return why
    return StateOnDisk(tier, source, shards, files)


def _complete_steps(tier: DiskTier) -> list[int]:
    """Return the newest of the steps left whose files are all on the nodes that are here, if there is one."""
    layout = tier.rank_layout
    for step in reversed(tier.steps):
        path = step_path(tier.folder, step)
        found = manifest_of(path)[0] if layout.rank == 0 else None
        sizes = broadcast_json({name: record.bytes for name, record in found.files.items()} if found else {})
        manifest = Manifest(step=step, files={name: FileRecord(size) for name, size in sizes.items()})
        held = fetch_files.gather_held(path, manifest, layout)
        if sizes and set[str]().union(*held.values()) == sizes.keys() - {INDEX}:
            return [step]
    return []


def refuse_lost_head(folder: Path) -> None:
    """Raise if other nodes have checkpoints of this run. The head has neither checkpoints nor metrics."""
    steps = sorted({step for row in all_gather_json(complete_steps(folder)) for step in row})
    if steps:
        raise UserError("L025.head-no-checkpoint", where=str(folder), steps=steps[-1])


def open_fetcher(run: RunDirectory, section: CheckpointSection, layout: RankLayout, *, own_disk: bool) -> StoreFetcher:
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
    identity = run_identity(run.path / MARKER)
    return {"run": identity, "host": platform.node(), "path": str(run.location.absolute()), "time": time.time()}


def _descriptors(run: RunDirectory) -> list[int]:
    descriptor = descriptor_of(run)
    return [] if descriptor is None else [descriptor]
