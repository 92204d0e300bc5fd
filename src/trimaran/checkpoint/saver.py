"""Writes checkpoints to disk in a background thread of every rank, one checkpoint at a time."""

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.checkpoint.durable import DurableDisk
from trimaran.checkpoint.file_parts import map_in_threads, num_io_threads
from trimaran.checkpoint.manifest import Manifest, read_manifest
from trimaran.checkpoint.rank_layout import RankLayout
from trimaran.checkpoint.step_dirs import draft_path, looks_complete, prune, refuse, remove_checkpoint, step_path
from trimaran.checkpoint.verify_checkpoint import verify
from trimaran.checkpoint.write_checkpoint import (
    KeyValueStore,
    NodeCommit,
    WriteReport,
    WriteReportParser,
    commit,
    write_share,
)
from trimaran.core import CheckpointSection, UserError
from trimaran.parallel import RankShare, item_view

if TYPE_CHECKING:
    from trimaran.checkpoint.store.store_uploads import StoreUploads

RANK_TIMEOUT_SECONDS = 3600.0  # how long to wait for another rank to write its share
MAX_POLL_SECONDS = 0.25
PROGRESS_SECONDS = 0.25  # between looks at what a save has written
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """A share to write. `memory` must hold it from when `wait_ready` returns until there is a result.

    `failure` says why this rank has nothing to write; the other ranks then fail, too.
    """

    step: int
    share: RankShare
    memory: Tensor
    progress: dict[str, Any] = field(default_factory=dict)
    stall_seconds: float = 0.0
    wait_ready: Callable[[], None] = lambda: None
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """The result of a save, equal on all ranks. `saved_bytes` were linked instead of written again."""

    step: int
    path: str
    seconds: float
    stall_seconds: float = 0.0
    bytes: int = 0
    written_bytes: int = 0
    failed: str = ""

    @property
    def saved_bytes(self) -> int:
        return self.bytes - self.written_bytes if self.bytes else 0


class TorchStore:
    """A `KeyValueStore` over a torch store. It polls: a blocking wait would lock the store for all other users."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def set(self, key: str, text: str) -> None:
        self._store.set(key, text)

    def has(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set."""
        return not keys or self._store.check([*keys])

    def wait_get(self, keys: Sequence[str], timeout_seconds: float) -> list[str]:
        deadline, pause = time.monotonic() + timeout_seconds, 0.005
        for key in keys:
            while not self._store.check([key]):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no rank set {key} within {timeout_seconds:g} s")
                time.sleep(pause)
                pause = min(MAX_POLL_SECONDS, 1.5 * pause)
        return [self._store.get(key).decode() for key in keys]

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._store.delete_key(key)


