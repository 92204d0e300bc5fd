"""The manifest of a checkpoint: its step, its files with their checksums, and a digest of itself. Imports no torch."""

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from trimaran.core import UserError, open_regular_file, templated

FORMAT, PARTS_FORMAT, NODES_FORMAT, COMPACT_FORMAT = 1, 2, 3, 4
"""The second has files with checksums of parts, the third has files on several disks, the fourth a compact index:
versions that do not know them must not take such checkpoints for damaged."""
MANIFEST, INDEX = "manifest.json", "index.json"
FILE_NAME = re.compile(r"index\.json|rank-\d{5,9}(\.frozen)?\.safetensors")
STEP_NAME = re.compile(r"step-(\d{8,18})")
MAX_MANIFEST_BYTES = 256 << 20
MAX_INDEX_BYTES = 4 << 30
SHA256_HEX = re.compile(r"[0-9a-f]{64}")
ZERO_DIGEST = "0" * 64
FILE_END = b'"\n}\n'
MAX_TIME = 1e11  # seconds since the epoch: the year 5138
MAX_NUMBER = 1 << 63
MAX_PROGRESS_DEPTH = 8
OPTIMIZER_VALUES = ("states", "optimizer")  # keys of `progress` with values of a user's own optimizer: any are allowed


@dataclass(frozen=True, slots=True)
class FileRecord:
    """The length of a file and the SHA-256 of its contents.

    A large file has one SHA-256 for each `part_bytes` of it instead, so that threads can share the work.
    """

    bytes: int
    sha256: str = ""
    part_bytes: int = 0
    part_sha256: tuple[str, ...] = ()

    @property
    def checksums(self) -> tuple[str, ...]:
        """The SHA-256 of each part, or of the whole file."""
        return self.part_sha256 or (self.sha256,)

    def range_of(self, number: int) -> tuple[int, int]:
        """Return the first byte that a checksum covers, and the one after the last."""
        covered_bytes = self.part_bytes or max(1, self.bytes)
        return number * covered_bytes, min(self.bytes, (number + 1) * covered_bytes)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that the manifest has."""
        names = ("bytes", "part_bytes", "part_sha256") if self.part_bytes else ("bytes", "sha256")
        return {name: getattr(self, name) for name in names}


def parse_record(fields: dict[str, Any]) -> FileRecord:
    """Return the record whose `as_dict` is `fields`."""
    return FileRecord(**fields | {"part_sha256": tuple(fields.get("part_sha256", ()))})


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that is wrong with a checkpoint: a file, and a phrase that follows its name."""

    file: str
    what: str

    def __str__(self) -> str:
        return f"{self.file} {self.what}"


