"""The folder for offloaded tensors: whether it exists, can be written, and lies on a local disk."""

import os
import re
from pathlib import Path

from trimaran.core import Bytes, UserError, show_bytes

MOUNTS = Path("/proc/self/mountinfo")
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "gpfs", "beegfs", "9p", "glusterfs", "virtiofs",
           "wekafs", "afs", "orangefs")  # fmt: skip
WHERE = "plan.disk.path"
OCTAL = re.compile(r"\\([0-7]{3})")


def check_disk_folder(path: str, *, any_filesystem: bool, mounts: Path = MOUNTS) -> None:
    """Raise UserError unless tensors can be offloaded to this folder of this machine.

    Whether there is room is found when a rank allocates its file. A filesystem in memory saves no memory, and one on
    the network is slow and shared: both are refused, unless the plan says that any filesystem will do.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UserError("P110.no-folder-offloaded", where=WHERE, path=path)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError("P110.offloaded-tensors", where=WHERE, path=path)
    kind = filesystem_of(folder, mounts)
    if not any_filesystem and (kind in (*IN_MEMORY, *NETWORK) or kind.startswith("fuse")):
        why = "is in memory, so offloading to it saves none" if kind in IN_MEMORY else "is not a local disk"
        raise UserError("P111.wrong-disk", where=WHERE, path=path, kind=kind, why=why)


def no_room(path: str, need: Bytes, free: Bytes) -> UserError:
    """Return the error for a disk that is too small."""
    return UserError(
        "P112.offloaded-tensors-take", where=WHERE, need=show_bytes(need), path=path, free=show_bytes(free)
    )


def filesystem_of(folder: Path, mounts: Path = MOUNTS) -> str:
    """Return the type of the filesystem that a folder is on, such as `ext4`; empty if the kernel does not say."""
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    target, best, kind = folder.resolve(), -1, ""
    for line in lines:
        left, _, right = line.partition(" - ")
        fields = left.split()
        if len(fields) < 5 or not right:
            continue
        point = Path(OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[4]))
        if target.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), right.split()[0]
    return kind
