"""The checkpoint directories of a run: which steps are complete, which is newest, which to prune. Imports no torch."""

import json
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

from trimaran.checkpoint.durable import DISK, DurableDisk, remove_tree, write_file
from trimaran.checkpoint.manifest import MANIFEST, STEP_NAME, read_manifest
from trimaran.core import UserError

DRAFT_NAME = re.compile(r"\.step-\d{8,18}\.[0-9a-f]+\.draft")
WHY = "why.json"


def step_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of `step`, which need not exist."""
    return folder / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint directory."""
    named = STEP_NAME.fullmatch(path.name)
    assert named, f"{path} is not named like a checkpoint"
    return int(named[1])


def draft_path(folder: Path, step: int, nonce: str) -> Path:
    """Return the path at which a checkpoint is written until it is complete. `nonce`, in hex, is unique per try."""
    return folder / f".step-{step:08d}.{nonce}.draft"


def complete_steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints with a manifest, in ascending order. Symbolic links are ignored."""
    if not folder.is_dir():
        return []
    found = []
    for entry in os.scandir(folder):
        named = STEP_NAME.fullmatch(entry.name)
        if named and entry.is_dir(follow_symlinks=False) and os.path.lexists(folder / entry.name / MANIFEST):
            found.append(int(named[1]))
    return sorted(found)


def without_manifest(folder: Path) -> list[Path]:
    """Return what is named like a checkpoint but is none: a directory without a manifest, a link, a file."""
    complete = {step_path(folder, step) for step in complete_steps(folder)}
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in paths if STEP_NAME.fullmatch(path.name) and path not in complete]


def newest_step(folder: Path) -> int | None:
    """Return the newest step with a manifest; None if there is none. The directory is scanned at every call."""
    return max(complete_steps(folder), default=None)


def looks_complete(path: Path) -> bool:
    """Return whether the manifest is valid and every file has its length. Checksums are left to `verify`."""
    try:
        files = read_manifest(path).files
        return all((path / name).lstat().st_size == record.bytes for name, record in files.items())
    except (OSError, UserError):
        return False


def refuse(path: Path, why: str, disk: DurableDisk = DISK) -> Path:
    """Rename a damaged checkpoint so that no run loads it, and return its new path."""
    target, count = path.with_name(f"refused-{path.name}"), 1
    while target.is_symlink() or target.exists():
        count += 1
        target = path.with_name(f"refused-{path.name}-{count}")
    disk.rename(path, target)
    disk.sync_folder(path.parent)
    if target.is_dir() and not target.is_symlink():
        # The disk itself may be broken; the new name is enough.
        with suppress(OSError):
            write_file(target / WHY, memoryview(json.dumps({"why": why}).encode() + b"\n"), disk)
    return target


def remove_checkpoint(path: Path, disk: DurableDisk = DISK) -> None:
    """Remove a checkpoint or a draft. A crash in between leaves a draft, never half a checkpoint."""
    if not DRAFT_NAME.fullmatch(path.name):
        draft = draft_path(path.parent, step_of(path), secrets.token_hex(4))
        disk.rename(path, draft)
        # Sync before any file is removed: if a power cut undid the rename, the checkpoint would lack files.
        disk.sync_folder(path.parent)
        path = draft
    remove_tree(path, disk)


def remove_drafts(folder: Path, disk: DurableDisk = DISK) -> list[str]:
    """Remove the drafts of dead attempts and return their names. No process may be writing one."""
    if not folder.is_dir():
        return []
    drafts = sorted(path for path in folder.iterdir() if DRAFT_NAME.fullmatch(path.name))
    for path in drafts:
        disk.remove(path) if path.is_symlink() else remove_tree(path, disk)
    return [path.name for path in drafts]


def steps_to_prune(steps: list[int], *, keep: int, keep_every: int, verified: int) -> list[int]:
    """Return the steps older than `verified` that are neither among the newest `keep` nor multiples of `keep_every`."""
    newest = set(sorted(steps)[-keep:])
    return [
        step
        for step in sorted(steps)
        if step < verified and step not in newest and not (keep_every and step % keep_every == 0)
    ]


def prune(
    folder: Path, keep: int, keep_every: int, verified: int, disk: DurableDisk = DISK, in_use: int | None = None
) -> list[int]:
    """Remove and return `steps_to_prune`, but not `in_use`, which is being read. `verified` has just been verified."""
    steps = complete_steps(folder)
    if verified not in steps:
        return []
    old = steps_to_prune(steps, keep=keep, keep_every=keep_every, verified=verified)
    pruned = [step for step in old if step != in_use]
    for step in pruned:
        remove_checkpoint(step_path(folder, step), disk)
    return pruned
