"""The process that talks to the object store for a rank: `python -m trimaran.checkpoint.store.store_process URL`.

A process of its own, so that no step waits for the interpreter lock while an upload runs, and a fault in a storage
library ends neither rank nor run. It reads one JSON request a line, and answers with lines of progress and a result.
It ends with its rank. `StoreClient` is the rank's side of it. Imports no torch.
"""

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from trimaran.checkpoint.manifest import MANIFEST, DamagedError, Manifest, parse_record, read_manifest
from trimaran.checkpoint.store.object_store import (
    ObjectStore,
    StoreError,
    describe,
    open_store,
    stored_name,
    with_retries,
)
from trimaran.core import ChildProcess, UserError
from trimaran.runs import die_with_parent, set_process_name

PROGRESS_SECONDS = 0.5
TAKEN_OVER = "taken over"
log = logging.getLogger(__name__)
RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
START_RETRY_SECONDS = (1.0, 2.0, 4.0)  # if the run waits for the answer
STALL_SECONDS = 300.0  # A process that has said nothing for so long is killed, and the request has failed
UPLOAD_NICENESS = 10


class StoreRequests:
    """Carries out the requests of a rank. `answer` sends a line back."""

    def __init__(self, url: str, answer: Callable[[dict[str, Any]], None]) -> None:
        self._url, self._answer = url, answer
        self._store: ObjectStore | None = None
        self._previous: tuple[str, Manifest] | None = None  # what this process has uploaded last
        self._num_bytes, self._reported_at, self._lock = 0, 0.0, threading.Lock()

    def handle(self, request: dict[str, Any]) -> None:
        """Carry out one request and send its result, or the error."""
        self._num_bytes, self._reported_at = 0, time.monotonic()
        act: Callable[..., Any] = getattr(self, f"_{request.pop('do')}")
        self._delays = request.pop("delays")
        try:
            self._answer({"result": act(**request)})
        except UserError as error:
            self._answer(
                {"error": error.what, "user_error": error.as_dict(), "damaged": isinstance(error, DamagedError)}
            )
        except Exception as error:
            self._answer({"error": describe(error)})

    @property
    def _opened(self) -> ObjectStore:
        if self._store is None:
            self._store = open_store(self._url)
        return self._store

    def _retry(self, act: Callable[[], Any]) -> Any:
        return with_retries(act, self._delays, self._notify)

    def _notify(self, text: str) -> None:
        self._answer({"notice": text})

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._num_bytes += num_bytes
            if (now := time.monotonic()) - self._reported_at >= PROGRESS_SECONDS:
                self._reported_at = now
                self._answer({"bytes": self._num_bytes})

    def _claim(self, owner: dict[str, Any], *, take_over: bool) -> dict[str, Any] | None:
        """Make the run `owner` write here, with `take_over` from anyone; return who else writes here, if so."""
        now = self._retry(self._opened.owner)
        if now is not None and now.get("run") != owner["run"] and not take_over:
            return now
        if now is None or now.get("run") != owner["run"]:
            self._retry(lambda: self._opened.claim(owner))
        return None

    def _steps(self) -> dict[str, str]:
        """Return the names of the complete checkpoints, by step; of two of a step, the one that was written last."""
        found: dict[str, str] = {}
        for each in self._retry(self._opened.steps):
            if each.complete:
                step, name = str(each.step), each.name
                if step in found:
                    name = max((found[step], name), key=lambda name: self._opened.read_manifest(name)[0].time)
                found[step] = name
        return found

    def _manifest(self, name: str) -> str:
        return self._retry(lambda: self._opened.read_manifest(name)[1]).decode()

    def _fetch(self, name: str, records: dict[str, Any], folder: str) -> list[str]:
        """Return what is damaged in the store; if nothing is, the files are in `folder`."""
        files = {file: parse_record(record) for file, record in records.items()}
        found = self._opened.fetch(
            name, files, Path(folder), count=self._count, delays=self._delays, notify=self._notify
        )
        return [str(each) for each in found]

    def _upload(self, folder: str, files: list[str], *, clean: bool) -> dict[str, int]:
        """Upload files. `clean`: remove unfinished uploads before, which nobody will complete."""
        path, store = Path(folder), self._opened
        manifest = read_manifest(path)
        name = stored_name(manifest.step, (path / MANIFEST).read_bytes())
        if clean:
            self._retry(lambda: store.remove_unfinished(name))
        sent = store.upload(
            path, files, previous=self._previous, count=self._count, delays=self._delays, notify=self._notify
        )
        self._previous = name, manifest
        return {"bytes": sum(manifest.files[file].bytes for file in files), "sent_bytes": sent}

    def _publish(self, folder: str, owner: dict[str, Any], *, keep: int, keep_every: int) -> dict[str, Any]:
        """Complete a checkpoint, unless another run has taken over, and remove old ones."""
        store, now = self._opened, self._retry(self._opened.owner)
        if now is not None and now.get("run") != owner["run"]:
            return {TAKEN_OVER: now}
        name, is_new = self._retry(lambda: store.publish(Path(folder)))
        self._retry(lambda: store.prune(name, keep=keep, keep_every=keep_every))
        return {"is_new": is_new}

    def _refuse_later(self, step: int, before: float) -> list[str]:
        return self._retry(lambda: self._opened.refuse_later(step, before))


