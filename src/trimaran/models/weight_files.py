"""The files of a model's weights, and what identifies the frozen base of an adapter. Imports no torch."""

import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from trimaran.core import ModelSection, UserError, templated
from trimaran.core.regular_files import check_regular_file, open_regular_file, read_regular_text, write_atomically
from trimaran.models.config_fields import read_json
from trimaran.models.hub_names import hub_repo_of
from trimaran.models.section_spec import model_folder, spec_of

MAX_INDEX_BYTES = 100_000_000


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of the model in `folder`; an empty list if it holds no weights of any kind."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    for path in (index, single):
        if path.exists():
            check_regular_file(path, follow_links=True)  # in a Hugging Face cache every file is a link
    if index.is_file():
        names = read_json(index, limit_bytes=MAX_INDEX_BYTES).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise UserError("M022.index-lists", where=str(index))
        files = []
        for name in sorted({str(each) for each in names.values()}):
            path = index.parent / name
            if Path(name).name != name or not path.is_file():
                raise UserError("M022.index-lists-not-file", where=str(index), name=name)
            files.append(path)
        return files
    if single.is_file():
        return [single]
    for path in sorted(folder.iterdir()):
        if path.suffix in (".safetensors", ".bin", ".pth"):
            raise UserError("M020.weights-not-read", where=str(folder), path=path.name)
    return []


# The digest of a file is that of all its bytes, so that it can be compared with `sha256sum` and with a hub's own. It is
# cached by path, size, times and inode of the file.

CONFIG = "config.json"
BASE_DIGEST = "trimaran-base.json"  # in the folder of an adapter
CACHE_FOLDER = "base-digests"
CHUNK_BYTES = 1 << 20
SETTLED_NS = 2_000_000_000
"""A file that changed this recently is not cached: a later change might have the same time."""
HEX_CHARACTERS = 64
MAX_NAMED_FILES = 3
MAX_READS = 3  # of a file that changes while it is read
THREADS = 4  # hashlib releases the GIL


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseDigest:
    """The digests of a base: of each file by its name, and of how its weights are drawn if no file has them."""

    files: Mapping[str, str] = field(default_factory=dict)
    initial: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for a manifest; `digest` is one for all."""
        fields = {"files": dict(sorted(self.files.items())), "initial": self.initial}
        return fields | {"digest": sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()}


def base_files(section: ModelSection) -> list[Path]:
    """Return the files that define the base: config.json, the weights, and code that the recipe trusts."""
    if section.path is None:
        return []
    folder = model_folder(section.path)
    code = sorted(folder.glob("*.py")) if section.trust_remote_code else []
    return [folder / CONFIG, *weight_files(folder), *code]


def base_reference(section: ModelSection) -> tuple[str | None, str | None]:
    """Return what PEFT calls the base: its name on the Hub and the revision, or its folder; None if it has none."""
    if section.path is None:
        return None, None
    folder = model_folder(section.path).absolute()
    return hub_repo_of(folder) or (str(folder), None)


def initial_digest(section: ModelSection, seed: int) -> str:
    """Return the digest of what random weights depend on, the shape and the seed; empty if files hold the weights."""
    if section.path is not None and weight_files(model_folder(section.path)):
        return ""
    spec = spec_of(section)
    shape = asdict(spec) if spec is not None else None
    if shape is not None and "vision" in shape:
        del shape["vision"]["ends"]["positions_per_second"]  # no weight depends on it
    facts = [seed, type(spec).__name__, shape]
    return sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def compute_base_digest(
    section: ModelSection,
    seed: int,
    cache: Path | None,
    report_progress: Callable[[float], None] = lambda fraction: None,
) -> BaseDigest:
    """Return the digest of the base of `section`, computed in this process by a few threads."""
    files = base_files(section)
    total, done = max(1, sum(each.stat().st_size for each in files)), 0

    def count(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        report_progress(min(1.0, done / total))

    with ThreadPoolExecutor(THREADS) as pool:
        digests = list(pool.map(lambda path: file_digest(path, cache, count), files))
    by_name = {path.name: digest for path, digest in zip(files, digests, strict=True)}
    return BaseDigest(files=by_name, initial=initial_digest(section, seed))


def file_identity(path: Path) -> list[int]:
    """Return what changes if the contents of a file change. Equal on all machines that share its disk."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def file_digest(
    path: Path,
    cache: Path | None,
    count: Callable[[int], None] = lambda num_bytes: None,
    *,
    settled_ns: int = SETTLED_NS,
) -> str:
    """Return the SHA-256 of a file, from the cache if the file has not changed since it was computed.

    `count` is called with the number of bytes after each chunk. Raises UserError if the file changes meanwhile.
    """
    for _ in range(MAX_READS):  # a new link to the file changes its times too
        before = file_identity(path)
        name = sha256(json.dumps([str(path.resolve()), *before]).encode()).hexdigest()[:32]
        note = None if cache is None else cache / CACHE_FOLDER / name
        known = ""
        if note is not None:
            with suppress(OSError, ValueError):
                known = read_regular_text(note).strip()
        if len(known) == HEX_CHARACTERS:
            count(before[0])
            return known
        began, digest, chunk = time.time_ns(), sha256(), memoryview(bytearray(CHUNK_BYTES))
        with open_regular_file(path, follow_links=True) as file:  # in a Hugging Face cache every file is a link
            while size := file.readinto(chunk):
                digest.update(chunk[:size])
                count(size)
        if file_identity(path) != before:
            continue
        if note is not None and max(before[1], before[2]) < began - settled_ns:
            with suppress(OSError):  # without a cache it is computed again
                note.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(note, f"{digest.hexdigest()}\n")
        return digest.hexdigest()
    raise changed_base(path, "it changed while it was read")


def changed_base(where: Path | str, what: str) -> UserError:
    """Return the error that a base is not the one that the adapter was trained on."""
    return UserError("K048.base-adapter", where=str(where), text=what)


def base_difference(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return how two bases differ, both as `BaseDigest.as_dict` gives them; an empty text if they are the same."""
    if saved.get("digest") == now.get("digest"):
        return ""
    then, here = (each.get("files") or {} for each in (saved, now))
    changes = [f"{name} is new" for name in sorted(here.keys() - then.keys())]
    changes += [f"{name} is missing" for name in sorted(then.keys() - here.keys())]
    changes += [
        f"{name} has other contents (SHA-256 {then[name][:12]}, now {here[name][:12]})"
        for name in sorted(then.keys() & here.keys())
        if then[name] != here[name]
    ]
    if saved.get("initial") != now.get("initial"):
        changes.append("its random weights depend on another shape or seed")
    more = (
        templated(", and {num_changes} more", num_changes=len(changes) - MAX_NAMED_FILES)
        if len(changes) > MAX_NAMED_FILES
        else ""
    )
    return ", ".join(changes[:MAX_NAMED_FILES]) + more or "its digest differs"
