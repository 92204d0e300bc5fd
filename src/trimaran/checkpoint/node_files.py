"""The files of a checkpoint whose nodes have disks of their own: which node wrote which, and which are not here.

Imports no torch.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from trimaran.checkpoint.manifest import Manifest
from trimaran.core import UserError

MAX_NAMED_FILES = 4


class MissingFilesError(UserError):
    """Files of a checkpoint, `missing` by node, are on nodes that are not here. The checkpoint is not damaged."""

    missing: Mapping[str, Sequence[str]]


def files_here(folder: Path, manifest: Manifest) -> list[str]:
    """Return the files of the manifest that are in `folder` with their length."""
    return [name for name, record in manifest.files.items() if _size(folder / name) == record.bytes]


def files_elsewhere(folder: Path, manifest: Manifest) -> dict[str, list[str]]:
    """Return the files of nodes none of whose files are in `folder`, by node: they are on the disks of these nodes."""
    return {
        node: names for node, names in manifest.nodes.items() if not any(_size(folder / each) >= 0 for each in names)
    }


def nodes_of(manifest: Manifest, names: Iterable[str]) -> dict[str, list[str]]:
    """Return which node wrote each of `names`; files that the manifest assigns to no node are those of the head."""
    written_by = {name: node for node, files in manifest.nodes.items() for name in files}
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        found.setdefault(written_by.get(name, "the head"), []).append(name)
    return found


def missing_files_error(
    folder: Path, step: int, missing: Mapping[str, Sequence[str]], *, complete: Sequence[int] | None = None
) -> MissingFilesError:
    """Return the error for a checkpoint with files on nodes that are not here, by node.

    `complete` are the older steps whose files are all here; None if that is unknown.
    """
    what = f"files of the checkpoint of step {step} are not here: "
    what += "; ".join(f"{_names(files)} on {node}" for node, files in missing.items())
    fix = f"start {', '.join(missing)} again with its disk, or copy its files here; or use a RUN on a shared disk"
    if complete:
        what += f"; the newest complete step is {max(complete)}"
        fix += f"; to continue from step {max(complete)}, move {folder.name} out of the head's checkpoints"
    elif complete is not None:
        what += "; no older checkpoint is complete"
    error = MissingFilesError("L025", what, where=str(folder), fix=fix)
    error.missing = missing
    return error


def _names(files: Sequence[str]) -> str:
    more = f" and {len(files) - MAX_NAMED_FILES} more" if len(files) > MAX_NAMED_FILES else ""
    return ", ".join(files[:MAX_NAMED_FILES]) + more


def _size(path: Path) -> int:
    """Return the length of a file; -1 if there is none."""
    try:
        return path.lstat().st_size
    except OSError:
        return -1
