"""A fast parser for `metrics.jsonl`: a long run has hundreds of thousands of lines, and views read them all."""

import json
import math
import re
from dataclasses import fields
from typing import Any, NamedTuple

from trimaran.core import PHASES, StepMetrics
from trimaran.runs.record_types import finite_values, is_count, is_number, is_time

_FIELDS = {field.name: field.type for field in fields(StepMetrics) if field.name != "details"}
_TYPES = {name: (int, float) if kind in (int, float) else (dict,) for name, kind in _FIELDS.items()}
_DECODER = json.JSONDecoder()
_NUMBER = rb"(-?\d[\d.]{0,24}(?:[eE][+-]?\d\d?)?|null)"  # no more than 99 digits: a line that has is damaged


class StepLine(NamedTuple):
    """A step without its details, which stay unparsed in `rest`. It is cheaper to build than `StepMetrics`."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    samples: int
    step_seconds: float
    mfu: float
    peak_bytes: int
    phases: dict[str, float]
    time: float
    rest: bytes

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds


def read_step(line: bytes) -> StepLine | None:
    """Return the step of a line, parsed only up to its details, which are rarely shown; None if it is not a step."""
    found = _HEAD.match(line) if line.endswith(b"}\n") else None
    if found is None:
        return _parse_json(line)
    # Field by field: a loop over names takes 1.5 times as long, and this is most of a report's time.
    step, loss, norm, lr, tokens, samples, seconds, mfu, peak, *phase_values, phases, time = found.groups()
    try:
        return StepLine(
            int(step), float(loss), float(norm), float(lr), int(tokens), int(samples), float(seconds), float(mfu),
            int(peak), dict(zip(PHASES, map(float, phase_values), strict=True)) if phases is None else
            _finite_numbers(_DECODER.decode(phases.decode())),
            float(time), line[found.end() :],
        )  # fmt: skip
    except (ValueError, OverflowError):  # NaN and Inf are written as null, which is rare
        return _parse_json(line)


def read_details(text: bytes) -> dict[str, Any]:
    """Return the details that `read_step` left unparsed; empty if they are damaged."""
    try:
        return finite_values(_DECODER.decode("{" + text.decode().removeprefix(",")))
    except (ValueError, RecursionError):
        return {}


def read_waits(text: bytes) -> tuple[float, float]:
    """Return the seconds that rank 0 waited in collectives, and for the slowest rank; `text` is `StepLine.rest`."""
    if found := _WAITS.search(text):
        _, comm, straggler = found.groups()
        return 0.0 if comm == b"null" else float(comm), 0.0 if straggler == b"null" else float(straggler)
    waits = read_details(text).get("waits") if b'"waits"' in text else None
    seconds = _finite_numbers(waits) if isinstance(waits, dict) else {}
    return seconds.get("comm", 0.0), seconds.get("straggler", 0.0)


def _parse_json(line: bytes) -> StepLine | None:
    try:
        tree = json.loads(line)
        values: dict[str, Any] = {name: math.nan if tree[name] is None else tree[name] for name in _FIELDS}
        if not all(isinstance(each, _TYPES[name]) for name, each in values.items()):
            return None
        if not (is_count(values["step"]) and is_time(values["time"])):
            return None
        if not all(is_number(each) or each != each for each in values.values() if not isinstance(each, dict)):
            return None
        others = {key: value for key, value in tree.items() if key not in (*_FIELDS, "tokens_per_second")}
        rest = json.dumps(others).encode().removeprefix(b"{")
        return StepLine(**values | {"phases": _finite_numbers(values["phases"])}, rest=rest)
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
        return None


def _finite_numbers(tree: dict[str, Any]) -> dict[str, float]:
    numbers = {name: each for name, each in tree.items() if isinstance(each, int | float)}
    return {name: each for name, each in numbers.items() if -math.inf < each < math.inf}


def _head() -> re.Pattern[bytes]:
    """Return the pattern of the beginning of a line: every field of a step in order, then the tokens per second.

    The phases are any flat object; the trainer's form, with a number for each phase, is matched directly.
    """
    number = _NUMBER.replace(b"|null", b"")
    all_phases = rb"\{" + b",".join(b'"%s":%s' % (name.encode(), number) for name in PHASES) + rb"\}"
    shapes: dict[Any, bytes] = {int: rb"(\d{1,18})", float: _NUMBER}
    any_phases = rb"(?:%s|(\{[^{}]*\}))" % all_phases
    parts = [b'"%s":%s' % (name.encode(), shapes.get(kind, any_phases)) for name, kind in _FIELDS.items()]
    return re.compile(rb"\{" + b",".join(parts) + rb',"tokens_per_second":[^,}]+')


_HEAD = _head()
_WAITS = re.compile(b'"waits":\\{"data":%s,"comm":%s,"straggler":%s\\}' % (_NUMBER, _NUMBER, _NUMBER))
