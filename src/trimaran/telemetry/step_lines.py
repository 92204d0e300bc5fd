"""The lines of `metrics.jsonl`, read quickly: a long run has hundreds of thousands of them, and views read them all."""

import json
import math
import re
from dataclasses import fields
from typing import Any

from trimaran.core import StepMetrics

_FIELDS = {field.name: field.type for field in fields(StepMetrics) if field.name != "details"}
_TYPES = {name: (int, float) if kind in (int, float) else (dict,) for name, kind in _FIELDS.items()}
_DECODER = json.JSONDecoder()


def read_step(line: bytes) -> tuple[StepMetrics, bytes] | None:
    """Return the step of a line, without its details, and the text that has them; None where the line is no step.

    A line as the journal writes it is not parsed whole: the details are most of it, and few of them are ever shown.
    """
    found = _HEAD.match(line) if line.endswith(b"}\n") else None
    if found is None:
        return _read_slowly(line)
    try:
        values: dict[str, Any] = {name: read(text) for (name, read), text in zip(_READERS, found.groups(), strict=True)}
    except ValueError:  # a number that is not finite is null, and few are
        return _read_slowly(line)
    return StepMetrics(**values), line[found.end() :]


def read_details(text: bytes) -> dict[str, Any]:
    """Return what `read_step` left of a line; a line that was damaged there has nothing."""
    try:
        return _DECODER.decode("{" + text.decode().removeprefix(","))
    except ValueError:
        return {}


def _read_slowly(line: bytes) -> tuple[StepMetrics, bytes] | None:
    try:
        tree = json.loads(line)
        values: dict[str, Any] = {
            name: math.nan if tree[name] is None else tree[name] for name in _FIELDS.keys() & tree.keys()
        }
        if not all(isinstance(each, _TYPES[name]) for name, each in values.items()):
            return None
        others = {key: value for key, value in tree.items() if key not in (*_FIELDS, "tokens_per_second")}
        return StepMetrics(**values), json.dumps(others).encode().removeprefix(b"{")
    except (ValueError, TypeError, AttributeError):
        return None


def _object(text: bytes) -> dict[str, Any]:
    return _DECODER.raw_decode(text.decode())[0]


def _pattern() -> re.Pattern[bytes]:
    """Return what the beginning of a line looks like: every field of a step in order, then the tokens per second."""
    shapes: dict[Any, bytes] = {int: rb"(\d+)", float: rb"(-?\d[\d.eE+-]*|null)"}
    parts = [b'"%s":%s' % (name.encode(), shapes.get(kind, rb"(\{[^{}]*\})")) for name, kind in _FIELDS.items()]
    return re.compile(rb"\{" + b",".join(parts) + rb',"tokens_per_second":[^,}]+')


_HEAD = _pattern()
_READERS = tuple((name, kind if kind in (int, float) else _object) for name, kind in _FIELDS.items())
