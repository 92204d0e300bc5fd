"""What a checkpoint says of itself: its step, its files with their sums, and a sum over all that. No torch in here."""

import json
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from trimaran.checkpoint.durable import OLD
from trimaran.core import UserError

FORMAT = 1
MANIFEST, INDEX = "manifest.json", "index.json"
FILE_NAME = re.compile(r"index\.json|rank-\d{5,9}(\.frozen)?\.safetensors")
STEP_NAME = re.compile(r"step-(\d{8,18})")
MAX_MANIFEST_BYTES = 256 << 20
MAX_INDEX_BYTES = 4 << 30
SUM = re.compile(r"[0-9a-f]{64}")
BLANK = "0" * 64
END = b'"\n}\n'


@dataclass(frozen=True, slots=True)
class FileRecord:
    """How long a file is and the SHA-256 of what is in it."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that is wrong with a checkpoint: a file, and a phrase that goes on from its name."""

    file: str
    what: str

    def __str__(self) -> str:
        return f"{self.file} {self.what}"


class DamagedError(UserError):
    """A checkpoint is not what it was when it was written."""

    def __init__(self, folder: Path, damages: Sequence[Damage]) -> None:
        more = f", and {len(damages) - 1} more" if len(damages) > 1 else ""
        super().__init__("K007", f"this checkpoint is damaged: {damages[0]}{more}", where=str(folder),
                         fix="use another one: `trimaran checkpoints verify RUN` says which are whole")  # fmt: skip
        self.damages = tuple(damages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What belongs to a checkpoint besides tensors, all of it plain data.

    `time` is seconds since the epoch, `term` the lease's under which it was written. `plan` is as in `plan.json`,
    `recipe` is the text of `recipe.yaml`. `progress` is whatever the state of training wants back.
    """

    step: int
    time: float = 0.0
    term: int = 0
    world_size: int = 1
    plan: dict[str, Any] = field(default_factory=dict)
    recipe: str = ""
    progress: dict[str, Any] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(record.bytes for record in self.files.values())


def manifest_bytes(manifest: Manifest) -> bytes:
    """Return the file: JSON whose last field is the SHA-256 of the file with that field all zeros."""
    fields = {"format": FORMAT, **asdict(manifest), "digest": BLANK}
    text = (json.dumps(fields, indent=1) + "\n").encode()
    assert text.endswith(BLANK.encode() + END)
    return text[: -len(BLANK) - len(END)] + sha256(text).hexdigest().encode() + END


def read_manifest(folder: Path) -> Manifest:
    """Return what the checkpoint in `folder` says of itself. Raises DamagedError unless its digest is right.

    A folder without a manifest, or one of a later format, is a UserError of another kind: it may be whole.
    """
    if folder.is_symlink():
        raise DamagedError(folder, [Damage(folder.name, "is a link")])
    try:
        text = read_limited(folder / MANIFEST, MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        raise UserError("K008", f"there is no checkpoint here: {MANIFEST} is missing", where=str(folder),
                        fix="name a folder like checkpoints/step-00000012 of a run") from None  # fmt: skip
    except (OSError, ValueError) as error:
        raise DamagedError(folder, [Damage(MANIFEST, f"cannot be read: {error}")]) from None
    digest = text[-len(BLANK) - len(END) : -len(END)]
    blank = text[: -len(BLANK) - len(END)] + BLANK.encode() + END
    if not text.endswith(END) or sha256(blank).hexdigest().encode() != digest:
        raise DamagedError(folder, [Damage(MANIFEST, "is not what its digest says")])
    return _checked(folder, text)


def read_limited(path: Path, limit_bytes: int) -> bytes:
    """Return what is in a regular file of at most `limit_bytes`. Raises ValueError for anything else."""
    with os.fdopen(os.open(path, OLD), "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise ValueError("it is not a file")
        if about.st_size > limit_bytes:
            raise ValueError(f"{about.st_size:,} bytes are more than the limit of {limit_bytes:,}")
        return file.read(limit_bytes + 1)


def _checked(folder: Path, text: bytes) -> Manifest:
    """Return the manifest that `text` is. Its digest is right, but anyone can compute one: every field is checked."""
    try:
        fields = json.loads(text)
        del fields["digest"]
        version = fields.pop("format")
    except (ValueError, RecursionError, KeyError, TypeError):
        raise DamagedError(folder, [Damage(MANIFEST, "is not a manifest")]) from None
    if version != FORMAT:
        raise UserError("K008", f"this checkpoint has format {version!r}, and format {FORMAT} is what can be read here",
                        where=str(folder), fix="read it with the version of trimaran that wrote it")  # fmt: skip
    kinds = {each: (int, float) if each == "time" else type(value) for each, value in asdict(Manifest(step=0)).items()}
    whole = isinstance(fields, dict) and fields.keys() == kinds.keys()
    if not whole or not all(isinstance(fields[name], kind) for name, kind in kinds.items()):
        raise DamagedError(folder, [Damage(MANIFEST, "is not a manifest")])
    if damages := [damage for name, record in fields["files"].items() if (damage := _suspicious(name, record))]:
        raise DamagedError(folder, damages)
    files = {name: FileRecord(**record) for name, record in fields.pop("files").items()}
    if INDEX not in files:
        raise DamagedError(folder, [Damage(MANIFEST, f"does not list {INDEX}")])
    named = STEP_NAME.fullmatch(folder.name)
    if fields["step"] < 0 or (named and int(named[1]) != fields["step"]):
        raise DamagedError(folder, [Damage(MANIFEST, f"is of step {fields['step']}")])
    return Manifest(**fields, files=files)


def _suspicious(name: str, record: Any) -> Damage | None:
    """Return what is wrong with a file's record. Only names that we would give are taken: none of them is a path."""
    if not FILE_NAME.fullmatch(name):
        return Damage(MANIFEST, f"lists {name[:80]!r}, which is no file of a checkpoint")
    fine = (
        isinstance(record, dict)
        and record.keys() == {"bytes", "sha256"}
        and type(record["bytes"]) is int
        and record["bytes"] >= 0
        and isinstance(record["sha256"], str)
        and SUM.fullmatch(record["sha256"])
    )
    return None if fine else Damage(MANIFEST, f"says nothing sensible of {name}")
