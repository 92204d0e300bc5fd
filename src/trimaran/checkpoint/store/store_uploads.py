"""Uploads checkpoints to the object store in the background: every node its own files, then rank 0 the manifest.

The first rank of each node has a thread, which waits for the process of `store_process.py`. All of them get the same
orders in the same sequence. They tell rank 0 through the torch store when their files have arrived.

When a run resumes, the same ranks fetch a checkpoint together. What was fetched is verified like every other file
before it is used.
"""

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from trimaran.checkpoint.durable import DISK, report_disk_errors, write_file
from trimaran.checkpoint.manifest import INDEX, MANIFEST, Manifest, parse_manifest, read_manifest
from trimaran.checkpoint.rank_layout import RankLayout, all_true
from trimaran.checkpoint.step_dirs import complete_steps, draft_path, step_path
from trimaran.checkpoint.step_files import files_here
from trimaran.checkpoint.store.object_store import StoreError, describe, stored_name, unusable_store
from trimaran.checkpoint.store.store_process import TAKEN_OVER, DamagedInStoreError, StoreClient
from trimaran.checkpoint.write_checkpoint import KeyValueStore
from trimaran.core import CheckpointSection, UserError, read_regular_text, write_atomically
from trimaran.parallel import all_gather_json, broadcast_json

log = logging.getLogger(__name__)

NODE_TIMEOUT_SECONDS = 24 * 3600.0  # how long to wait for the upload of another node
REFUSAL = ".refuse-in-store.json"
PROGRESS_SECONDS, MAX_POLL_SECONDS = 0.5, 5.0
POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadResult:
    """What became of an upload. `sent_bytes` leaves out what the store had. `skipped` checkpoints before this one were
    not uploaded, because the one before them was still on its way."""

    step: int
    url: str
    seconds: float = 0.0
    bytes: int = 0
    sent_bytes: int = 0
    skipped: int = 0
    failed: str = ""

    def as_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        del fields["step"]
        return {name: value for name, value in fields.items() if value or name not in ("failed", "skipped")}


