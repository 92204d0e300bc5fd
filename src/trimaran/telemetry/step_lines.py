"""The lines of `metrics.jsonl`, read quickly: a long run has hundreds of thousands of them, and views read them all."""

import json
import math
import re
from dataclasses import fields
from typing import Any, NamedTuple

from trimaran.core import PHASES, StepMetrics

_FIELDS = {field.name: field.type for field in fields(StepMetrics) if field.name != "details"}
_TYPES = {name: (int, float) if kind in (int, float) else (dict,) for name, kind in _FIELDS.items()}
_DECODER = json.JSONDecoder()
_NUMBER = rb"(-?\d[\d.eE+-]*|null)"


class StepLine(NamedTuple):
    """What a line says of its step, without the details: `rest` is their text. Cheaper to make than `StepMetrics`."""

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

    def metrics(self) -> StepMetrics:
        """Return the step without its details."""
        step, loss, norm, lr, tokens, samples, seconds, mfu, peak, phases, time, _ = self
        return StepMetrics(step=step, loss=loss, grad_norm=norm, lr=lr, tokens=tokens, samples=samples, mfu=mfu,
                           step_seconds=seconds, peak_bytes=peak, phases=phases, time=time)  # fmt: skip


def read_step(line: bytes) -> StepLine | None:
    """Return what a line says of its step; None where it is no step.

    A line as the journal writes it is not parsed whole: the details are most of it, and few of them are ever shown.
    """
    found = _HEAD.match(line) if line.endswith(b"}\n") else None
    if found is None:
        return _read_slowly(line)
    # One by one: as a loop over names it takes half as long again, and this is most of what a report does.
    step, loss, norm, lr, tokens, samples, seconds, mfu, peak, *usual, phases, time = found.groups()
    try:
        return StepLine(
            int(step), float(loss), float(norm), float(lr), int(tokens), int(samples), float(seconds), float(mfu),
            int(peak), dict(zip(PHASES, map(float, usual), strict=True)) if phases is None else _phases(phases),
            float(time), line[found.end() :],
        )  # fmt: skip
    except (ValueError, OverflowError):  # a number that is not finite is null, and few are
        return _read_slowly(line)


def read_details(text: bytes) -> dict[str, Any]:
    """Return what `read_step` left of a line; a line that was damaged there has nothing."""
    try:
        return _DECODER.decode("{" + text.decode().removeprefix(","))
    except ValueError:
        return {}


def read_waits(text: bytes) -> tuple[float, float]:
    """Return for how long rank 0 waited in collectives, and for the slowest rank; `text` is what `read_step` left."""
    if found := _WAITS.search(text):
        _, comm, straggler = found.groups()
        return 0.0 if comm == b"null" else float(comm), 0.0 if straggler == b"null" else float(straggler)
    told = read_details(text).get("waits") if b'"waits"' in text else None
    known = _numbers(told) if isinstance(told, dict) else {}
    return known.get("comm", 0.0), known.get("straggler", 0.0)


def _read_slowly(line: bytes) -> StepLine | None:
    try:
        tree = json.loads(line)
        values: dict[str, Any] = {name: math.nan if tree[name] is None else tree[name] for name in _FIELDS}
        if not all(isinstance(each, _TYPES[name]) for name, each in values.items()):
            return None
        others = {key: value for key, value in tree.items() if key not in (*_FIELDS, "tokens_per_second")}
        rest = json.dumps(others).encode().removeprefix(b"{")
        return StepLine(**values | {"phases": _numbers(values["phases"])}, rest=rest)
    except (ValueError, TypeError, LookupError, OverflowError):
        return None


def _phases(text: bytes) -> dict[str, float]:
    return _numbers(_DECODER.decode(text.decode()))


def _numbers(tree: dict[str, Any]) -> dict[str, float]:
    """Return what of `tree` is a number that can be counted with."""
    known = {name: each for name, each in tree.items() if isinstance(each, int | float)}
    return {name: each for name, each in known.items() if -math.inf < each < math.inf}


def _head() -> re.Pattern[bytes]:
    """Return what the beginning of a line looks like: every field of a step in order, then the tokens per second.

    The phases are an object, or, as a trainer writes them, all of them with a number each.
    """
    usual = rb"\{" + b",".join(b'"%s":%s' % (name.encode(), _NUMBER.replace(b"|null", b"")) for name in PHASES) + rb"\}"
    shapes: dict[Any, bytes] = {int: rb"(\d+)", float: _NUMBER}
    others = rb"(?:%s|(\{[^{}]*\}))" % usual
    parts = [b'"%s":%s' % (name.encode(), shapes.get(kind, others)) for name, kind in _FIELDS.items()]
    return re.compile(rb"\{" + b",".join(parts) + rb',"tokens_per_second":[^,}]+')


_HEAD = _head()
_WAITS = re.compile(b'"waits":\\{"data":%s,"comm":%s,"straggler":%s\\}' % (_NUMBER, _NUMBER, _NUMBER))
