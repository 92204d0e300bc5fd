"""Uploads checkpoints to the object store in the background: every node its own files, then rank 0 the manifest.

The first rank of each node has a thread, which waits for the process of `store_process.py`. All of them get the same
orders in the same sequence. They tell rank 0 through the torch store when their files have arrived.
"""

import json
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from trimaran.checkpoint.manifest import INDEX, Manifest, read_manifest
from trimaran.checkpoint.rank_layout import RankLayout
from trimaran.checkpoint.step_dirs import step_path
from trimaran.checkpoint.step_files import files_here
from trimaran.checkpoint.store.object_store import StoreError, describe
from trimaran.checkpoint.store.store_client import StoreClient
from trimaran.checkpoint.store.store_process import TAKEN_OVER
from trimaran.checkpoint.write_checkpoint import KeyValueStore
from trimaran.core import CheckpointSection, UserError
from trimaran.core.regular_files import read_regular_text, write_atomically

log = logging.getLogger(__name__)

NODE_TIMEOUT_SECONDS = 24 * 3600.0
"""How long to wait for the upload of another node."""
REFUSAL = ".refuse-in-store.json"
PROGRESS_SECONDS, MAX_POLL_SECONDS = 0.5, 5.0


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
        self.last_ordered = -1
        """The last step that was ordered to be uploaded."""
        self.step: int | None = None
        """The step that is being uploaded: its files must stay."""
        self.sent_bytes = self.total_bytes = 0
        """How far this node is with it."""
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
        """Order that no checkpoint of more than `step` steps in the store is used again. Only rank 0 does it.

        The order is also on disk until it is done: a run that dies meanwhile must not load such a state.
        """
        if self._rank_layout.rank == 0:
            with suppress(OSError):  # a full disk does not keep it from being done now
                write_refusal(self._folder, step)
            self._order("refuse_later", step)

    def wait(self, seconds: float) -> bool:
        """Return whether all orders are done, after at most `seconds`."""
        with self._condition:
            return self._condition.wait_for(lambda: not self.busy, seconds)

    def results(self) -> list[UploadResult]:
        """Return the results since the last call; only rank 0 has any."""
        found = []
        while not self._results.empty():
            found.append(self._results.get())
        return found

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
                else:
                    self._refuse_later(step)
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
            failed, is_new = self._publish(step)
        if not failed and not is_new:
            return  # the store had it: this attempt only looked
        sizes = {name: sum(each[name] for each in answers) for name in ("bytes", "sent_bytes")}
        self._report(step, failed=failed, seconds=time.monotonic() - began, **sizes)

    def _send(self, step: int) -> dict[str, Any]:
        """Upload the files of this node, and return how many bytes that were, or why it failed."""
        path, sizes = step_path(self._folder, step), {"bytes": 0, "sent_bytes": 0}
        try:
            if self._rank_layout.rank == 0 and (why := self._claim()):
                return sizes | {"failed": why}
            manifest = read_manifest(path)
            names = self._names(path, manifest)
            self.total_bytes = sum(manifest.files[name].bytes for name in names)
            clean = self._rank_layout.rank == 0
            sent = self._client.call("upload", self._progress, folder=str(path), files=names, clean=clean)
            return sizes | sent | {"failed": ""}
        except Exception as error:  # rank 0 waits for the answer
            return sizes | {"failed": describe(error)}

    def _claim(self) -> str:
        """Return why this run may not write to the store; an empty text if it may."""
        other = self._client.call("claim", owner=self._owner, take_over=False)
        return taken_over(other) if other else ""

    def _names(self, path: Path, manifest: Manifest) -> list[str]:
        """Return the files that this node uploads: those that it has, or its part of those on the shared disk."""
        layout = self._rank_layout
        if self._own_disk:
            names = [name for name in manifest.nodes.get(self._own_disk) or files_here(path, manifest) if name != INDEX]
        else:
            nodes = sorted({*layout.nodes})
            names = sorted(name for name in manifest.files if name != INDEX)[nodes.index(layout.node) :: len(nodes)]
        return [*names, INDEX] if layout.rank == 0 else names

    def _publish(self, step: int) -> tuple[str, bool]:
        """Complete the checkpoint in the store. Returns why that failed, and whether it was not complete before."""
        keep = {"keep": self._section.keep, "keep_every": self._section.keep_every}
        folder = str(step_path(self._folder, step))
        try:
            answer = self._client.call("publish", folder=folder, owner=self._owner, **keep)
        except (StoreError, UserError) as error:
            return describe(error), False
        return (taken_over(answer[TAKEN_OVER]), False) if TAKEN_OVER in answer else ("", answer["is_new"])

    def _refuse_later(self, step: int) -> None:
        if not self._claim():
            self._client.call("refuse_later", step=step, before=time.time())
            (self._folder / REFUSAL).unlink(missing_ok=True)

    def _progress(self, num_bytes: int) -> None:
        self.sent_bytes = max(self.sent_bytes, num_bytes)

    def _report(self, step: int, *, failed: str, **fields: Any) -> None:
        if self._rank_layout.rank != 0:
            if failed:
                log.warning("the upload of step %d failed: %s", step, failed)
            return
        skipped, self._skipped = self._skipped, 0
        self._results.put(UploadResult(step=step, url=self._client.url, skipped=skipped, failed=failed, **fields))

    def _key(self, node: int) -> str:
        return f"trimaran/upload/{self._nonce}/{self._count}/{node}"


def write_refusal(folder: Path, step: int) -> None:
    """Write the order to refuse checkpoints of more than `step` steps in the store to the folder of checkpoints."""
    folder.mkdir(exist_ok=True)
    write_atomically(folder / REFUSAL, json.dumps({"step": step, "before": time.time()}))


def refuse_ordered(client: StoreClient, folder: Path) -> None:
    """Carry out the order of `write_refusal`, if there is one."""
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
