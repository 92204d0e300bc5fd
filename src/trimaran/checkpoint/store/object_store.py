"""Checkpoints in an object store, or anything else that fsspec has a file system for. Imports no torch.

```text
s3://bucket/my-run/               checkpoint.store
  owner.json                      the run directory that writes here
  step-00000040-1a2b3c4d/         a checkpoint; the last digits are the first of its manifest's digest
    rank-00000.safetensors ...    the files of checkpoints/step-00000040, unchanged
    index.json
    manifest.json                 written last: without it this is no checkpoint
```

The digits make a folder belong to one commit of a step: files of two commits never mix. fsspec reads credentials from
the environment or the machine, as each of its file systems documents.
"""

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from trimaran.checkpoint.file_parts import map_in_threads
from trimaran.checkpoint.manifest import (
    FILE_END,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    ZERO_DIGEST,
    Damage,
    DamagedError,
    FileRecord,
    Manifest,
    parse_manifest,
    read_limited,
)
from trimaran.checkpoint.step_dirs import steps_to_prune
from trimaran.core import UserError, open_regular_file

STORED_NAME = re.compile(r"step-(\d{8,18})-([0-9a-f]{8})")
OWNER, REFUSED_MANIFEST = "owner.json", "refused-manifest.json"
MAX_OWNER_BYTES = 1 << 16
BLOCK_BYTES = 8 << 20  # of one request; S3 accepts parts of 5 MiB or more
MAX_BLOCKS = 9000  # of a file; S3 accepts 10,000 parts
BLOCK_MULTIPLE = 256 << 10  # Google's requests are multiples of this
NUM_TRANSFERS = 8
"""How many files are written, or blocks read, at a time. With about three blocks of memory each they take 200 MB."""
HAVE_NO_FOLDERS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci", "tos", "obs"}
"""For these, fsspec's `makedirs` would at most create a bucket, which the user has to do."""
PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("abfs", "abfss", "az", "adl"), "adlfs"),
    **dict.fromkeys(("sftp", "ssh"), "paramiko"),
    "oci": "ocifs",
    "oss": "ossfs",
    "smb": "smbprotocol",
    "webhdfs": "requests",
    "hdfs": "pyarrow",
}
WITH_EXTRA = {"fsspec", "s3fs"}
MAX_MESSAGE = 300  # characters
Result = TypeVar("Result")


