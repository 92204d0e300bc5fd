"""Where ranks meet for torch: a store on the supervisor's channel, which wants the run's token."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar

import torch.distributed as dist

from trimaran.core import UserError
from trimaran.run.wire import Line, Record, RefusedError, pack, unpack
from trimaran.train.process.supervisor_link import SupervisorLink

TIMEOUT = timedelta(minutes=10)
CONNECT_SECONDS = 30.0
ANSWER_SECONDS = 60.0  # longer than any answer takes, unless the supervisor's machine is gone


class TokenStore(dist.Store):
    """Means what torch's `TCPStore` means, for the ranks of one attempt. Any number of threads may use it at once.

    Lines to the supervisor are kept and used again; a thread that waits for a key has one to itself. Torch's C++ does
    not keep the Python half of a store alive, so this class does, until the process ends.
    """

    timeout: timedelta  # is kept by torch's half, which sets it too
    _alive: ClassVar[list["TokenStore"]] = []

    def __init__(self, address: str, token: str, *, attempt: int, timeout: timedelta = TIMEOUT) -> None:
        super().__init__()
        self.address, self.attempt = address, attempt
        self._token = token
        self.set_timeout(timeout)
        self._idle: list[Line] = []
        self._lock = threading.Lock()
        self._alive.append(self)

    def clone(self) -> "TokenStore":
        """Return a store of the same values with lines of its own."""
        return TokenStore(self.address, self._token, attempt=self.attempt, timeout=self.timeout)

    def set(self, key: str, value: str | bytes) -> None:
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._ask("set", keys, values=[pack(_bytes(value)) for value in values])

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [unpack(value) for value in self._ask("get", keys, seconds=self.timeout.total_seconds())["values"]]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", keys, seconds=(self.timeout if timeout is None else timeout).total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask("check", keys)["all"]

    def add(self, key: str, value: int) -> int:
        return self._ask("add", [key], amount=int(value))["amount"]

    def append(self, key: str, value: str | bytes) -> None:
        self._ask("append", [key], value=pack(_bytes(value)))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        before, after = pack(_bytes(expected_value)), pack(_bytes(desired_value))
        answer = self._ask("compare_set", [key], expected=before, value=after)
        return unpack(answer["value"])

    def delete_key(self, key: str) -> bool:
        return self._ask("delete", [key])["deleted"]

    def list_keys(self) -> list[str]:
        return self._ask("list", [])["keys"]

    def num_keys(self) -> int:
        return len(self.list_keys())

    def has_extended_api(self) -> bool:
        return True

    # What torch's C++ asks of a store written in Python goes by these names.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def _ask(self, operation: str, keys: Sequence[str], **more: Any) -> Record:
        request = {"op": operation, "attempt": self.attempt, "keys": list(keys), **more}
        try:
            with self._line() as line:
                answer = line.ask(request, seconds=ANSWER_SECONDS + more.get("seconds", 0.0))
        except OSError as error:
            raise dist.DistNetworkError(f"the supervisor at {self.address} does not answer: {error}") from error
        if answer.get("error") == "timeout":
            missing = ", ".join(answer.get("missing", []))
            raise dist.DistStoreError(f"nobody set {missing} within {more['seconds']:g} s (wait timeout)")
        if "error" in answer:
            raise dist.DistStoreError(f"the supervisor at {self.address} refused {operation}: {answer['error']}")
        return answer

    @contextmanager
    def _line(self) -> Iterator[Line]:
        """Lend an open line. It is kept for the next question unless this one failed."""
        with self._lock:
            line = self._idle.pop() if self._idle else None
        line = line or call(self.address, self._token)
        try:
            yield line
        except BaseException:
            line.close()
            raise
        with self._lock:
            self._idle.append(line)


def address_store(link: SupervisorLink) -> TokenStore:
    """Return the store of the supervisor that started this rank."""
    return TokenStore(link.store, link.token, attempt=link.attempt)


def call(address: str, token: str, *, seconds: float = CONNECT_SECONDS) -> Line:
    """Return an open line to the channel at `address`. Tries again for a while: a crowd can stand before it."""
    until = time.monotonic() + seconds
    while True:
        try:
            return Line(address, token, seconds=max(0.1, min(5.0, until - time.monotonic())))
        except RefusedError as error:
            raise UserError("S023", f"run {error.run} answers here, another one than ours", where=address,
                            fix="start this run with its own supervisor: trimaran resume RUN") from None  # fmt: skip
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
