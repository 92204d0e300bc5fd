"""A rank's side of the process that talks to the object store, see `store_process.py`. Imports no torch."""

import json
import logging
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from trimaran.checkpoint.store.object_store import StoreError
from trimaran.core import UserError

log = logging.getLogger(__name__)

RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
START_RETRY_SECONDS = (1.0, 2.0, 4.0)
"""If the run waits for the answer."""
STALL_SECONDS = 300.0
"""A process that has said nothing for so long is killed, and the request has failed."""
READ_BYTES = 1 << 16
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
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer, self._lock = b"", threading.Lock()

    def call(self, do: str, report_progress: Callable[[int], None] = lambda num_bytes: None, **fields: Any) -> Any:
        """Return the result of a request. `report_progress` gets the bytes that were transferred so far.

        Raises StoreError if the store could not do it, and UserError for a mistake of the user.
        """
        with self._lock:
            try:
                process = self._running()
                assert process.stdin is not None
                process.stdin.write(json.dumps({"do": do, "delays": self._delays, **fields}).encode() + b"\n")
                process.stdin.flush()
                while True:
                    answer = self._answer(process)
                    if "bytes" in answer:
                        report_progress(answer["bytes"])
                    elif "notice" in answer:
                        log.warning("%s: %s", self.url, answer["notice"])
                        report_progress(0)
                    else:
                        break
            except (OSError, ValueError) as error:
                self._kill()
                raise StoreError(f"the process that talks to the store failed: {error}") from None
        return _result(answer)

    def start(self) -> None:
        """Start the process in this thread, with which it dies."""
        with self._lock:
            self._running()

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._kill()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._kill()
            arguments = [self.url, str(os.getpid()), str(self._niceness)]
            command = [sys.executable, "-m", "trimaran.checkpoint.store.store_process", *arguments]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=self._descriptors
            )
        return self._process

    def _answer(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        assert process.stdout is not None
        descriptor = process.stdout.fileno()
        while b"\n" not in self._buffer:
            if not select.select([descriptor], [], [], STALL_SECONDS)[0]:
                raise OSError(f"it was silent for {STALL_SECONDS:g} s")
            data = os.read(descriptor, READ_BYTES)
            if not data:
                raise OSError(f"it ended with code {process.wait()}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _kill(self) -> None:
        process, self._process, self._buffer = self._process, None, b""
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()


def _result(answer: dict[str, Any]) -> Any:
    if "result" in answer:
        return answer["result"]
    if answer.get("damaged"):
        raise DamagedInStoreError(answer["error"])
    if fields := answer.get("user_error"):
        raise UserError(fields["code"], fields["what"], where=fields["where"], fix=fields["fix"])
    raise StoreError(answer["error"])
