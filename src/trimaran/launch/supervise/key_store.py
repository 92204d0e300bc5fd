"""The key-value stores of a run's attempts, and the requests that wait for keys in them."""

import heapq
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from trimaran.runs.wire import Record, WireError, pack, unpack

Reply = Callable[[Record], None]
MAX_TIMEOUTS_LEFT = 1024  # of requests that are over: a timeout may be hours away


@dataclass(eq=False, slots=True)
class PendingWait:
    """A request that is answered when none of its keys is `missing` any more, or when it times out."""

    keys: list[str]
    missing: set[str]
    until: float
    reply: Reply
    client: Hashable
    with_values: bool
    is_over: bool = False  # it is answered, or its client is gone


class KeyStore:
    """The values of one attempt by key, as bytes. The operations behave like those of `torch.distributed.Store`."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._waiting: dict[str, set[PendingWait]] = {}
        self._of_client: dict[Hashable, set[PendingWait]] = defaultdict(set)
        self._timeouts: list[tuple[float, int, PendingWait]] = []  # a heap; requests that are over leave it later
        self._numbers, self._num_waiting = count(), 0

    @property
    def is_idle(self) -> bool:
        """Whether no request waits, and nothing is kept for one that did."""
        return not (self._num_waiting or self._waiting or self._of_client)

    def answer(self, request: Record, reply: Reply, *, client: Hashable, now: float) -> None:
        """Execute `request` of `client` and reply, now or when its keys are set. Raises `WireError` if malformed."""
        name = str(request.get("op"))
        if name in ("get", "wait"):
            self._wait(request, reply, client=client, now=now)
        elif (operation := OPERATIONS.get(name)) is not None:
            reply(operation(self, request))
        else:
            raise WireError(f"unknown operation: {name[:40]}")

    def expire(self, now: float) -> None:
        """Reply with a timeout to the requests whose time is up."""
        while self._timeouts and (self._timeouts[0][2].is_over or self._timeouts[0][0] <= now):
            each = heapq.heappop(self._timeouts)[2]
            if not each.is_over:
                self._drop(each)
                each.reply({"error": "timeout", "missing": sorted(each.missing)[:8]})

    def next_timeout(self) -> float | None:
        """Return when the next request times out, or earlier; None if none waits."""
        return self._timeouts[0][0] if self._timeouts else None

    def close(self) -> None:
        """Reply to all requests that wait: the attempt is over."""
        for each in [each for of_client in self._of_client.values() for each in of_client]:
            self._drop(each)
            each.reply({"error": "over"})

    def drop_client(self, client: Hashable) -> None:
        """Forget the requests of a client that has disconnected."""
        for each in list(self._of_client.get(client, ())):
            self._drop(each)

    def put(self, key: str, value: bytes) -> None:
        self.values[key] = value
        for each in self._waiting.pop(key, ()):
            each.missing.discard(key)
            if not each.missing:
                self._drop(each)
                each.reply(self._answer(each))

    def _wait(self, request: Record, reply: Reply, *, client: Hashable, now: float) -> None:
        """Reply, now or when no key of `request` is missing any more."""
        keys, until = _names(request), now + _seconds(request)
        missing = {key for key in keys if key not in self.values}
        waiting = PendingWait(keys, missing, until, reply, client, with_values=request["op"] == "get")
        if not missing:
            reply(self._answer(waiting))
            return
        self._num_waiting += 1
        self._of_client[client].add(waiting)
        heapq.heappush(self._timeouts, (until, next(self._numbers), waiting))
        for key in missing:
            self._waiting.setdefault(key, set()).add(waiting)

    def _answer(self, waiting: PendingWait) -> Record:
        return {"values": [pack(self.values[key]) for key in waiting.keys]} if waiting.with_values else {}

    def _drop(self, waiting: PendingWait) -> None:
        waiting.is_over = True
        of_client = self._of_client[waiting.client]
        of_client.discard(waiting)
        if not of_client:
            del self._of_client[waiting.client]
        for key in waiting.missing:
            others = self._waiting.get(key, set())
            others.discard(waiting)
            if not others:
                self._waiting.pop(key, None)
        self._num_waiting -= 1
        if len(self._timeouts) > 2 * self._num_waiting + MAX_TIMEOUTS_LEFT:
            self._timeouts = [each for each in self._timeouts if not each[2].is_over]
            heapq.heapify(self._timeouts)


class AttemptStores:
    """The stores of all attempts that are not over. Each is made by the first request of its attempt."""

    def __init__(self) -> None:
        self._stores: dict[int, KeyStore] = {}
        self._last_ended = -1  # this attempt and all before it are over

    @property
    def is_idle(self) -> bool:
        """Whether no request waits for a key."""
        return all(each.is_idle for each in list(self._stores.values()))

    def store_of(self, request: Record) -> KeyStore | None:
        """Return the store of the attempt that `request` is about; None if that is over."""
        attempt = request.get("attempt")
        if not isinstance(attempt, int):
            raise WireError("a request without an attempt")
        if attempt <= self._last_ended:
            return None
        store = self._stores.get(attempt)
        if store is None:
            store = self._stores[attempt] = KeyStore()
        return store

    def answer(self, request: Record, reply: Reply, *, client: Hashable, now: float) -> None:
        """See `KeyStore.answer`. The answer is an error if the attempt is over."""
        store = self.store_of(request)
        if store is None:
            reply({"error": "over"})
        else:
            store.answer(request, reply, client=client, now=now)

    def exchange(self, attempt: int, prefix: str, written: Mapping[str, bytes | None]) -> dict[str, bytes]:
        """Write to the store of an attempt, in order, and return the values whose keys begin with `prefix`.

        None deletes a key.
        """
        store = self.store_of({"attempt": attempt})
        if store is None:
            return {}
        for key, value in written.items():
            store.values.pop(key, None) if value is None else store.put(key, value)
        return {key: value for key, value in store.values.items() if key.startswith(prefix)}

    def end(self, attempt: int) -> None:
        """Drop the values of `attempt` and of all before it. Their pending and later requests fail as over."""
        self._last_ended = max(self._last_ended, attempt)
        for old in [each for each in self._stores if each <= attempt]:
            self._stores.pop(old).close()

    def expire(self, now: float) -> None:
        """Reply with a timeout to the requests whose time is up."""
        for store in self._stores.values():
            store.expire(now)

    def next_timeout(self) -> float | None:
        """Return when the next request times out, or earlier; None if none waits."""
        times = [store.next_timeout() for store in self._stores.values()]
        return min((each for each in times if each is not None), default=None)

    def drop_client(self, client: Hashable) -> None:
        """Forget the requests of a client that has disconnected."""
        for store in self._stores.values():
            store.drop_client(client)


def _set(keys: KeyStore, request: Record) -> Record:
    values = _list(request, "values")
    names = _names(request)
    if len(names) != len(values):
        raise WireError("the numbers of keys and values differ")
    for key, value in zip(names, [unpack(value) for value in values], strict=True):
        keys.put(key, value)
    return {}


def _add(keys: KeyStore, request: Record) -> Record:
    key, amount = _name(request), request.get("amount")
    before = keys.values.get(key, b"0")
    if not isinstance(amount, int) or not before.removeprefix(b"-").isdigit():
        raise WireError("add needs integers")
    keys.put(key, str(int(before) + amount).encode())
    return {"amount": int(keys.values[key])}


def _append(keys: KeyStore, request: Record) -> Record:
    key = _name(request)
    keys.put(key, keys.values.get(key, b"") + unpack(request.get("value")))
    return {}


def _compare_set(keys: KeyStore, request: Record) -> Record:
    key, expected, desired = _name(request), unpack(request.get("expected")), unpack(request.get("value"))
    current = keys.values.get(key)
    if current == expected or (current is None and not expected):
        keys.put(key, desired)
        return {"value": pack(desired)}
    return {"value": pack(expected if current is None else current)}


def _check(keys: KeyStore, request: Record) -> Record:
    return {"all": all(key in keys.values for key in _names(request))}


def _delete(keys: KeyStore, request: Record) -> Record:
    return {"deleted": keys.values.pop(_name(request), None) is not None}


def _list_keys(keys: KeyStore, _request: Record) -> Record:
    return {"keys": list(keys.values)}


OPERATIONS: dict[str, Callable[[KeyStore, Record], Record]] = {
    "set": _set,
    "add": _add,
    "append": _append,
    "compare_set": _compare_set,
    "check": _check,
    "delete": _delete,
    "list": _list_keys,
}


def _list(request: Record, field: str) -> list[Any]:
    value = request.get(field)
    if not isinstance(value, list):
        raise WireError(f"{field} is not a list")
    return value


def _names(request: Record) -> list[str]:
    return list(_strings(_list(request, "keys")))


def _strings(values: list[Any]) -> Iterator[str]:
    for value in values:
        if not isinstance(value, str):
            raise WireError("a key is not a string")
        yield value


def _name(request: Record) -> str:
    names = _names(request)
    if len(names) != 1:
        raise WireError("the operation needs exactly one key")
    return names[0]


def _seconds(request: Record) -> float:
    seconds = request.get("seconds")
    if not isinstance(seconds, int | float) or not 0 <= seconds < 1e9:
        raise WireError("seconds is not a number of seconds")
    return float(seconds)
