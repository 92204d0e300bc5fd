"""What torch compiles while a run trains: how much, how long it took, and what was compiled again when all should have
been there."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimaran.train.process.supervisor_link import NO_SUPERVISOR, SupervisorLink

WARM_STEPS = 3  # of a stretch of training: within them everything that a step needs has been compiled
FORWARD = "_compile.compile_inner"  # under which torch notes the seconds of each compilation, backward left out


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """Something that was compiled after the warm-up: the function and its place in the code, and torch's reason."""

    what: str
    why: str


class Compilations:
    """Counts, step by step, what this process has compiled since this object was made.

    `mark(step)` ends a step; what was compiled in it more than `WARM_STEPS` steps after the first mark is late. A step
    that does not follow the last one begins a new stretch. Torch keeps the books; nothing is read from a device. The
    supervisor sees when something is compiled in the middle of training: that takes its time, and is no hang.
    """

    def __init__(self, link: SupervisorLink = NO_SUPERVISOR) -> None:
        self._link, self._listens = link, False
        self._interrupted: int | None = None
        self.count, self.late, self.seconds = 0, 0, 0.0
        self._at_first, self._seconds_before = _count(), _seconds()
        self._first, self._step = 0, -1
        self._told: dict[int, tuple[Late, ...]] = {}

    def mark(self, step: int) -> None:
        """Take note of what was compiled in `step`, which has just ended."""
        self._listen()
        new = self._take()
        if step < self._step or self._step < 0:
            self._first = step
        elif new > 0 and step > self._first + WARM_STEPS:
            self.late += new
            self._told = {step: _newest(new)}  # read before the next step ends
        self._step = step

    @contextmanager
    def aside(self, step: int) -> Iterator[None]:
        """After `step`: what is compiled inside counts, and belongs to no step."""
        self.mark(step)
        yield
        self._take()

    def _listen(self) -> None:
        """Have torch say when it compiles, as soon as it has loaded what does."""
        if not self._listens and (callbacks := sys.modules.get("torch._dynamo.callback")) is not None:
            self._listens = True
            callbacks.on_compile_start(self._begin)
            callbacks.on_compile_end(self._end)

    def _begin(self, _: object) -> None:
        heartbeat = self._link.heartbeat
        if heartbeat is not None and heartbeat.section == "step":
            self._interrupted = heartbeat.step
            self._link.enter("compile", heartbeat.step)

    def _end(self, _: object) -> None:
        if self._interrupted is not None:
            self._link.enter("step", self._interrupted)
            self._interrupted = None

    def _take(self) -> int:
        """Count what was compiled since the last look, and return how much that is."""
        new = _count() - self._at_first - self.count
        if new:
            self.count, self.seconds = self.count + new, _seconds() - self._seconds_before
        return new

    def is_first(self, step: int) -> bool:
        """Whether `step` is the first of a stretch."""
        return step == self._first + 1

    def read(self, step: int) -> tuple[Late, ...]:
        """Return what was compiled late in `step`, once."""
        if self._step < step:
            self.mark(step)
        return self._told.pop(step, ())

    @property
    def details(self) -> dict[str, int]:
        """What a step's metrics say: nothing where nothing is compiled."""
        return {"compiles": self.count, "recompiles": self.late} if self.count else {}

    def facts(self) -> dict[str, Any]:
        """Return what the first step's event tells: how much was compiled, for how long, and what the cache had."""
        found = _books().counters["inductor"] if self.count else {}
        hits, misses = (found.get(f"fxgraph_cache_{name}", 0) for name in ("hit", "miss"))
        return {"compiles": self.count, "seconds": self.seconds, "cache_hits": hits, "cache_misses": misses}


def _books() -> Any:
    return sys.modules["torch._dynamo.utils"]


def _count() -> int:
    """Return how many functions were compiled in this process; a run that compiles nothing does not import dynamo."""
    return len(_books().compilation_time_metrics.get(FORWARD, ())) if "torch._dynamo.utils" in sys.modules else 0


def _seconds() -> float:
    if not _count():
        return 0.0
    later = [each.duration_us or 0 for each in _books().get_compilation_metrics() if each.is_forward is False]
    return sum(_books().compilation_time_metrics[FORWARD]) + sum(later) / 1e6


def _newest(number: int) -> tuple[Late, ...]:
    """Return the last compilations; torch remembers some dozens."""
    known = [each for each in _books().get_compilation_metrics() if each.co_name][-number:]
    return tuple(
        Late(
            what=f"{each.co_name} ({Path(each.co_filename or '').name}:{each.co_firstlineno})",
            why=(each.recompile_reason or "it was not compiled before").strip().splitlines()[0],
        )
        for each in known
    )
