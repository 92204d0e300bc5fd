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


def _by_name(names: Mapping[Check, str]) -> dict[str, Check]:
    """Return the check of each field, from the names of a check's fields, separated by blanks."""
    return {name: check for check, each in names.items() for name in each.split()}


# Of a line of metrics, events, incidents, attempts, samples of machines.
LINE_TYPES = _by_name(
    {
        _or_null(_is_text): "action how",
        is_count: "attempt pid rank step world_size",
        _is_text: "cause host id kind what why",
        _object_of(_or_null(is_number)): "cost",
        _is_object: "data evidence ranks",
        is_time: "ended time",
        _list_of(_is_object): "gpus",
        _is_integer: "over",
        _list_of(is_count): "suspects victims",
    }
)
# Of the `data` of an event. A field of another type is left out.
DATA_TYPES = _by_name(
    {
        _object_of(is_number): "accuracy accuracy_counts",
        _is_text: "action code expected fix host message path prompt reason text type what where",
        _is_object: "born compile copies",
        is_number: "bytes seconds stall_seconds written_bytes",
        is_count: "first_lost last_lost lost pid steps tokens world_size",
        _or_null(is_number): "grad_norm loss",
        _list_of(_is_text): "keys unused",
        _object_of(_or_null(is_number)): "phases",
        _list_of(is_count): "ranks sample_ids",
        _is_truth: "right",
    }
)
# Of the `evidence` of an incident. A field of another type is left out.
EVIDENCE_TYPES = _by_name({_list_of(_is_text): "facts files", _list_of(is_count): "sample_ids", _is_text: "why"})
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
