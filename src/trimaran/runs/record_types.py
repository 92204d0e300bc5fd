"""The types of the fields in a run's JSON lines: a line may be damaged, or edited by hand, and readers rely on types.

A name has one type in all files. Fields that are not listed here are not checked.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

MAX_NUMBER = float(2**63)
MAX_TIME = 1e11  # the year 5138
# What reading a JSON file raises that is missing, special, damaged or of another version.
DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)

Check = Callable[[Any], bool]


def is_number(value: Any) -> TypeGuard[int | float]:
    """Return whether `value` is a finite number of a sensible size, and not a truth value."""
    return type(value) in (int, float) and -MAX_NUMBER < value < MAX_NUMBER


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_NUMBER


def is_time(value: Any) -> bool:
    """Return whether `value` is seconds since the epoch that a calendar can show."""
    return type(value) in (int, float) and 0 <= value < MAX_TIME


def _is_integer(value: Any) -> bool:
    return type(value) is int and -MAX_NUMBER < value < MAX_NUMBER


def _is(kind: type) -> Check:
    return lambda value: type(value) is kind


_is_text, _is_object, _is_truth = _is(str), _is(dict), _is(bool)


def _or_null(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _list_of(check: Check) -> Check:
    return lambda value: type(value) is list and all(map(check, value))


def _object_of(check: Check) -> Check:
    return lambda value: type(value) is dict and all(map(check, value.values()))


# Of a line of metrics, events, incidents, attempts, samples of machines.
LINE_TYPES: dict[str, Check] = {
    "action": _or_null(_is_text),
    "attempt": is_count,
    "cause": _is_text,
    "cost": _object_of(_or_null(is_number)),
    "data": _is_object,
    "ended": is_time,
    "evidence": _is_object,
    "gpus": _list_of(_is_object),
    "host": _is_text,
    "how": _or_null(_is_text),
    "id": _is_text,
    "kind": _is_text,
    "over": _is_integer,
    "pid": is_count,
    "rank": is_count,
    "ranks": _is_object,
    "step": is_count,
    "suspects": _list_of(is_count),
    "time": is_time,
    "victims": _list_of(is_count),
    "what": _is_text,
    "why": _is_text,
    "world_size": is_count,
}
# Of the `data` of an event. A field of another type is left out.
DATA_TYPES: dict[str, Check] = {
    "accuracy": _object_of(is_number),
    "accuracy_counts": _object_of(is_number),
    "action": _is_text,
    "born": _is_object,
    "bytes": is_number,
    "code": _is_text,
    "compile": _is_object,
    "copies": _is_object,
    "expected": _is_text,
    "first_lost": is_count,
    "fix": _is_text,
    "grad_norm": _or_null(is_number),
    "host": _is_text,
    "keys": _list_of(_is_text),
    "last_lost": is_count,
    "loss": _or_null(is_number),
    "lost": is_count,
    "message": _is_text,
    "path": _is_text,
    "phases": _object_of(_or_null(is_number)),
    "pid": is_count,
    "prompt": _is_text,
    "ranks": _list_of(is_count),
    "reason": _is_text,
    "right": _is_truth,
    "sample_ids": _list_of(is_count),
    "seconds": is_number,
    "stall_seconds": is_number,
    "steps": is_count,
    "text": _is_text,
    "tokens": is_count,
    "type": _is_text,
    "unused": _list_of(_is_text),
    "what": _is_text,
    "where": _is_text,
    "world_size": is_count,
    "written_bytes": is_number,
}
# Of the `evidence` of an incident. A field of another type is left out.
EVIDENCE_TYPES: dict[str, Check] = {
    "facts": _list_of(_is_text),
    "files": _list_of(_is_text),
    "sample_ids": _list_of(is_count),
    "why": _is_text,
}
MISTAKE_FIELDS = ("code", "what", "where", "fix")  # of an error that was a user's mistake


def checked_record(record: Any) -> dict[str, Any] | None:
    """Return the record, without fields of `data` and `evidence` of another type; None if the record is damaged."""
    if type(record) is not dict or not _has_types(record, LINE_TYPES):
        return None
    if "evidence" in record:
        record["evidence"] = _of_types(record["evidence"], EVIDENCE_TYPES)
    if "cost" in record:
        record["cost"] = {name: value for name, value in record["cost"].items() if value is not None}
    if "data" in record:
        record["data"] = data = _of_types(record["data"], DATA_TYPES)
        if record.get("kind") == "error" and "code" in data and any(name not in data for name in MISTAKE_FIELDS):
            del data["code"]
    return record


def finite_values(value: Any) -> Any:
    """Return a JSON value with None in place of NaN, Inf and numbers too large for arithmetic."""
    if type(value) in (int, float):
        return value if is_number(value) else None
    if isinstance(value, Mapping):
        return {key: finite_values(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite_values(each) for each in value]
    return value


def _of_types(fields: dict[str, Any], types: Mapping[str, Check]) -> dict[str, Any]:
    if _has_types(fields, types):
        return fields
    return {name: value for name, value in fields.items() if name not in types or types[name](value)}


def _has_types(record: Mapping[str, Any], types: Mapping[str, Check]) -> bool:
    return all(check(value) for name, value in record.items() if (check := types.get(name)) is not None)
