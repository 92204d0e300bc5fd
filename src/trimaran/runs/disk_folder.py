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
        raise UserError("P110", f"there is no folder {path} for offloaded tensors on this machine", where=WHERE,
                        fix="create it on a local NVMe disk, or name another")  # fmt: skip
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError("P110", f"offloaded tensors cannot be written to {path}: permission denied", where=WHERE,
                        fix="change its permissions, or name another folder")  # fmt: skip
    kind = filesystem_of(folder, mounts)
    if not any_filesystem and (kind in (*IN_MEMORY, *NETWORK) or kind.startswith("fuse")):
        why = "is in memory, so offloading to it saves none" if kind in IN_MEMORY else "is not a local disk"
        raise UserError("P111", f"{path} is on {kind}, which {why}", where=WHERE,
                        fix="name a folder on a local disk, or set plan.disk.any_filesystem to true")  # fmt: skip


def no_room(path: str, need: Bytes, free: Bytes) -> UserError:
    """Return the error for a disk that is too small."""
    return UserError("P112", f"offloaded tensors take {show_bytes(need)}, and {path} has {show_bytes(free)} free",
                     where=WHERE, fix="free disk space, or name a folder on a larger disk")  # fmt: skip


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
