"""The checkpoints of a run, side by side: which there are, which is newest, which may go. No torch in here."""

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
    """Return where the checkpoint of `step` is, or would be."""
    return folder / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the step that a checkpoint's folder is named for."""
    named = STEP_NAME.fullmatch(path.name)
    assert named, f"{path} is not named like a checkpoint"
    return int(named[1])


def draft_path(folder: Path, step: int, nonce: str) -> Path:
    """Return where it is written before it is complete. `nonce`, hexadecimal, tells one try from the next."""
    return folder / f".step-{step:08d}.{nonce}.draft"


def steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints that look complete, in ascending order. Links are not looked at."""
    if not folder.is_dir():
        return []
    found = []
    for entry in os.scandir(folder):
        named = STEP_NAME.fullmatch(entry.name)
        if named and entry.is_dir(follow_symlinks=False) and (folder / entry.name / MANIFEST).is_file():
            found.append(int(named[1]))
    return sorted(found)


def headless(folder: Path) -> list[Path]:
    """Return what is named like a checkpoint and is none: a folder without a manifest, a link, a file."""
    whole = {step_path(folder, step) for step in steps(folder)}
    there = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in there if STEP_NAME.fullmatch(path.name) and path not in whole]


def newest(folder: Path) -> int | None:
    """Return the newest step that looks complete; None when there is none. It is looked up, never stored."""
    return max(steps(folder), default=None)


def looks_complete(path: Path) -> bool:
    """Return whether the manifest is sound and every file is there in its length. Sums are `verify`'s."""
    try:
        files = read_manifest(path).files
        return all((path / name).lstat().st_size == record.bytes for name, record in files.items())
    except (OSError, UserError):
        return False


def refuse(path: Path, why: str, disk: DurableDisk = DISK) -> Path:
    """Rename a damaged checkpoint so that nobody takes it for a good one, and return where it is now."""
    target, count = path.with_name(f"refused-{path.name}"), 1
    while target.is_symlink() or target.exists():
        count += 1
        target = path.with_name(f"refused-{path.name}-{count}")
    disk.rename(path, target)
    disk.sync_folder(path.parent)
    if target.is_dir() and not target.is_symlink():
        # The disk may be the very thing that is broken; the new name says enough.
        with suppress(OSError):
            write_file(target / WHY, memoryview(json.dumps({"why": why}).encode() + b"\n"), disk)
    return target


def drop(path: Path, disk: DurableDisk = DISK) -> None:
    """Remove a checkpoint or a draft. A crash on the way leaves a draft, never half a checkpoint."""
    if not DRAFT_NAME.fullmatch(path.name):
        draft = draft_path(path.parent, step_of(path), secrets.token_hex(4))
        disk.rename(path, draft)
        # Before any of its files goes: a name that came back would be a checkpoint with holes.
        disk.sync_folder(path.parent)
        path = draft
    remove_tree(path, disk)


def sweep_drafts(folder: Path, disk: DurableDisk = DISK) -> list[str]:
    """Remove the drafts that dead attempts left, and return their names. Nobody may be writing one."""
    if not folder.is_dir():
        return []
    drafts = sorted(path for path in folder.iterdir() if DRAFT_NAME.fullmatch(path.name))
    for path in drafts:
        if path.is_symlink():
            disk.remove(path)
        else:
            remove_tree(path, disk)
    return [path.name for path in drafts]


def superfluous(there: list[int], *, keep: int, keep_every: int, verified: int) -> list[int]:
    """Return which of the steps may go: older than `verified`, not among the newest `keep`, no multiple."""
    kept = set(sorted(there)[-keep:])
    return [
        step
        for step in sorted(there)
        if step < verified and step not in kept and not (keep_every and step % keep_every == 0)
    ]


def prune(folder: Path, keep: int, keep_every: int, verified: int, disk: DurableDisk = DISK) -> list[int]:
    """Remove what is superfluous and return those steps. `verified` is a step whose every sum has just been right."""
    there = steps(folder)
    if verified not in there:
        return []
    gone = superfluous(there, keep=keep, keep_every=keep_every, verified=verified)
    for step in gone:
        drop(step_path(folder, step), disk)
    return gone