class StoreUploads:
    """The uploads of one node. `owner` identifies the run, see `ObjectStore.claim`; only that of rank 0 counts.

    `nonce` distinguishes the messages of this attempt from others; it is equal on all ranks.
    """

    def __init__(
        self,
        folder: Path,
        rank_layout: RankLayout,
        store: KeyValueStore,
        client: StoreClient,
        section: CheckpointSection,
        *,
        own_disk: str = "",
        owner: dict[str, Any],
        nonce: str,
    ) -> None:
        self._folder, self._rank_layout, self._store, self._client = folder, rank_layout, store, client
        self._section, self._own_disk, self._owner, self._nonce = section, own_disk, owner, nonce
        self._orders: SimpleQueue[tuple[str, int]] = SimpleQueue()
        self._results: SimpleQueue[UploadResult] = SimpleQueue()
        self._condition = threading.Condition()
        self._num_waiting = 0  # orders that are not done
        self._count, self._skipped = 0, 0
        self.last_ordered = -1  # the last step that was ordered to be uploaded
        self.step: int | None = None  # the step that is being uploaded: its files must stay
        self.sent_bytes = self.total_bytes = 0  # how far this node is with it
        threading.Thread(target=self._work, name="trimaran-upload", daemon=True).start()

    @property
    def busy(self) -> bool:
        return self._num_waiting > 0

    def start(self, step: int) -> None:
        """Order the upload of a step. Every node must do so, in the same sequence."""
        self.last_ordered = step
        self._order("upload", step)

    def skip(self) -> None:
        """Count a checkpoint that is not uploaded, because the last one is still on its way."""
        self._skipped += 1

    def refuse_later(self, step: int) -> None:
        """Order that no checkpoint of more than `step` steps in the store is used again. Only rank 0 does it."""
        # The order is also on disk until it is done: a run that dies meanwhile must not load such a state.
        if self._rank_layout.rank == 0:
            with suppress(OSError):  # a full disk does not keep it from being done now
                self._folder.mkdir(exist_ok=True)
                write_atomically(self._folder / REFUSAL, json.dumps({"step": step, "before": time.time()}))
            self._order("refuse_later", step)

    def wait(self, seconds: float) -> bool:
        """Return whether all orders are done, after at most `seconds`."""
        with self._condition:
            return self._condition.wait_for(lambda: not self.busy, seconds)

    def results(self) -> list[UploadResult]:
        """Return the results since the last call; only rank 0 has any."""
        return [self._results.get() for _ in range(self._results.qsize())]

    def _order(self, what: str, step: int) -> None:
        with self._condition:
            self._num_waiting += 1
        self._orders.put((what, step))

    def _work(self) -> None:
        while True:
            what, step = self._orders.get()
            try:
                if what == "upload":
                    self._upload(step)
                elif not self._claim():
                    self._client.call("refuse_later", step=step, before=time.time())
                    (self._folder / REFUSAL).unlink(missing_ok=True)
            except Exception as error:  # training continues, and the next checkpoint is tried again
                self._report(step, failed=describe(error))
            self.step = None
            with self._condition:
                self._num_waiting -= 1
                self._condition.notify_all()

    def _upload(self, step: int) -> None:
        began, rank = time.monotonic(), self._rank_layout.rank
        self._count += 1
        self.step, self.sent_bytes, self.total_bytes = step, 0, 0
        mine = self._send(step)
        self._store.set(self._key(rank), json.dumps(mine))
        if rank != 0:
            return
        keys = [self._key(node) for node in sorted({*self._rank_layout.nodes})]
        answers = [json.loads(text) for text in self._store.wait_get(keys, NODE_TIMEOUT_SECONDS)]
        self._store.delete(keys)
        failed = "; ".join(dict.fromkeys(each["failed"] for each in answers if each["failed"]))
        is_new = False
        if not failed:
            keep = {"keep": self._section.keep, "keep_every": self._section.keep_every}
            folder = str(step_path(self._folder, step))
            try:
                answer = self._client.call("publish", folder=folder, owner=self._owner, **keep)
                failed = taken_over(answer[TAKEN_OVER]) if TAKEN_OVER in answer else ""
                is_new = not failed and answer["is_new"]
            except (StoreError, UserError) as error:
                failed = describe(error)
        if not failed and not is_new:
            return  # the store had it: this attempt only looked
        sizes = {name: sum(each[name] for each in answers) for name in ("bytes", "sent_bytes")}
        self._report(step, failed=failed, seconds=time.monotonic() - began, **sizes)

    def _send(self, step: int) -> dict[str, Any]:
        """Upload the files of this node, and return how many bytes that were, or why it failed."""
        path, sizes = step_path(self._folder, step), {"bytes": 0, "sent_bytes": 0}

        def show(num_bytes: int) -> None:
            self.sent_bytes = max(self.sent_bytes, num_bytes)

        try:
            if self._rank_layout.rank == 0 and (why := self._claim()):
                return sizes | {"failed": why}
            manifest = read_manifest(path)
            layout = self._rank_layout
            if self._own_disk:
                held = manifest.nodes.get(self._own_disk) or files_here(path, manifest)
                names = [name for name in held if name != INDEX]
            else:  # this node's part of the files on the shared disk
                nodes = sorted({*layout.nodes})
                names = sorted(name for name in manifest.files if name != INDEX)[nodes.index(layout.node) :: len(nodes)]
            names += [INDEX] if layout.rank == 0 else []
            self.total_bytes = sum(manifest.files[name].bytes for name in names)
            clean = self._rank_layout.rank == 0
            sent = self._client.call("upload", show, folder=str(path), files=names, clean=clean)
            return sizes | sent | {"failed": ""}
        except Exception as error:  # rank 0 waits for the answer
            return sizes | {"failed": describe(error)}

    def _claim(self) -> str:
        """Return why this run may not write to the store; an empty text if it may."""
        other = self._client.call("claim", owner=self._owner, take_over=False)
        return taken_over(other) if other else ""

    def _report(self, step: int, *, failed: str, **fields: Any) -> None:
        if self._rank_layout.rank != 0:
            if failed:
                log.warning("the upload of step %d failed: %s", step, failed)
            return
        skipped, self._skipped = self._skipped, 0
        self._results.put(UploadResult(step=step, url=self._client.url, skipped=skipped, failed=failed, **fields))

    def _key(self, node: int) -> str:
        return f"trimaran/upload/{self._nonce}/{self._count}/{node}"