class StoreError(Exception):
    """The store did not do what it was asked; another try may help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredStep:
    """A folder in the store. Only `complete` ones are checkpoints. `sizes` are the bytes of each object in it."""

    step: int
    name: str
    sizes: dict[str, int]

    @property
    def complete(self) -> bool:
        return MANIFEST in self.sizes

    @property
    def refused(self) -> bool:
        return REFUSED_MANIFEST in self.sizes


def stored_name(step: int, manifest: bytes) -> str:
    """Return the name in the store of the checkpoint with this manifest."""
    digest = manifest[-len(ZERO_DIGEST) - len(FILE_END) : -len(FILE_END)].decode("ascii", "replace")
    return f"step-{step:08d}-{digest[:8]}"


def step_in_name(name: str) -> int:
    """Return the step of a checkpoint in the store."""
    named = STORED_NAME.fullmatch(name)
    assert named, f"{name} is not named like a checkpoint in a store"
    return int(named[1])


def open_store(url: str, *, block_bytes: int = BLOCK_BYTES) -> "ObjectStore":
    """Return the store at `url`, not connected yet; requests have `block_bytes`. A missing package raises K060."""
    protocol = url.partition("://")[0]
    if find_spec("fsspec") is None:
        raise _missing_package(url, "fsspec")
    from fsspec.core import url_to_fs  # noqa: PLC0415  optional

    try:
        file_system, root = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    except ImportError as error:
        raise _missing_package(url, PACKAGES.get(protocol, ""), str(error)) from None
    except Exception as error:  # whatever a backend raises for a URL that it cannot use
        raise UserError(
            "K061.store-cannot-used-check", where=f"checkpoint.store ({url})", describe=describe(error)
        ) from None
    has_folders = protocol not in HAVE_NO_FOLDERS
    return ObjectStore(url, file_system, root.rstrip("/"), has_folders=has_folders, block_bytes=block_bytes)


def _missing_package(url: str, package: str, reason: str = "") -> UserError:
    fix = f"pip install {package}" if package else "install the package that fsspec names for this kind of URL"
    fix = "pip install 'trimaran[store]'" if package in WITH_EXTRA else fix
    what = f"this store needs the package {package}" if package else f"this store needs another package: {reason}"
    return UserError("K060", what, where=f"checkpoint.store ({url})", fix=f"{fix}, on every machine of the run")


def unusable_store(url: str, why: str) -> UserError:
    """Return the error for a store that is needed now and cannot be used."""
    return UserError("K061.store-cannot-used", where=f"checkpoint.store ({url})", why=why)


def describe(error: BaseException) -> str:
    """Return an error of a backend on one line, never empty."""
    text = " ".join((error.what if isinstance(error, UserError) else str(error)).split())[:MAX_MESSAGE]
    if text and isinstance(error, (StoreError, UserError)):
        return text
    return f"{type(error).__name__}: {text}".rstrip(": ")


def with_retries(act: Callable[[], Result], delays: Sequence[float], notify: Callable[[str], None]) -> Result:
    """Return the result of `act`, which is tried again after each of `delays` if the store fails."""
    for delay in delays:
        try:
            return act()
        except StoreError as error:
            notify(f"{describe(error)}; trying again in {delay:g} s")
            time.sleep(delay)
    return act()


class ObjectStore:
    """The checkpoints below one URL. Its methods raise StoreError if the store cannot be reached or refuses."""

    def __init__(
        self, url: str, file_system: Any, root: str, *, has_folders: bool, block_bytes: int = BLOCK_BYTES
    ) -> None:
        self.url, self._files, self._root, self._has_folders = url, file_system, root, has_folders
        self._block_bytes = block_bytes

    def steps(self) -> list[StoredStep]:
        """Return all checkpoints in ascending order of their steps, also those that are not complete."""
        names = sorted(name for name, _ in self._listed(self._root) if STORED_NAME.fullmatch(name))
        sizes = {name: dict(self._listed(f"{self._root}/{name}")) for name in names}
        found = [StoredStep(step=step_in_name(name), name=name, sizes=each) for name, each in sizes.items()]
        return sorted(found, key=lambda each: each.step)

    def read_manifest(self, name: str) -> tuple[Manifest, bytes]:
        """Return the manifest of a checkpoint, and its text. Raises DamagedError if its digest is wrong."""
        folder = Path(name.rpartition("-")[0])
        with self._reporting():
            path = f"{self._root}/{name}/{MANIFEST}"
            try:
                num_bytes = min(MAX_MANIFEST_BYTES, self._files.info(path)["size"])
                text = self._files.cat_file(path, start=0, end=num_bytes)
            except FileNotFoundError:
                raise DamagedError(folder, [Damage(MANIFEST, "is missing in the store")]) from None
        manifest = parse_manifest(folder, text)
        if stored_name(manifest.step, text) != name:
            raise DamagedError(folder, [Damage(MANIFEST, f"in the store is not that of {name}")])
        return manifest, text

    def owner(self) -> dict[str, Any] | None:
        """Return the run that writes to this address; None if none has written yet."""
        with self._reporting():
            try:
                fields = json.loads(self._files.cat_file(f"{self._root}/{OWNER}", start=0, end=MAX_OWNER_BYTES))
            except (FileNotFoundError, ValueError):
                return None
        return fields if isinstance(fields, dict) else None

    def claim(self, owner: dict[str, Any]) -> None:
        """Write who writes here from now on."""
        with self._reporting():
            self._make_folder(self._root)
            self._files.pipe_file(f"{self._root}/{OWNER}", json.dumps(owner).encode() + b"\n")

    def upload(
        self,
        folder: Path,
        names: Iterable[str],
        *,
        previous: tuple[str, Manifest] | None = None,
        count: Callable[[int], None] = lambda num_bytes: None,
        delays: Sequence[float] = (),
        notify: Callable[[str], None] = lambda text: None,
    ) -> int:
        """Upload files of the checkpoint in `folder`, and return how many bytes were sent.

        A file that is there already, or in the checkpoint `previous` of the store, is not sent again. What is read from
        the disk has to match its checksum. `count` is called with bytes as they are sent, by several threads.
        """
        text = read_limited(folder / MANIFEST, MAX_MANIFEST_BYTES)
        manifest = parse_manifest(folder, text)
        name = stored_name(manifest.step, text)
        target = f"{self._root}/{name}"
        present = with_retries(lambda: dict(self._listed(target)), delays, notify)
        wanted = [each for each in names if present.get(each) != manifest.files[each].bytes]
        if not wanted:
            return 0
        with_retries(lambda: self._make_folder(target), delays, notify)

        def send(file: str) -> int:
            record = manifest.files[file]
            if previous and previous[0] != name and previous[1].files.get(file) == record:
                with contextlib.suppress(StoreError):  # the previous one may be gone
                    with self._reporting():
                        self._files.cp_file(f"{self._root}/{previous[0]}/{file}", f"{target}/{file}")
                    count(record.bytes)
                    return 0
            with_retries(lambda: self._send(folder / file, f"{target}/{file}", record, count), delays, notify)
            return record.bytes

        return sum(map_in_threads(send, wanted, num_threads=NUM_TRANSFERS))

    def publish(self, folder: Path) -> tuple[str, bool]:
        """Complete the uploaded checkpoint `folder` in the store; return its name and whether it was incomplete."""
        text = read_limited(folder / MANIFEST, MAX_MANIFEST_BYTES)
        manifest = parse_manifest(folder, text)
        name = stored_name(manifest.step, text)
        present = dict(self._listed(f"{self._root}/{name}"))
        if MANIFEST in present:
            return name, False
        if missing := sorted(each for each, record in manifest.files.items() if present.get(each) != record.bytes):
            raise StoreError(f"{len(missing)} files have not arrived in the store, such as {missing[0]}")
        target = f"{self._root}/{name}/{MANIFEST}"
        with self._reporting():
            if self._has_folders:  # a rename is atomic there; a write is in object stores
                self._files.pipe_file(f"{target}.draft", text)
                self._files.mv(f"{target}.draft", target)
            else:
                self._files.pipe_file(target, text)
        return name, True

    def prune(self, name: str, *, keep: int, keep_every: int) -> list[str]:
        """Remove what retention does not keep, and unfinished uploads older than the complete checkpoint `name`."""
        found, step = self.steps(), step_in_name(name)
        complete = [each.step for each in found if each.complete]
        old = set(steps_to_prune(sorted({*complete}), keep=keep, keep_every=keep_every, verified=step))
        gone = [
            each.name
            for each in found
            if each.name != name
            and not each.refused
            and (each.step in old or each.step == step or (not each.complete and each.step < step))
        ]
        for each in gone:
            self.remove(each)
        return gone

    def remove_unfinished(self, name: str) -> None:
        """Remove uploads other than `name` that have no manifest. Nobody else may be uploading."""
        for each in self.steps():
            if each.name != name and not each.complete and not each.refused:
                self.remove(each.name)

    def remove(self, name: str) -> None:
        """Remove a checkpoint. Its manifest goes first, so that no half of it ever looks complete."""
        with self._reporting():
            with contextlib.suppress(FileNotFoundError):
                self._files.rm_file(f"{self._root}/{name}/{MANIFEST}")
            with contextlib.suppress(FileNotFoundError):
                self._files.rm(f"{self._root}/{name}", recursive=True)

    def refuse_later(self, step: int, before: float) -> list[str]:
        """Rename manifests of steps after `step` written before a time, so no run loads them; return the names."""
        bad = []
        for name in [each.name for each in self.steps() if each.step > step and each.complete]:
            with contextlib.suppress(DamagedError):
                if self.read_manifest(name)[0].time > before:
                    continue
            bad.append(name)
        for name in bad:
            with self._reporting():
                folder = f"{self._root}/{name}"
                self._files.cp_file(f"{folder}/{MANIFEST}", f"{folder}/{REFUSED_MANIFEST}")
                self._files.rm_file(f"{folder}/{MANIFEST}")
        return bad

    def fetch(
        self,
        name: str,
        records: dict[str, FileRecord],
        folder: Path,
        *,
        count: Callable[[int], None] = lambda num_bytes: None,
        delays: Sequence[float] = (),
        notify: Callable[[str], None] = lambda text: None,
    ) -> list[Damage]:
        """Write files of a checkpoint to `folder`, and return those that the store does not have in their length.

        They are not verified here: that is done when they are loaded, like that of every other file.
        """
        sizes = with_retries(lambda: dict(self._listed(f"{self._root}/{name}")), delays, notify)
        damages = [
            Damage(file, f"has {sizes[file]:,} bytes instead of {record.bytes:,} in the store"
                   if file in sizes else "is missing in the store")
            for file, record in records.items() if sizes.get(file) != record.bytes
        ]  # fmt: skip
        if damages:
            return damages
        folder.mkdir(parents=True, exist_ok=True)
        drafts = {file: folder / f".{file}.draft" for file in records}
        with contextlib.ExitStack() as stack:
            descriptors = {file: stack.enter_context(draft.open("wb")).fileno() for file, draft in drafts.items()}
            for file, record in records.items():
                os.ftruncate(descriptors[file], record.bytes)
            size = self._block_bytes
            blocks = [(file, at) for file, record in records.items() for at in range(0, record.bytes, size)]

            def read(block: tuple[str, int]) -> None:
                file, at = block
                num_bytes = min(self._block_bytes, records[file].bytes - at)
                path = f"{self._root}/{name}/{file}"
                data = with_retries(lambda: self._read(path, at, num_bytes), delays, notify)
                os.pwrite(descriptors[file], data, at)
                count(num_bytes)

            map_in_threads(read, blocks, num_threads=NUM_TRANSFERS)
            for descriptor in descriptors.values():
                os.fsync(descriptor)
        for file, draft in drafts.items():
            draft.replace(folder / file)
        return []

    def verify(
        self,
        name: str,
        count: Callable[[int], None] = lambda num_bytes: None,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> list[Damage]:
        """Read every byte of a checkpoint in the store, and return what is not what was written.

        `count` is called with bytes as they are read, by several threads; `while_waiting` now and then, by this one.
        """
        try:
            manifest, _ = self.read_manifest(name)
        except DamagedError as error:
            return list(error.damages)
        sizes = dict(self._listed(f"{self._root}/{name}"))
        parts = [(file, record, number) for file, record in manifest.files.items() if sizes.get(file) == record.bytes
                 for number in range(len(record.checksums))]  # fmt: skip

        def damage(part: tuple[str, FileRecord, int]) -> Damage | None:
            file, record, number = part
            digest, (begin, end) = sha256(), record.range_of(number)
            for at in range(begin, end, self._block_bytes):
                digest.update(self._read(f"{self._root}/{name}/{file}", at, min(self._block_bytes, end - at)))
                count(min(self._block_bytes, end - at))
            is_right = digest.hexdigest() == record.checksums[number]
            return None if is_right else Damage(file, "is not what was written: its checksum is wrong")

        damages = map_in_threads(damage, parts, num_threads=NUM_TRANSFERS, while_waiting=while_waiting)
        found = {each.file: each for each in damages if each}
        missing = [Damage(file, "is missing or has another length in the store")
                   for file, record in manifest.files.items() if sizes.get(file) != record.bytes]  # fmt: skip
        return [*missing, *found.values()]

    def _listed(self, path: str) -> Iterator[tuple[str, int]]:
        """Yield the name and bytes of each entry of a folder; nothing if it does not exist."""
        with self._reporting():
            try:
                entries = self._files.ls(path, detail=True)
            except FileNotFoundError:
                return
        for entry in entries:
            full = entry["name"].rstrip("/")
            if full != path:
                yield full.rpartition("/")[2], entry.get("size") or 0

    def _read(self, path: str, begin: int, num_bytes: int) -> bytes:
        with self._reporting():
            data = self._files.cat_file(path, start=begin, end=begin + num_bytes)
        if len(data) != num_bytes:
            raise StoreError(f"{path} ends at byte {begin + len(data):,}")
        return data

    def _send(self, source: Path, target: str, record: FileRecord, count: Callable[[int], None]) -> None:
        """Write a file to the store. Raises DamagedError if it is not what its checksum says."""
        block = max(self._block_bytes, -(-record.bytes // MAX_BLOCKS))
        block = -(-block // BLOCK_MULTIPLE) * BLOCK_MULTIPLE
        with open_regular_file(source) as file, self._reporting():
            out = self._files.open(target, "wb", block_size=block)
            try:
                for number, checksum in enumerate(record.checksums):
                    digest, (begin, end) = sha256(), record.range_of(number)
                    for at in range(begin, end, block):
                        data = file.read(min(block, end - at))
                        digest.update(data)
                        out.write(data)
                        count(len(data))
                    if digest.hexdigest() != checksum:
                        what = "is not what was written: its checksum is wrong"
                        raise DamagedError(source.parent, [Damage(source.name, what)])
                out.close()
            except BaseException:  # nothing of it stays in the store
                with contextlib.suppress(Exception):
                    out.discard()
                with contextlib.suppress(Exception):
                    out.closed = True  # or it would be completed when Python frees it
                with contextlib.suppress(Exception):
                    out.f.close()  # of a local file
                with contextlib.suppress(Exception):
                    self._files.rm_file(target)
                raise

    def _make_folder(self, path: str) -> None:
        if self._has_folders:
            with self._reporting():
                self._files.makedirs(path, exist_ok=True)

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        """Turn whatever a backend raises into a StoreError."""
        try:
            yield
        except (StoreError, UserError):
            raise
        except Exception as error:  # botocore, aiohttp, paramiko and others have their own
            raise StoreError(describe(error)) from error
