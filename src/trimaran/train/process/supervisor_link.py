"""What a rank gets from the supervisor that started it, such as its store. Under another launcher it has none of it."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch.distributed as dist

from trimaran.core import UserError
from trimaran.runs import ChannelClient, Heartbeat, HeartbeatBoard, Record, RefusedError, Section, pack
from trimaran.runs.wire import WRITTEN_ONCE, unpack

TIMEOUT = timedelta(minutes=10)
CONNECT_SECONDS = 30.0
TIMED_OUT = "wait timeout"  # in the message of the error; torch's own stores say it too
ANSWER_SECONDS = 60.0  # no answer takes longer, unless the supervisor's machine is down


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorLink:
    """The supervisor's store, the heartbeat board, and the memory that outlives this process.

    `store` is `host:port` of the supervisor's store and `token` its secret; when empty, ranks use torch's own store at
    MASTER_ADDR. `term` is the term of the supervisor's lease: a rank with a lower term than the newest must not write
    checkpoints. `local_rank` is this rank's row of the board. `rank_memories` are the file descriptors of the node's
    rank memories, one per local rank, see `checkpoint/memory_copies.py`. `note` says if a warm fork server is used.
    `own_disk` is the name of this node if every node has its own run directory on its own disk. `replica_start` counts
    how often the ranks of this elastic replica were started in this attempt.
    """

    attempt: int = 0
    term: int = 0
    store: str = ""
    token: str = ""
    board: HeartbeatBoard | None = None
    local_rank: int = 0
    rank_memories: tuple[int, ...] = ()
    note: str = ""
    own_disk: str = ""
    replica_start: int = 0

    def report_section(self, section: Section, step: int = 0) -> None:
        """Report to the supervisor which section of which step this rank is in. Each call counts as progress."""
        if self.board is not None:
            self.board.enter(self.local_rank, section, step)

    @contextmanager
    def section(self, section: Section, step: int | None = None) -> Iterator[Callable[[], None]]:
        """Report `section` inside the block, and the one before afterwards. Yields a function to report progress."""
        before = self.heartbeat
        if self.board is None or before is None:
            yield lambda: None
            return
        report = partial(self.board.enter, self.local_rank, section, before.step if step is None else step)
        report()
        try:
            yield report
        finally:
            self.board.enter(self.local_rank, before.section, before.step)

    def report_saved(self) -> None:
        """Report that the last step is done and saved: what fails from now on neither restarts nor fails the run."""
        if self.board is not None:
            self.board.mark_saved(self.local_rank)

    @property
    def heartbeat(self) -> Heartbeat | None:
        """What the supervisor sees of this rank now; None without a supervisor."""
        return None if self.board is None else self.board.read(self.local_rank)


NO_SUPERVISOR = SupervisorLink()


def read_supervisor_link(environment: Mapping[str, str]) -> SupervisorLink:
    """Return the link that the supervisor wrote into `environment`, see `launch/supervise/local_node.py`."""
    heartbeat, rank_memories = environment.get("TRIMARAN_HEARTBEAT_FD"), environment.get("TRIMARAN_MEMORY_FDS", "")
    return SupervisorLink(
        attempt=int(environment.get("TRIMARAN_ATTEMPT", 0)),
        term=int(environment.get("TRIMARAN_TERM", 0)),
        store=environment.get("TRIMARAN_STORE", ""),
        token=environment.get("TRIMARAN_TOKEN", ""),
        board=HeartbeatBoard(int(heartbeat)) if heartbeat else None,
        local_rank=int(environment.get("LOCAL_RANK", 0)),
        rank_memories=tuple(int(fd) for fd in rank_memories.split(",") if fd),
        note=environment.get("TRIMARAN_FORK_SERVER", ""),
        own_disk=environment.get("TRIMARAN_OWN_DISK", ""),
        replica_start=int(environment.get("TRIMARAN_REPLICA_START", 0)),
    )


class TokenStore(dist.Store):
    """Does what torch's `TCPStore` does, for the ranks of one attempt. Thread-safe.

    Connections to the supervisor are reused; a thread that waits for a key has its own. Torch's C++ code does not keep
    the Python object of a store alive, so this class does, until the process ends.
    """

    timeout: timedelta  # stored and set by torch's C++ class
    _alive: ClassVar[list["TokenStore"]] = []

    def __init__(self, address: str, token: str, *, attempt: int, timeout: timedelta = TIMEOUT) -> None:
        super().__init__()
        self.address, self.attempt = address, attempt
        self._token = token
        self.set_timeout(timeout)
        self._idle: list[ChannelClient] = []
        self._waited_for: dict[str, bytes] = {}  # values of keys that never change, until they are read
        self._lock = threading.Lock()
        self._alive.append(self)

    def clone(self) -> "TokenStore":
        """Return a store with the same keys and values and its own connections."""
        return TokenStore(self.address, self._token, attempt=self.attempt, timeout=self.timeout)

    def set(self, key: str, value: str | bytes) -> None:
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._request("set", keys, values=[pack(_bytes(value)) for value in values])

    def get(self, key: str) -> bytes:
        value = self._waited_for.pop(key, None)
        return self.multi_get([key])[0] if value is None else value

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [unpack(value) for value in self._request("get", keys, seconds=self.timeout.total_seconds())["values"]]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        seconds = (self.timeout if timeout is None else timeout).total_seconds()
        if all(WRITTEN_ONCE in key for key in keys):
            values = self._request("get", keys, seconds=seconds)["values"]
            self._waited_for |= {key: unpack(value) for key, value in zip(keys, values, strict=True)}
        else:
            self._request("wait", keys, seconds=seconds)

    def check(self, keys: Sequence[str]) -> bool:
        return self._request("check", keys)["all"]

    def add(self, key: str, value: int) -> int:
        return self._request("add", [key], amount=int(value))["amount"]

    def append(self, key: str, value: str | bytes) -> None:
        self._request("append", [key], value=pack(_bytes(value)))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        expected, desired = pack(_bytes(expected_value)), pack(_bytes(desired_value))
        answer = self._request("compare_set", [key], expected=expected, value=desired)
        return unpack(answer["value"])

    def delete_key(self, key: str) -> bool:
        return self._request("delete", [key])["deleted"]

    def num_keys(self) -> int:
        return len(self._request("list", [])["keys"])

    def has_extended_api(self) -> bool:
        return True

    # Torch's C++ code calls these methods by their C++ names.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def _request(self, operation: str, keys: Sequence[str], **fields: Any) -> Record:
        request = {"op": operation, "attempt": self.attempt, "keys": list(keys), **fields}
        try:
            with self._connection() as connection:
                answer = connection.request(request, seconds=ANSWER_SECONDS + fields.get("seconds", 0.0))
        except OSError as error:
            raise dist.DistNetworkError(f"the supervisor at {self.address} does not answer: {error}") from error
        if answer.get("error") == "timeout":
            missing = ", ".join(answer.get("missing", []))
            raise dist.DistStoreError(f"no rank set {missing} within {fields['seconds']:g} s ({TIMED_OUT})")
        if "error" in answer:
            raise dist.DistStoreError(f"the supervisor at {self.address} refused {operation}: {answer['error']}")
        return answer

    @contextmanager
    def _connection(self) -> Iterator[ChannelClient]:
        """Yield an open connection. It is reused for later requests unless this one failed."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        connection = connection or connect(self.address, self._token)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._idle.append(connection)


def supervisor_store(link: SupervisorLink) -> TokenStore:
    return TokenStore(link.store, link.token, attempt=link.attempt)


def connect(address: str, token: str, *, seconds: float = CONNECT_SECONDS) -> ChannelClient:
    """Return an open connection to the channel at `address`. Retries for `seconds`: many ranks connect at once."""
    until = time.monotonic() + seconds
    while True:
        try:
            return ChannelClient(address, token, seconds=max(0.1, min(5.0, until - time.monotonic())))
        except RefusedError as error:
            raise UserError("S023.supervisor-here-belongs", where=address, run=error.run) from None
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
