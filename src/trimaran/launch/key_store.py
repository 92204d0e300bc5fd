"""The values that the ranks of one attempt leave for each other, and who waits for which."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from trimaran.run.wire import Record, WireError, pack, unpack

Reply = Callable[[Record], None]


@dataclass(eq=False, slots=True)
class Waiting:
    """A question that is answered when none of its keys is `missing` any more, or too late."""

    keys: list[str]
    missing: set[str]
    until: float
    reply: Reply
    with_values: bool


class Keys:
    """Values by key, as bytes. Means by its operations what torch's own stores mean by theirs."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._waiting: dict[str, list[Waiting]] = {}
        self._all_waiting: set[Waiting] = set()

    def answer(self, request: Record, reply: Reply, *, now: float) -> None:
        """Do what `request` asks and reply, now or when its keys are there. Raises `WireError` at nonsense."""
        operation = OPERATIONS.get(request.get("op", ""))
        if operation is None:
            raise WireError(f"an operation that is not known: {str(request.get('op'))[:40]}")
        answer = operation(self, request, reply, now)
        if answer is not None:
            reply(answer)

    def late(self, now: float) -> None:
        """Tell those who have waited long enough that they wait in vain."""
        for each in [each for each in self._all_waiting if each.until <= now]:
            self._drop(each)
            each.reply({"error": "timeout", "missing": sorted(each.missing)[:8]})

    def next_late(self) -> float | None:
        """Return when somebody's patience ends next."""
        return min((each.until for each in self._all_waiting), default=None)

    def close(self) -> None:
        """Send everybody home."""
        for each in list(self._all_waiting):
            self._drop(each)
            each.reply({"error": "over"})

    def leave(self, reply: Reply) -> None:
        """Forget what whoever owns `reply` waits for: it has hung up."""
        for each in [each for each in self._all_waiting if each.reply == reply]:
            self._drop(each)

    def put(self, key: str, value: bytes) -> None:
        self.values[key] = value
        for each in self._waiting.pop(key, []):
            each.missing.discard(key)
            if not each.missing:
                self._all_waiting.discard(each)
                each.reply(self._found(each))

    def wait(self, keys: list[str], reply: Reply, *, until: float, with_values: bool) -> Record | None:
        """Return the answer, or None and reply later when keys are missing."""
        missing = {key for key in keys if key not in self.values}
        waiting = Waiting(keys, missing, until, reply, with_values)
        if not missing:
            return self._found(waiting)
        self._all_waiting.add(waiting)
        for key in missing:
            self._waiting.setdefault(key, []).append(waiting)
        return None

    def _found(self, waiting: Waiting) -> Record:
        return {"values": [pack(self.values[key]) for key in waiting.keys]} if waiting.with_values else {}

    def _drop(self, waiting: Waiting) -> None:
        self._all_waiting.discard(waiting)
        for key in waiting.missing:
            others = self._waiting.get(key, [])
            if waiting in others:
                others.remove(waiting)
            if not others:
                self._waiting.pop(key, None)


def _set(keys: Keys, request: Record, _reply: Reply, _now: float) -> Record:
    values = _list(request, "values")
    names = _names(request)
    if len(names) != len(values):
        raise WireError("keys and values of different number")
    for key, value in zip(names, [unpack(value) for value in values], strict=True):
        keys.put(key, value)
    return {}


def _get(keys: Keys, request: Record, reply: Reply, now: float) -> Record | None:
    return keys.wait(_names(request), reply, until=now + _seconds(request), with_values=True)


def _wait(keys: Keys, request: Record, reply: Reply, now: float) -> Record | None:
    return keys.wait(_names(request), reply, until=now + _seconds(request), with_values=False)


def _add(keys: Keys, request: Record, _reply: Reply, _now: float) -> Record:
    key, amount = _name(request), request.get("amount")
    before = keys.values.get(key, b"0")
    if not isinstance(amount, int) or not before.removeprefix(b"-").isdigit():
        raise WireError("add wants whole numbers")
    keys.put(key, str(int(before) + amount).encode())
    return {"amount": int(keys.values[key])}


def _append(keys: Keys, request: Record, _reply: Reply, _now: float) -> Record:
    key = _name(request)
    keys.put(key, keys.values.get(key, b"") + unpack(request.get("value")))
    return {}


def _compare_set(keys: Keys, request: Record, _reply: Reply, _now: float) -> Record:
    key, expected, wanted = _name(request), unpack(request.get("expected")), unpack(request.get("value"))
    there = keys.values.get(key)
    if there == expected or (there is None and not expected):
        keys.put(key, wanted)
        return {"value": pack(wanted)}
    return {"value": pack(expected if there is None else there)}


def _check(keys: Keys, request: Record, _reply: Reply, _now: float) -> Record:
    return {"all": all(key in keys.values for key in _names(request))}


def _delete(keys: Keys, request: Record, _reply: Reply, _now: float) -> Record:
    return {"deleted": keys.values.pop(_name(request), None) is not None}


def _list_keys(keys: Keys, _request: Record, _reply: Reply, _now: float) -> Record:
    return {"keys": list(keys.values)}


OPERATIONS: dict[str, Callable[[Keys, Record, Reply, float], Record | None]] = {
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
            raise WireError("a key that is not a string")
        yield value


def _name(request: Record) -> str:
    names = _names(request)
    if len(names) != 1:
        raise WireError("one key is wanted")
    return names[0]


def _seconds(request: Record) -> float:
    seconds = request.get("seconds")
    if not isinstance(seconds, int | float) or not 0 <= seconds < 1e9:
        raise WireError("seconds is not a number of seconds")
    return float(seconds)
