"""The key-value store of one attempt, and the requests that wait for keys in it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from trimaran.run.wire import Record, WireError, pack, unpack

Reply = Callable[[Record], None]


@dataclass(eq=False, slots=True)
class PendingWait:
    """A request that is answered when none of its keys is `missing` any more, or when it times out."""

    keys: list[str]
    missing: set[str]
    until: float
    reply: Reply
    with_values: bool


class KeyStore:
    """Values by key, as bytes. The operations behave like those of `torch.distributed.Store`."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._waiting: dict[str, list[PendingWait]] = {}
        self._all_waiting: set[PendingWait] = set()

    def answer(self, request: Record, reply: Reply, *, now: float) -> None:
        """Execute `request` and reply, now or when its keys are set. Raises `WireError` for a malformed request."""
        operation = OPERATIONS.get(request.get("op", ""))
        if operation is None:
            raise WireError(f"unknown operation: {str(request.get('op'))[:40]}")
        answer = operation(self, request, reply, now)
        if answer is not None:
            reply(answer)

    def expire(self, now: float) -> None:
        """Reply with a timeout to the requests whose time is up."""
        for each in [each for each in self._all_waiting if each.until <= now]:
            self._drop(each)
            each.reply({"error": "timeout", "missing": sorted(each.missing)[:8]})

    def next_timeout(self) -> float | None:
        """Return when the next request times out; None if none waits."""
        return min((each.until for each in self._all_waiting), default=None)

    def close(self) -> None:
        """Reply to all requests that wait: the attempt is over."""
        for each in list(self._all_waiting):
            self._drop(each)
            each.reply({"error": "over"})

    def drop_client(self, reply: Reply) -> None:
        """Forget the requests of the client behind `reply`, which has disconnected."""
        for each in [each for each in self._all_waiting if each.reply == reply]:
            self._drop(each)

    def put(self, key: str, value: bytes) -> None:
        self.values[key] = value
        for each in self._waiting.pop(key, []):
            each.missing.discard(key)
            if not each.missing:
                self._all_waiting.discard(each)
                each.reply(self._answer(each))

    def wait(self, keys: list[str], reply: Reply, *, until: float, with_values: bool) -> Record | None:
        """Return the answer; if keys are missing, return None and reply later."""
        missing = {key for key in keys if key not in self.values}
        waiting = PendingWait(keys, missing, until, reply, with_values)
        if not missing:
            return self._answer(waiting)
        self._all_waiting.add(waiting)
        for key in missing:
            self._waiting.setdefault(key, []).append(waiting)
        return None

    def _answer(self, waiting: PendingWait) -> Record:
        return {"values": [pack(self.values[key]) for key in waiting.keys]} if waiting.with_values else {}

    def _drop(self, waiting: PendingWait) -> None:
        self._all_waiting.discard(waiting)
        for key in waiting.missing:
            others = self._waiting.get(key, [])
            if waiting in others:
                others.remove(waiting)
            if not others:
                self._waiting.pop(key, None)


def _set(keys: KeyStore, request: Record, _reply: Reply, _now: float) -> Record:
    values = _list(request, "values")
    names = _names(request)
    if len(names) != len(values):
        raise WireError("the numbers of keys and values differ")
    for key, value in zip(names, [unpack(value) for value in values], strict=True):
        keys.put(key, value)
    return {}


def _get(keys: KeyStore, request: Record, reply: Reply, now: float) -> Record | None:
    return keys.wait(_names(request), reply, until=now + _seconds(request), with_values=True)


def _wait(keys: KeyStore, request: Record, reply: Reply, now: float) -> Record | None:
    return keys.wait(_names(request), reply, until=now + _seconds(request), with_values=False)


def _add(keys: KeyStore, request: Record, _reply: Reply, _now: float) -> Record:
    key, amount = _name(request), request.get("amount")
    before = keys.values.get(key, b"0")
    if not isinstance(amount, int) or not before.removeprefix(b"-").isdigit():
        raise WireError("add needs integers")
    keys.put(key, str(int(before) + amount).encode())
    return {"amount": int(keys.values[key])}


def _append(keys: KeyStore, request: Record, _reply: Reply, _now: float) -> Record:
    key = _name(request)
    keys.put(key, keys.values.get(key, b"") + unpack(request.get("value")))
    return {}


def _compare_set(keys: KeyStore, request: Record, _reply: Reply, _now: float) -> Record:
    key, expected, desired = _name(request), unpack(request.get("expected")), unpack(request.get("value"))
    current = keys.values.get(key)
    if current == expected or (current is None and not expected):
        keys.put(key, desired)
        return {"value": pack(desired)}
    return {"value": pack(expected if current is None else current)}


def _check(keys: KeyStore, request: Record, _reply: Reply, _now: float) -> Record:
    return {"all": all(key in keys.values for key in _names(request))}


def _delete(keys: KeyStore, request: Record, _reply: Reply, _now: float) -> Record:
    return {"deleted": keys.values.pop(_name(request), None) is not None}


def _list_keys(keys: KeyStore, _request: Record, _reply: Reply, _now: float) -> Record:
    return {"keys": list(keys.values)}


OPERATIONS: dict[str, Callable[[KeyStore, Record, Reply, float], Record | None]] = {
    "set": _set,
    "get": _get,
    "wait": _wait,
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