class Saver:
    """Writes the requested checkpoints, together with the savers of the other ranks, which get the same requests."""

    def __init__(
        self,
        folder: Path,
        rank_layout: RankLayout,
        store: KeyValueStore,
        section: CheckpointSection,
        make_manifest: Callable[[SaveRequest], Manifest],
        disk: DurableDisk | None = None,
        *,
        own_disk: str = "",
        uploads: "StoreUploads | None" = None,
        nonce: str = "",
    ) -> None:
        """`make_manifest` runs on rank 0; it raises UserError if the checkpoint must not be written.

        `own_disk` is the name of this node if every node has a disk of its own. `uploads` are those of this node, on
        its first rank. `nonce` distinguishes the drafts of this attempt from others: hexadecimal, equal on all ranks.
        """
        self.uploads = uploads
        self._folder, self._rank_layout, self._store = folder, rank_layout, store
        self._own_disk = own_disk
        self._sent: list[str] = []  # keys of what rank 0 has sent to the other nodes for the last checkpoint
        self._sent_last: list[str] = []  # and for the one before, which all have read by now
        self._section, self._make_manifest = section, make_manifest
        self._disk = disk or DurableDisk()
        self._disk.num_threads = num_io_threads(rank_layout.local_size)
        self._disk.reads_back_all = section.read_back == "all"
        self._nonce = nonce
        self._previous: Path | None = None
        self._report_parser, self._layout_sent = WriteReportParser(), False
        self._requests: SimpleQueue[SaveRequest | None] = SimpleQueue()
        self._results: SimpleQueue[SaveResult] = SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._count = 0
        self._num_verified = 0  # chunks of a checkpoint that was there already
        threading.Thread(target=self._work, name="trimaran-save", daemon=True).start()

    def begin(self, newest: int | None) -> None:
        """Set the newest complete checkpoint: frozen files that are equal there are linked instead of written."""
        self._previous = None if newest is None else step_path(self._folder, newest)

    @property
    def busy(self) -> bool:
        return not self._idle.is_set()

    def start(self, request: SaveRequest) -> None:
        """Start a save; the last one must be done."""
        assert not self.busy, "the last checkpoint is still being written"
        self._idle.clear()
        self._requests.put(request)

    def wait(self, report_progress: Callable[[], None] = lambda: None) -> None:
        """Return when no checkpoint is being written. Calls `report_progress` as pieces are written and verified."""
        seen = self._num_pieces
        while not self._idle.wait(PROGRESS_SECONDS):
            if self._num_pieces != seen:
                seen = self._num_pieces
                report_progress()

    @property
    def _num_pieces(self) -> int:
        return self._disk.num_pieces + self._num_verified

    def share_end(self, wait: Callable[[Callable[[], bool]], None]) -> None:
        """Tell the other ranks that rank 0 has nothing left to do; they call `wait` with whether it has."""
        key = f"trimaran/save/{self._nonce}/end"
        if self._rank_layout.rank == 0:
            self._store.set(key, "")
        else:
            wait(lambda: self._store.has([key]))

    def results(self) -> list[SaveResult]:
        """Return the results since the last call."""
        return [self._results.get() for _ in range(self._results.qsize())]

    def close(self) -> None:
        """End the thread. No save may follow."""
        self._requests.put(None)

    def _work(self) -> None:
        while (request := self._requests.get()) is not None:
            self._count += 1
            self._results.put(self._save(request))
            self._idle.set()

    def _save(self, request: SaveRequest) -> SaveResult:
        began = time.monotonic()
        final = step_path(self._folder, request.step)
        draft = draft_path(self._folder, request.step, f"{self._nonce}{self._count:04x}")
        written: dict[str, Any]
        try:
            report = self._write(request, draft)
            self._publish("report", report if isinstance(report, str) else report.text(brief=self._layout_sent))
            written, is_new = self._conclude(request, draft, final)
            if not written["failed"]:
                self._layout_sent = True
                self._publish("damages", json.dumps(self._damages(final, is_new=is_new)))
                written = self._check(request, final, written)
        except Exception as error:  # training continues, and the older checkpoints are intact
            written = {"failed": _message(error), "bytes": 0, "written_bytes": 0}
        if not written["failed"]:
            self._previous = final
        seconds, stall = time.monotonic() - began, request.stall_seconds
        return SaveResult(step=request.step, path=str(final), seconds=seconds, stall_seconds=stall, **written)

    def _write(self, request: SaveRequest, draft: Path) -> WriteReport | str:
        """Write this rank's files. Returns the report, or a JSON text with the reason for a failure."""
        try:
            if request.failure:
                raise OSError(request.failure)
            request.wait_ready()
            previous = self._previous if self._section.incremental else None
            rank, share, memory = self._rank_layout.rank, request.share, request.memory

            def write_or_check(part: str) -> WriteReport | None:
                for item in share.items if part == "check" else ():
                    if item.meta.dtype in FLOAT_DTYPES and item.num_bytes:
                        values = item_view(memory, item)
                        # The sum is cheap. If it is finite, all values are; if not, it may have overflowed.
                        if not torch.isfinite(values.sum()) and not torch.isfinite(values).all():
                            raise UserError("K042.nan-inf-values", where=f"at {item.start}", key=item.key)
                if part == "check":
                    return None
                report = write_share(draft, rank, share, memory.numpy().data, previous=previous, disk=self._disk)
                return replace(report, node=self._own_disk)

            # A state that is refused is rare: it is written meanwhile, and never committed.
            report, _ = map_in_threads(write_or_check, ["write", "check"], num_threads=2)
            assert report is not None
            return report
        except Exception as error:
            return json.dumps({"failed": f"rank {self._rank_layout.rank}: {_message(error)}"})

    def _conclude(self, request: SaveRequest, draft: Path, final: Path) -> tuple[dict[str, Any], bool]:
        """Commit on rank 0 what all ranks wrote, or remove the draft.

        Returns the outcome on every rank, and whether the checkpoint is what was written now: if its step was there
        already, that one stays. Where every node has its own files on its own disk, it is replaced.
        """
        if (rank := self._rank_layout.rank) != 0:
            commits = self._own_disk and self._commits
            commit_here = NodeCommit(draft, final, self._store, self._key, self._disk) if commits else None
            if commit_here:
                commit_here.follow(self._own_disk, rank)
            result, is_new = json.loads(self._wait_for("result", [0])[0])
            if commit_here and result["failed"]:
                commit_here.abandon()
            return result, is_new
        is_new = True
        result: dict[str, Any] = {"failed": "", "bytes": 0, "written_bytes": 0}
        commit_nodes = NodeCommit(draft, final, self._store, self._key, self._disk) if self._own_disk else None
        try:
            texts = self._wait_for("report", range(self._rank_layout.world_size))
            if failures := [fields["failed"] for text in texts if "failed" in (fields := json.loads(text))]:
                raise OSError("; ".join(failures))
            reports = [self._report_parser.parse(text) for text in texts]
            if commit_nodes:
                commit_nodes.lead(self._own_disk, reports, self._make_manifest(request), self._rank_layout)
            else:
                is_new = not looks_complete(final)
                commit(draft, final, reports, self._make_manifest(request), self._disk)
            result["bytes"] = sum(report.num_bytes for report in reports)
            result["written_bytes"] = sum(report.written_bytes for report in reports)  # the others were linked
        except Exception as error:
            result["failed"] = _message(error)
            if commit_nodes:
                commit_nodes.tell_failed()
                commit_nodes.abandon()
            else:
                with suppress(OSError):  # a draft that remains is removed at the next start
                    remove_checkpoint(draft, self._disk)
        self._publish("result", json.dumps([result, is_new]))
        if commit_nodes:
            self._sent_last, self._sent = self._sent, commit_nodes.messages
        return result, is_new

    @property
    def _commits(self) -> bool:
        """Whether this rank commits and prunes: rank 0, or the first rank of every node that has a disk of its own."""
        return self._rank_layout.rank == (self._rank_layout.node if self._own_disk else 0)

    def _damages(self, final: Path, *, is_new: bool) -> list[str]:
        """Return what is wrong with the files that this rank has to verify."""
        # Each rank has read back what it wrote. If the step was there already, the files are those of its manifest.

        def count_verified() -> None:
            self._num_verified += 1

        try:
            files = sorted(read_manifest(final).files)[self._rank_layout.rank :: self._rank_layout.world_size]
            threads, mine = self._disk.num_threads, [] if is_new else files
            return [
                str(each) for each in verify(final, files=mine, report_progress=count_verified, num_threads=threads)
            ]
        except (OSError, UserError) as error:
            return [_message(error)]

    def _check(self, request: SaveRequest, final: Path, written: dict[str, Any]) -> dict[str, Any]:
        """Collect on rank 0 what all ranks found. Older checkpoints are pruned only if this one is intact."""
        if self._rank_layout.rank != 0:
            verdict = json.loads(self._wait_for("verdict", [0])[0])
            if self._commits:
                self._refuse_or_prune(request, final, verdict["failed"])
            if verdict.pop("upload") and self.uploads:
                self.uploads.start(request.step)
            return written | verdict
        verdict: dict[str, Any] = {"failed": ""}
        texts = self._wait_for("damages", range(self._rank_layout.world_size))
        if damages := [each for text in texts for each in json.loads(text)]:
            verdict["failed"] = f"the files on disk are not what was written: {'; '.join(damages)}"
        self._refuse_or_prune(request, final, verdict["failed"])
        # Rank 0 decides for all nodes: they must upload the same steps.
        is_uploaded = self.uploads is not None and not verdict["failed"] and not self.uploads.busy
        self._publish("verdict", json.dumps(verdict | {"upload": is_uploaded}))
        if self.uploads is not None and not verdict["failed"]:
            self.uploads.start(request.step) if is_uploaded else self.uploads.skip()
        if isinstance(self._store, TorchStore):  # messages of all ranks for this checkpoint, and of rank 0 for the last
            ranks = range(self._rank_layout.world_size)
            messages = [self._key(what, rank) for what in ("report", "damages") for rank in ranks]
            if self._own_disk:
                messages += [*self._sent_last, *(self._key("committed", rank) for rank in {*self._rank_layout.nodes})]
            self._store.delete([*messages, *(self._key(what, 0, self._count - 1) for what in ("result", "verdict"))])
        return written | verdict

    def _refuse_or_prune(self, request: SaveRequest, final: Path, failed: str) -> None:
        if failed:
            refuse(final, failed, self._disk)
            return
        with suppress(OSError):  # what cannot be removed now is removed the next time
            retention = {"keep": self._section.keep, "keep_every": self._section.keep_every}
            in_use = self.uploads.step if self.uploads else None
            prune(self._folder, **retention, verified=request.step, disk=self._disk, in_use=in_use)

    def _key(self, what: str, rank: int, count: int | None = None) -> str:
        return f"trimaran/save/{self._nonce}/{self._count if count is None else count}/{what}/{rank}"

    def _publish(self, what: str, text: str) -> None:
        self._store.set(self._key(what, self._rank_layout.rank), text)

    def _wait_for(self, what: str, ranks: Sequence[int]) -> list[str]:
        return self._store.wait_get([self._key(what, rank) for rank in ranks], RANK_TIMEOUT_SECONDS)


def _message(error: Exception) -> str:
    """Return the error on one line, without the fix."""
    return f"{error.what} ({error.where})" if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
