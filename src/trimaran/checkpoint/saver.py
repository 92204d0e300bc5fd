"""Writes checkpoints behind the back of training: a thread in every rank, one checkpoint at a time."""

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.checkpoint.durable import DurableDisk
from trimaran.checkpoint.manifest import Manifest, read_manifest
from trimaran.checkpoint.rank_layout import RankLayout
from trimaran.checkpoint.rank_share import RankShare, view_of
from trimaran.checkpoint.step_dirs import draft_path, drop, prune, refuse, step_path
from trimaran.checkpoint.verify_checkpoint import verify
from trimaran.checkpoint.write_checkpoint import Clerk, Post, Receipt, commit, write_share
from trimaran.core import CheckpointSection, UserError

SILENCE_SECONDS = 3600.0
"""A rank that has not written its share by then will not."""
LONGEST_NAP = 0.25
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A share to be written. `memory` holds it once `ready` returns, and until the outcome is there.

    `failure` is why there is nothing to write; the other ranks must know.
    """

    step: int
    share: RankShare
    memory: Tensor
    progress: dict[str, Any] = field(default_factory=dict)
    stall_seconds: float = 0.0
    ready: Callable[[], None] = lambda: None
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of an order, for all ranks together. `saved_bytes` did not have to be written again."""

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


class StorePost:
    """See `write.Post`: notes in a store that all ranks see. Looks instead of waiting: nobody else may use it then."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def tell(self, key: str, text: str) -> None:
        self._store.set(key, text)

    def hear(self, keys: Sequence[str], seconds: float) -> list[str]:
        until, nap = time.monotonic() + seconds, 0.005
        for key in keys:
            while not self._store.check([key]):
                if time.monotonic() > until:
                    raise TimeoutError(f"nobody said {key} within {seconds:g} s")
                time.sleep(nap)
                nap = min(LONGEST_NAP, 1.5 * nap)
        return [self._store.get(key).decode() for key in keys]

    def forget(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._store.delete_key(key)


class Saver:
    """Writes what it is ordered to, together with the savers of the other ranks, each of which gets the same orders."""

    def __init__(
        self,
        folder: Path,
        rank_layout: RankLayout,
        post: Post,
        rules: CheckpointSection,
        about: Callable[[Order], Manifest],
        disk: DurableDisk | None = None,
    ) -> None:
        """`about` makes on rank 0 what the manifest says; it raises UserError when there must be no checkpoint."""
        self._folder, self._rank_layout, self._post, self._rules, self._about = folder, rank_layout, post, rules, about
        self._disk = disk or DurableDisk()
        self.nonce = ""
        """Tells the drafts of this attempt from others'; hexadecimal, the same on all ranks."""
        self._previous: Path | None = None
        self._clerk, self._is_known = Clerk(), False
        self._orders: SimpleQueue[Order] = SimpleQueue()
        self._outcomes: SimpleQueue[Outcome] = SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._count = 0
        threading.Thread(target=self._work, name="trimaran-save", daemon=True).start()

    def begin(self, newest: int | None) -> None:
        """Go on from where `newest` is the newest complete checkpoint: what is the same there is not written again."""
        self._previous = None if newest is None else step_path(self._folder, newest)

    @property
    def busy(self) -> bool:
        return not self._idle.is_set()

    def start(self, order: Order) -> None:
        """Begin with `order`; the last one must be done."""
        assert not self.busy, "two checkpoints at once"
        self._idle.clear()
        self._orders.put(order)

    def wait(self) -> None:
        """Return when nothing is being written."""
        self._idle.wait()

    def outcomes(self) -> list[Outcome]:
        """Return what was done since the last call."""
        found = []
        while not self._outcomes.empty():
            found.append(self._outcomes.get())
        return found

    def _work(self) -> None:
        while True:
            order = self._orders.get()
            self._count += 1
            self._outcomes.put(self._save(order))
            self._idle.set()

    def _save(self, order: Order) -> Outcome:
        began = time.monotonic()
        final = step_path(self._folder, order.step)
        draft = draft_path(self._folder, order.step, f"{self.nonce}{self._count:04x}")
        written: dict[str, Any] = {"failed": "", "bytes": 0, "written_bytes": 0}
        try:
            receipt = self._write(order, draft)
            self._say("receipt", receipt if isinstance(receipt, str) else receipt.text(brief=self._is_known))
            written = self._conclude(order, draft, final)
            if not written["failed"]:
                self._is_known = True
                self._say("sums", json.dumps(_read_back(final, self._rank_layout)))
                written = self._check(order, final, written)
        except Exception as error:  # whatever it is, training goes on and the older checkpoints are there
            written = {"failed": _words(error), "bytes": 0, "written_bytes": 0}
        if not written["failed"]:
            self._previous = final
        seconds = time.monotonic() - began
        return Outcome(step=order.step, path=str(final), seconds=seconds, stall_seconds=order.stall_seconds, **written)

    def _write(self, order: Order, draft: Path) -> Receipt | str:
        """Write this rank's files. Returns the receipt, or as JSON why there is none."""
        try:
            if order.failure:
                raise OSError(order.failure)
            order.ready()
            refuse_not_finite(order.share, order.memory)
            memory = order.memory.numpy().data
            previous = self._previous if self._rules.incremental else None
            return write_share(draft, self._rank_layout.rank, order.share, memory, previous=previous, disk=self._disk)
        except Exception as error:
            return json.dumps({"failed": f"rank {self._rank_layout.rank}: {_words(error)}"})

    def _conclude(self, order: Order, draft: Path, final: Path) -> dict[str, Any]:
        """Commit on rank 0 what all ranks wrote, or drop it; return, everywhere, what came of it."""
        if self._rank_layout.rank != 0:
            return json.loads(self._hear_first("result"))
        result = {"failed": "", "bytes": 0, "written_bytes": 0}
        try:
            texts = self._hear_all("receipt")
            if failures := [told["failed"] for text in texts if "failed" in (told := json.loads(text))]:
                raise OSError("; ".join(failures))
            receipts = [self._clerk.read(text) for text in texts]
            commit(draft, final, receipts, self._about(order), self._disk)
            result["bytes"] = sum(receipt.num_bytes for receipt in receipts)
            result["written_bytes"] = sum(receipt.written_bytes for receipt in receipts)
        except Exception as error:
            result["failed"] = _words(error)
            with suppress(OSError):  # a draft that stays is swept at the next start
                drop(draft, self._disk)
        self._say("result", json.dumps(result))
        return result

    def _check(self, order: Order, final: Path, written: dict[str, Any]) -> dict[str, Any]:
        """Read back on rank 0 what all ranks read back; older checkpoints go only when this one is sound."""
        if self._rank_layout.rank != 0:
            return written | json.loads(self._hear_first("verdict"))
        verdict = {"failed": ""}
        if damages := [each for text in self._hear_all("sums") for each in json.loads(text)]:
            verdict["failed"] = f"read back otherwise than written: {'; '.join(damages)}"
            refuse(final, verdict["failed"], self._disk)
        else:
            with suppress(OSError):  # what could not be removed is removed the next time
                rules = {"keep": self._rules.keep, "keep_every": self._rules.keep_every}
                prune(self._folder, **rules, verified=order.step, disk=self._disk)
        self._say("verdict", json.dumps(verdict))
        self._forget()
        return written | verdict

    def _key(self, what: str, rank: int, count: int | None = None) -> str:
        return f"trimaran/save/{self.nonce}/{self._count if count is None else count}/{what}/{rank}"

    def _say(self, what: str, text: str) -> None:
        self._post.tell(self._key(what, self._rank_layout.rank), text)

    def _hear_all(self, what: str) -> list[str]:
        return self._post.hear([self._key(what, rank) for rank in range(self._rank_layout.world_size)], SILENCE_SECONDS)

    def _hear_first(self, what: str) -> str:
        return self._post.hear([self._key(what, 0)], SILENCE_SECONDS)[0]

    def _forget(self) -> None:
        """Take old notes down: what the ranks said of this checkpoint, and what rank 0 said of the one before."""
        if isinstance(self._post, StorePost):
            said = [
                self._key(what, rank) for what in ("receipt", "sums") for rank in range(self._rank_layout.world_size)
            ]
            self._post.forget([*said, *(self._key(what, 0, self._count - 1) for what in ("result", "verdict"))])


def refuse_not_finite(share: RankShare, memory: Tensor) -> None:
    """Raise UserError when a value is no number or infinite: such a state is worth nothing."""
    for item in share.items:
        if item.whole.dtype in FLOATS and item.num_bytes:
            values = view_of(memory, item)
            # A finite sum has finite terms, and is cheap; an infinite one may have come of large terms.
            if not torch.isfinite(values.sum()) and not torch.isfinite(values).all():
                raise UserError("K042", f"{item.key} has values that are not finite", where=f"at {item.start}",
                                fix="go back to the checkpoint before: trimaran resume RUN")  # fmt: skip


def _read_back(final: Path, rank_layout: RankLayout) -> list[str]:
    """Return what is wrong with the files whose turn it is on this rank.

    They are those of the manifest, not those just written: a step that was there already has been left as it was.
    """
    try:
        names = sorted(read_manifest(final).files)[rank_layout.rank :: rank_layout.world_size]
        return [str(damage) for damage in verify(final, files=names)]
    except (OSError, UserError) as error:
        return [_words(error)]


def _words(error: Exception) -> str:
    """Return what went wrong on one line, without the fix: that is for a person who waits."""
    return f"{error.what} ({error.where})" if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