class DamagedError(UserError):
    """A checkpoint differs from what was written."""

    def __init__(self, folder: Path, damages: Sequence[Damage]) -> None:
        more = templated(", and {num_damages} more", num_damages=len(damages) - 1) if len(damages) > 1 else ""
        super().__init__("K007.damaged", where=str(folder), damage=damages[0], more=more)
        self.damages = tuple(damages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything in a checkpoint but the tensors, as plain data.

    `time` is seconds since the epoch, `term` is that of the lease under which it was written. `plan` is as in
    `plan.json`, `recipe` is the text of `recipe.yaml`. `progress` is what `CheckpointState.progress` returned. `nodes`
    are the files that each node has on its own disk; empty if the nodes share one. `compact_index`: the index has the
    compact form of `shard_index.py`.
    """

    step: int
    time: float = 0.0
    term: int = 0
    world_size: int = 1
    plan: dict[str, Any] = field(default_factory=dict)
    recipe: str = ""
    progress: dict[str, Any] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)
    nodes: dict[str, list[str]] = field(default_factory=dict)
    compact_index: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(record.bytes for record in self.files.values())


def manifest_bytes(manifest: Manifest) -> bytes:
    """Return the contents of the file: JSON whose last field is the SHA-256 of the file with that field all zeros."""
    files = {name: record.as_dict() for name, record in manifest.files.items()}
    version = PARTS_FORMAT if any(record.part_bytes for record in manifest.files.values()) else FORMAT
    later = ("nodes", "compact_index")  # fields that older versions do not know
    known = {name: value for name, value in asdict(manifest).items() if name not in later or value}
    version = NODES_FORMAT if manifest.nodes else version
    version = COMPACT_FORMAT if manifest.compact_index else version
    fields = {"format": version, **known, "files": files, "digest": ZERO_DIGEST}
    text = (json.dumps(fields, indent=1) + "\n").encode()
    assert text.endswith(ZERO_DIGEST.encode() + FILE_END)
    return text[: -len(ZERO_DIGEST) - len(FILE_END)] + sha256(text).hexdigest().encode() + FILE_END


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of the checkpoint in `folder`. Raises DamagedError if its digest is wrong.

    A folder without a manifest, or a manifest of a later format, is a plain UserError: it may be intact.
    """
    if folder.is_symlink():
        raise DamagedError(folder, [Damage(folder.name, "is a link")])
    try:
        text = read_limited(folder / MANIFEST, MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        raise UserError("K008.no-checkpoint-here", where=str(folder), manifest=MANIFEST) from None
    except (OSError, ValueError) as error:
        raise DamagedError(folder, [unreadable(MANIFEST, error)]) from None
    return parse_manifest(folder, text)


def parse_manifest(folder: Path, text: bytes) -> Manifest:
    """Return the manifest in `text`, the contents of the file in `folder`. Raises as `read_manifest` does."""
    digest = text[-len(ZERO_DIGEST) - len(FILE_END) : -len(FILE_END)]
    blank = text[: -len(ZERO_DIGEST) - len(FILE_END)] + ZERO_DIGEST.encode() + FILE_END
    if not text.endswith(FILE_END) or sha256(blank).hexdigest().encode() != digest:
        raise DamagedError(folder, [Damage(MANIFEST, "does not match its digest")])
    # Its digest is right, but anyone can compute one: every field is checked.
    try:
        fields = json.loads(text)
        del fields["digest"]
        version = fields.pop("format")
    except (ValueError, RecursionError, KeyError, TypeError):
        raise DamagedError(folder, [Damage(MANIFEST, "is not a manifest")]) from None
    if version not in (FORMAT, PARTS_FORMAT, NODES_FORMAT, COMPACT_FORMAT):
        known = f"{FORMAT} to {COMPACT_FORMAT}"
        raise UserError("K008.checkpoint-format-version", where=str(folder), version=version, known=known)
    kinds = {each: (int, float) if each == "time" else type(value) for each, value in asdict(Manifest(step=0)).items()}
    if isinstance(fields, dict) and version != NODES_FORMAT:
        fields.setdefault("nodes", {})
    if isinstance(fields, dict) and version != COMPACT_FORMAT:
        fields.setdefault("compact_index", False)
    has_all_fields = isinstance(fields, dict) and fields.keys() == kinds.keys()
    if not has_all_fields or not all(isinstance(fields[name], kind) for name, kind in kinds.items()):
        raise DamagedError(folder, [Damage(MANIFEST, "is not a manifest")])
    if damages := [damage for name, record in fields["files"].items() if (damage := _invalid_record(name, record))]:
        raise DamagedError(folder, damages)
    files = {name: parse_record(record) for name, record in fields.pop("files").items()}
    if INDEX not in files:
        raise DamagedError(folder, [Damage(MANIFEST, f"does not list {INDEX}")])
    named = STEP_NAME.fullmatch(folder.name)
    if fields["step"] < 0 or (named and int(named[1]) != fields["step"]):
        raise DamagedError(folder, [Damage(MANIFEST, f"is of step {fields['step']}")])
    if wrong := _invalid_values(fields | {"files": files}):
        raise DamagedError(folder, [Damage(MANIFEST, wrong)])
    return Manifest(**fields, files=files)


def read_limited(path: Path, limit_bytes: int) -> bytes:
    """Return the contents of a file of at most `limit_bytes`. Raises ValueError if it is longer, OSError for a FIFO,
    a link or anything else that is not a regular file."""
    with open_regular_file(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > limit_bytes:
            raise ValueError(f"{size:,} bytes are more than the limit of {limit_bytes:,}")
        return file.read(size + 1)  # Python allocates what it is asked for


def unreadable(name: str, error: OSError | ValueError) -> Damage:
    """Return the damage of a file that could not be read."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return Damage(name, f"cannot be read: {reason}")


def _invalid_values(fields: dict[str, Any]) -> str:
    """Return what is wrong with the numbers and texts of a manifest, after its name; an empty text if nothing is."""
    if not 0 <= fields["time"] <= MAX_TIME:  # false for NaN too
        return f"has an impossible time: {fields['time']}"
    counts = {"step": fields["step"], "term": fields["term"], "world size": fields["world_size"] - 1}
    if wrong := [name for name, count in counts.items() if not 0 <= count < MAX_NUMBER]:
        return f"has an impossible {wrong[0]}"
    for node, names in fields["nodes"].items():
        is_list = isinstance(names, list) and all(isinstance(name, str) and name in fields["files"] for name in names)
        if not node.isprintable() or not is_list:
            return f"has an impossible list of the files of node {ascii(node)[:80]}"
    for name, value in fields["progress"].items():
        if name not in OPTIMIZER_VALUES and not _is_plain(value):
            return f"has an impossible progress: {ascii(name)[:80]} is {ascii(value)[:80]}"
    return ""


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Return whether a value is what a counter saves: finite numbers, counts that are not negative, printable texts."""
    match value:
        case bool() | None:
            return True
        case int():
            return 0 <= value < MAX_NUMBER
        case float():
            return math.isfinite(value)
        case str():
            return value.isprintable()
        case dict() if depth < MAX_PROGRESS_DEPTH:
            return all(key.isprintable() and _is_plain(each, depth + 1) for key, each in value.items())
        case list() if depth < MAX_PROGRESS_DEPTH:
            return all(_is_plain(each, depth + 1) for each in value)
    return False


def _invalid_record(name: str, record: Any) -> Damage | None:
    """Return what is wrong with a file's record. Only names that Trimaran writes are accepted: none is a path."""
    if not FILE_NAME.fullmatch(name):
        return Damage(MANIFEST, f"lists {name[:80]!r}, which is not a file of a checkpoint")
    fields = record if isinstance(record, dict) else {}
    size, part_bytes, checksums, count = fields.get("bytes"), fields.get("part_bytes"), [], 0
    if type(size) is int and size >= 0:
        if fields.keys() == {"bytes", "sha256"}:
            checksums, count = [fields["sha256"]], 1
        elif fields.keys() == {"bytes", "part_bytes", "part_sha256"} and type(part_bytes) is int and part_bytes > 0:
            checksums, count = fields["part_sha256"], -(-size // part_bytes) if name != INDEX else 0
    is_valid = isinstance(checksums, list) and len(checksums) == count > 0
    if is_valid and all(isinstance(each, str) and SHA256_HEX.fullmatch(each) for each in checksums):
        return None
    return Damage(MANIFEST, f"has no valid length and checksum of {name}")
