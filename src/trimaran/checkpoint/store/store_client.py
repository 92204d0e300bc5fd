"""A rank's side of the process that talks to the object store, see `store_process.py`. Imports no torch."""

import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from trimaran.checkpoint.store.object_store import StoreError
from trimaran.core import UserError
from trimaran.core.child_process import ChildProcess

log = logging.getLogger(__name__)

RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
START_RETRY_SECONDS = (1.0, 2.0, 4.0)
"""If the run waits for the answer."""
STALL_SECONDS = 300.0
"""A process that has said nothing for so long is killed, and the request has failed."""
UPLOAD_NICENESS = 10


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