def refuse_ordered(client: StoreClient, folder: Path) -> None:
    """Carry out the order of `StoreUploads.refuse_later` that is on disk, if there is one."""
    try:
        order = json.loads(read_regular_text(folder / REFUSAL))
    except FileNotFoundError:
        return
    client.call("refuse_later", step=order["step"], before=order["before"])
    (folder / REFUSAL).unlink()


def taken_over(owner: dict[str, Any]) -> str:
    """Return the message for a store that another run directory writes to."""
    return f"another run directory writes to this store: {owner.get('path')} on {owner.get('host')}"


def wait_for_uploads(
    uploads: StoreUploads | None,
    is_finished: Callable[[], bool],
    report_progress: Callable[[], None],
    show: Callable[[float], None] = lambda fraction: None,
) -> None:
    """Return when the uploads of this node are done, and `is_finished`. `show` gets the fraction that was sent."""
    while uploads is not None and not uploads.wait(PROGRESS_SECONDS):
        show(uploads.sent_bytes / max(1, uploads.total_bytes))
        report_progress()
    pause = PROGRESS_SECONDS
    while not is_finished():
        time.sleep(pause)
        pause = min(MAX_POLL_SECONDS, 1.5 * pause)
        report_progress()


class StoreFetcher:
    """Lists and fetches checkpoints of the run `owner`. `own_disk`: every node has its own files in `folder`."""

    def __init__(
        self, client: StoreClient, folder: Path, rank_layout: RankLayout, owner: dict[str, Any], *, own_disk: bool
    ) -> None:
        self._client, self._folder, self._rank_layout, self._owner = client, folder, rank_layout, owner
        self._own_disk = own_disk
        self._names: dict[int, str] | None = None
        self.failed = ""  # why the store was not asked for its checkpoints, though it should have been

    def close(self) -> None:
        self._client.close()

    def names(self) -> dict[int, str]:
        """Return the complete checkpoints in the store by step. They are asked for once.

        If the store cannot be used, there are none, if this run has checkpoints of its own. Otherwise UserError is
        raised: the run would silently start from step 0.
        """
        if self._names is None:
            answer = broadcast_json(self._ask() if self._rank_layout.rank == 0 else {})
            if fields := answer.get("user_error"):
                raise UserError(fields["code"], fields["what"], where=fields["where"], fix=fields["fix"])
            self.failed = answer["failed"]
            self._names = {int(step): name for step, name in answer["names"].items()}
        return self._names

    def _ask(self) -> dict[str, Any]:
        has_own = bool(complete_steps(self._folder))
        try:
            other = self._client.call("claim", owner=self._owner, take_over=not has_own)
            if other:
                return {"names": {}, "failed": taken_over(other)}
            refuse_ordered(self._client, self._folder)
            return {"names": self._client.call("steps"), "failed": ""}
        except UserError as error:
            return {"user_error": error.as_dict()}
        except StoreError as error:
            if not has_own:
                return {"user_error": unusable_store(self._client.url, str(error)).as_dict()}
            log.warning("the store %s cannot be used: %s", self._client.url, error)
            return {"names": {}, "failed": str(error)}

    def has(self, step: int, path: Path) -> bool:
        """Return whether the store has the checkpoint of `path`, as rank 0 has it there."""
        name, is_same = self.names().get(step), False
        if name and self._rank_layout.rank == 0 and (path / MANIFEST).is_file():
            is_same = stored_name(step, (path / MANIFEST).read_bytes()) == name
        return broadcast_json(is_same)

    def fetch(self, step: int, report_progress: Callable[[], None]) -> str:
        """Put the checkpoint of `step` into the folder of checkpoints, and return why not if the store's is damaged.

        If the nodes have their own disks, only its manifest and index: the rest is fetched by `fetch_files`.
        """
        name, path = self.names()[step], step_path(self._folder, step)
        damaged = text = ""
        if self._rank_layout.rank == 0:
            try:
                text = self._client.call("manifest", name=name)
            except DamagedInStoreError as error:
                damaged = str(error)
            except (StoreError, UserError) as error:
                damaged = f"it cannot be read from the store: {error}"
        damaged, text = broadcast_json([damaged, text])
        if damaged:
            return damaged
        manifest, nonce = parse_manifest(path, text.encode()), broadcast_json(secrets.token_hex(4))
        draft = draft_path(self._folder, step, nonce)
        files = [INDEX] if self._own_disk else list(manifest.files)
        nodes = sorted({*self._rank_layout.nodes})
        parts = {node: files[number :: len(nodes)] for number, node in enumerate(nodes)}
        if why := self._fetch(name, manifest, parts, draft, report_progress):
            return why
        failed = ""
        if self._rank_layout.rank == 0:
            try:
                with report_disk_errors(draft):
                    write_file(draft / MANIFEST, memoryview(text.encode()), DISK)
                    DISK.sync_folder(draft)
                    DISK.rename(draft, path)
                    DISK.sync_folder(self._folder)
            except UserError as error:
                failed = error.what
        return broadcast_json(failed)

    def fetch_files(
        self, path: Path, manifest: Manifest, missing: Mapping[int, set[str]], report_progress: Callable[[], None]
    ) -> str:
        """Put the files that are `missing`, by node, into the folder of a checkpoint; return what is damaged."""
        parts = {node: sorted(names) for node, names in missing.items()}
        if not self._own_disk:
            names, nodes = sorted(set[str]().union(*missing.values())), sorted(missing)
            parts = {node: names[number :: len(nodes)] for number, node in enumerate(nodes)}
        return self._fetch(self.names()[manifest.step], manifest, parts, path, report_progress)

    def _fetch(
        self,
        name: str,
        manifest: Manifest,
        parts: Mapping[int, list[str]],
        folder: Path,
        report_progress: Callable[[], None],
    ) -> str:
        """Fetch the files in `parts`, by node; return what is damaged. Raises UserError if the store cannot be read."""
        layout = self._rank_layout
        files = parts.get(layout.node, []) if layout.rank == layout.node else []
        outcome: list[Any] = [[], ""]  # what is damaged, and why it failed
        fetching: list[threading.Thread] = []

        def fetch_part(fields: dict[str, Any]) -> None:
            try:
                outcome[0] = self._client.call("fetch", **fields)
            except Exception as error:  # raised on all ranks
                outcome[1] = describe(error)

        if files:
            log.info("fetching %d files of step %d from %s", len(files), manifest.step, self._client.url)
            records = {file: manifest.files[file].as_dict() for file in files}
            fields = {"name": name, "records": records, "folder": str(folder)}
            self._client.start()
            fetching.append(threading.Thread(target=fetch_part, args=(fields,), daemon=True))
            fetching[0].start()
        # Not one long wait: torch ends collectives after ten minutes.
        while not all_true(not any(thread.is_alive() for thread in fetching)):
            report_progress()
            time.sleep(POLL_SECONDS)
        rows = all_gather_json(outcome)
        if failures := sorted({each for _, each in rows if each}):
            raise unusable_store(self._client.url, "; ".join(failures))
        return "; ".join(sorted({each for found, _ in rows for each in found}))


def run_identity(marker: Path) -> str:
    """Return what identifies a run directory: a digest of its marker file, which is written once."""
    return sha256(marker.read_bytes()).hexdigest()[:16]
