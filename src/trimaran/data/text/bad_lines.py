"""Counts the lines of a text source that cannot be used, and refuses the source if they are too many."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from trimaran.core import UserError, templated

MAX_LISTED = 10_000  # bad lines that are kept with their reasons
MAX_SUGGESTED = 0.2  # no larger fraction of bad lines is suggested
MIN_BAD_TO_STOP = 1000  # bad lines before a source that is mostly bad is refused without reading the rest


class BadLines:
    """The bad lines of one source. `kind` names what a line is in messages: `line` or `row`."""

    def __init__(self, max_bad: float, kind: str = "line") -> None:
        self.num_lines = self.num_bad = 0
        self.listed: list[dict[str, str]] = []
        self._max_bad, self._kind = max_bad, kind
        self._first: dict[str, UserError] = {}
        self._codes: Counter[str] = Counter()
        self._without_field: Counter[str] = Counter()  # the fields of lines that lack the wanted one
        self._num_without_field = 0

    def add_good(self, lines: int = 1) -> None:
        self.num_lines += lines

    def add(self, error: UserError, *, lines: int = 1) -> None:
        """Count `lines` lines that `error` explains. Raises if most of the lines so far are bad."""
        self.num_lines += lines
        self.num_bad += lines
        self._codes[error.code] += lines
        self._first.setdefault(error.code, error)
        if len(self.listed) < MAX_LISTED:
            self.listed.append({"where": error.where, "code": error.code, "reason": error.what})
        if self.num_bad >= MIN_BAD_TO_STOP and self.num_bad > max(0.5, self._max_bad) * self.num_lines:
            raise self._refusal()

    def add_without_field(self, error: UserError, row: Mapping[str, Any]) -> None:
        """Count a line that lacks the wanted field, and remember which fields with text it has."""
        self._num_without_field += 1
        self._without_field.update(str(name) for name, value in row.items() if isinstance(value, str))
        self.add(error)

    def refuse_too_many(self, *, max_bad: float | None = None) -> None:
        """Raise if the fraction of bad lines exceeds `max_bad`, by default that of the source."""
        if self.num_bad and self.num_bad > (self._max_bad if max_bad is None else max_bad) * self.num_lines:
            raise self._refusal()

    def _refusal(self) -> UserError:
        code = self._codes.most_common(1)[0][0]
        first = self._first[code]
        verb = "is" if self.num_bad == 1 else "are"
        plural = "" if self.num_lines == 1 else "s"
        what = templated(
            "{first}; {num_bad:,} of {num_lines:,} {kind}{plural} {verb} bad, and the allowed fraction is {max_bad:g}",
            first=first.what,
            num_bad=self.num_bad,
            num_lines=self.num_lines,
            kind=self._kind,
            plural=plural,
            verb=verb,
            max_bad=self._max_bad,
        )
        allowed = ceil_share(self.num_bad, self.num_lines)
        leave_out = f"set data.samples.max_bad to {allowed:g} to leave out {self._kind}s like it"
        fix = f"{first.fix}, or {leave_out}" if allowed <= MAX_SUGGESTED else first.fix
        if first.code == "T008" and 2 * self._num_without_field > self.num_lines:
            fields = [name for name, _ in self._without_field.most_common(8)]
            fix = f"set data.text_field to one of {', '.join(fields) or 'the existing fields'}"
        elif first.code == "T008" and self._num_without_field:
            fix = f"most {self._kind}s have the field: correct or drop the others, or {leave_out}"
        return UserError(code, what, where=first.where, fix=fix)


def ceil_share(num_bad: int, num_lines: int) -> float:
    """Return the fraction of bad lines, rounded up to a thousandth."""
    return math.ceil(1000 * num_bad / num_lines) / 1000


def as_notice(num_bad: int, num_lines: int, listed: Iterable[Mapping[str, str]], where: str) -> str:
    """Return one line that says how many lines were left out, the first of them, and where the list is."""
    first = next(iter(listed), None)
    example = f", such as {first['where']}: {first['reason']}" if first else ""
    plural = "line was" if num_bad == 1 else "lines were"
    return f"{num_bad:,} bad {plural} left out of {num_lines:,}{example}; all are listed in {where}"
