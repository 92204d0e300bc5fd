"""Lists the checkpoints of a run, and verifies one with progress. Imports no torch."""

import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from trimaran.checkpoint.manifest import (
    INDEX,
    MANIFEST,
    STEP_NAME,
    Damage,
    DamagedError,
    read_limited,
    read_manifest,
)
from trimaran.checkpoint.step_dirs import DRAFT_NAME, WHY, complete_steps, step_path
from trimaran.checkpoint.step_files import files_elsewhere
from trimaran.checkpoint.verify_checkpoint import verify
from trimaran.core import UserError

REFUSED_NAME = re.compile(r"refused-step-(\d{8,18})(-\d+)?")
MAX_WHY_BYTES = 1 << 20
MAX_TRIES = 3
Result = TypeVar("Result")
NUM_PROGRESS_UPDATES = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRow:
    """A checkpoint in the list. `why` says what is wrong with one that is not complete.

    `written_bytes` is the disk space it takes in addition to older checkpoints, which share unchanged files with it.
    `complete` means that every file has its length; only `verify` reads the files. `on_nodes` are nodes that have files
    of it on their own disks, which were not looked at.
    """

    step: int
    name: str
    status: Literal["complete", "damaged", "refused"]
    why: str = ""
    time: float | None = None
    bytes: int = 0
    written_bytes: int = 0
    world_size: int | None = None
    plan: str = ""
    on_nodes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def list_checkpoints(folder: Path) -> list[CheckpointRow]:
    """Return all checkpoints in `folder`, oldest first, including refused ones."""
    if not folder.is_dir():
        return []
    seen: set[tuple[int, int]] = set()
    rows: list[CheckpointRow] = []
    named = [(STEP_NAME.fullmatch(name) or REFUSED_NAME.fullmatch(name), folder / name) for name in os.listdir(folder)]
    for step, path in sorted((int(match[1]), path) for match, path in named if match):
        with suppress(FileNotFoundError):  # a running run has pruned it meanwhile
            row = _row(step, path, seen)
            if path.is_symlink() or path.exists():
                rows.append(row)
    return rows


def count_drafts(folder: Path) -> int:
    """Return how many checkpoints are being written, or were being written when their run died."""
    return sum(1 for name in os.listdir(folder) if DRAFT_NAME.fullmatch(name)) if folder.is_dir() else 0


def find_step(folder: Path, step: int | None, *, where: str) -> Path:
    """Return the checkpoint of `step`, or the newest one. Raises UserError if there is none."""
    steps = complete_steps(folder)
    if not steps:
        raise UserError("K028.run-no-complete", where=where)
    if step is None:
        return step_path(folder, steps[-1])
    if step not in steps:
        raise UserError(
            "K028.run-no-complete-checkpoint", where=where, step=step, steps=", ".join(map(str, steps[-10:]))
        )
    return step_path(folder, step)


def with_step(folder: Path, step: int | None, use: Callable[[Path], Result], *, where: str) -> tuple[Path, Result]:
    """Return the checkpoint of `step`, or the newest one, and the result of `use` on it.

    If a running run prunes it meanwhile, the newest one then is used instead.
    """
    for is_last in (*[False] * (MAX_TRIES - 1), True):
        path = find_step(folder, step, where=where)
        try:
            return path, use(path)
        except (OSError, UserError):
            if is_last or path.exists():
                raise
    raise AssertionError("the last try returns or raises")


def verify_all(path: Path, progress: Callable[[float], None]) -> list[Damage]:
    """Return what `verify` finds wrong, without files on other nodes' disks. `progress` gets the fraction done."""
    if path.is_dir() and not os.path.lexists(path / MANIFEST):
        return [Damage(MANIFEST, "is missing")]
    try:
        manifest = read_manifest(path)
    except DamagedError as error:
        return list(error.damages)
    files, damages = manifest.files, verify(path, files=[])
    elsewhere = {name for each in files_elsewhere(path, manifest).values() for name in each}
    names = [name for name in files if name != INDEX and name not in elsewhere]
    total = sum(files[name].bytes for name in names)
    done = 0
    size = max(1, -(-len(names) // NUM_PROGRESS_UPDATES))
    for begin in range(0, len(names), size) if not damages else ():
        group = names[begin : begin + size]
        damages += verify(path, files=group)
        done += sum(files[name].bytes for name in group)
        progress(done / max(total, 1))
    unexpected = sorted({*os.listdir(path)} - {*files, MANIFEST})
    return damages + [Damage(each, "does not belong here") for each in unexpected]


def verify_present(path: Path, progress: Callable[[float], None]) -> list[Damage] | None:
    """Return what `verify_all` does; None if the checkpoint is deleted meanwhile, as a run prunes while it trains."""
    try:
        found = verify_all(path, progress)
    except (OSError, UserError):
        if path.exists():
            raise
        return None
    return found if path.exists() else None


def _row(step: int, path: Path, seen: set[tuple[int, int]]) -> CheckpointRow:
    if path.name.startswith("refused-"):
        why, num_bytes = "it is a link", 0
        if not path.is_symlink():
            num_bytes = sum(each.lstat().st_size for each in path.iterdir())
            try:
                why = str(json.loads(read_limited(path / WHY, MAX_WHY_BYTES))["why"])
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                why = "no reason was recorded"
        return CheckpointRow(step=step, name=path.name, status="refused", why=why, bytes=num_bytes)
    try:
        manifest = read_manifest(path)
        elsewhere = files_elsewhere(path, manifest)
    except UserError as error:
        return CheckpointRow(step=step, name=path.name, status="damaged", why=error.what)
    wrong, written_bytes = "", 0
    ignored = {name for names in elsewhere.values() for name in names}
    for name, record in manifest.files.items():
        try:
            status = (path / name).lstat()
        except OSError as error:
            wrong = wrong or ("" if name in ignored else f"{name}: {error.strerror}")
            continue
        if status.st_size != record.bytes and name not in ignored:
            wrong = wrong or f"{name} has {status.st_size:,} bytes instead of {record.bytes:,}"
        inode = (status.st_dev, status.st_ino)
        if inode not in seen and (path / name).is_file():  # else it is shared with an older checkpoint
            seen.add(inode)
            written_bytes += status.st_size
    inner = manifest.plan.get("plan", manifest.plan)
    mesh, plan = inner.get("mesh") if isinstance(inner, dict) else None, "imported"
    if isinstance(mesh, dict):  # the degrees above one, such as `dp_shard 4 x tp 2`
        plan = " x ".join(f"{axis} {degree}" for axis, degree in mesh.items() if degree != 1) or "one rank"
    return CheckpointRow(
        step=step,
        name=path.name,
        status="damaged" if wrong else "complete",
        why=wrong,
        time=manifest.time,
        bytes=manifest.num_bytes,
        written_bytes=written_bytes,
        world_size=manifest.world_size,
        plan=plan,
        on_nodes=tuple(elsewhere),
    )