def main(arguments: list[str], requests: TextIO, answers: TextIO) -> None:
    """Serve requests until the input ends."""
    url, parent, niceness = arguments
    die_with_parent(signal.SIGKILL, parent=int(parent))
    set_process_name("trimaran-store")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the rank decides
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(int(niceness))
    lock = threading.Lock()

    def answer(fields: dict[str, Any]) -> None:
        with lock:
            answers.write(json.dumps(fields) + "\n")
            answers.flush()

    handler = StoreRequests(url, answer)
    for line in requests:
        handler.handle(json.loads(line))


if __name__ == "__main__":
    try:
        main(sys.argv[1:], sys.stdin, sys.stdout)
    except (BrokenPipeError, StoreError):
        os._exit(1)


class DamagedInStoreError(StoreError):
    """What the store has is not what was written."""


class StoreClient:
    """Sends requests to the process, one at a time, and starts it when it is needed.

    `descriptors` stay open in it: paths may be below one of them. The process dies with the thread that made the first
    request.
    """

    def __init__(
        self,
        url: str,
        *,
        descriptors: Sequence[int] = (),
        delays: Sequence[float] = RETRY_SECONDS,
        niceness: int = 0,
    ) -> None:
        self.url, self._descriptors, self._delays, self._niceness = url, descriptors, delays, niceness
        self._process: ChildProcess | None = None
        self._lock = threading.Lock()

    def call(self, do: str, report_progress: Callable[[int], None] = lambda num_bytes: None, **fields: Any) -> Any:
        """Return the result of a request. `report_progress` gets the bytes that were transferred so far.

        Raises StoreError if the store could not do it, and UserError for a mistake of the user.
        """
        with self._lock:
            try:
                process = self._running()
                process.send({"do": do, "delays": self._delays, **fields})
                while True:
                    answer = process.receive(seconds=STALL_SECONDS)
                    if "bytes" in answer:
                        report_progress(answer["bytes"])
                    elif "notice" in answer:
                        log.warning("%s: %s", self.url, answer["notice"])
                        report_progress(0)
                    else:
                        break
            except (OSError, ValueError, EOFError) as error:
                self._kill()
                raise StoreError(f"the process that talks to the store failed: {error}") from None
        if "result" in answer:
            return answer["result"]
        if answer.get("damaged"):
            raise DamagedInStoreError(answer["error"])
        if mistake := answer.get("user_error"):
            raise UserError(mistake["code"], mistake["what"], where=mistake["where"], fix=mistake["fix"])
        raise StoreError(answer["error"])

    def start(self) -> None:
        """Start the process in this thread, with which it dies."""
        with self._lock:
            self._running()

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._kill()

    def _running(self) -> ChildProcess:
        if self._process is None or not self._process.is_running:
            self._kill()
            arguments = [self.url, str(os.getpid()), str(self._niceness)]
            command = [sys.executable, "-m", "trimaran.checkpoint.store.store_process", *arguments]
            self._process = ChildProcess(command, descriptors=self._descriptors, keeps_stderr=False)
        return self._process

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
        self._process = None
