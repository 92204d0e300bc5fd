"""Counts what torch.compile compiles during training, how long it takes, and what is recompiled after the warm-up."""

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimaran.runs import WARM_UP_STEPS, Journal
from trimaran.train.process.supervisor_link import NO_SUPERVISOR, SupervisorLink

MAX_FRAMES = 30  # between torch's callback and the function that compiles
MAX_EVENTS = 400  # `compile` events of one start
COMPILE_TIME_METRIC = "_compile.compile_inner"  # torch's key for the seconds of each compilation without its backward


@dataclass(frozen=True, slots=True, kw_only=True)
class LateCompilation:
    """A compilation after the warm-up: the function with file and line, and torch's reason."""

    what: str
    why: str


class Compilations:
    """Counts, step by step, what this process has compiled since this object was made.

    `end_step(step)` ends a step. A compilation more than `WARM_UP_STEPS` steps after the first one is late. A step
    number below the last one restarts the warm-up. The counts come from torch's own metrics; nothing is read from a
    device. While torch compiles, the rank reports the section `compile` to the supervisor, which then does not take the
    long step or evaluation batch for a hang. Until the first step has ended, which may take minutes with an empty
    compile cache, rank 0 writes an event at the start and at the end of each compilation, with its function.
    """

    def __init__(self, link: SupervisorLink = NO_SUPERVISOR, journal: Journal | None = None) -> None:
        self._link, self._has_callbacks = link, False
        self._journal = journal if journal is not None and journal.rank == 0 else None
        self._compiling: AbstractContextManager[object] | None = None
        self._what, self._began, self._number = "", 0.0, 0
        self._functions: dict[str, float] = {}  # seconds until the first step had ended, by function
        self._names: dict[str, str] = {}  # by torch's number of the compilation, for backwards that are compiled later
        self.count, self.late, self.seconds = 0, 0, 0.0
        self._count_before, self._seconds_before = _count(), _seconds()
        self._first, self._step = 0, -1
        self._late_by_step: dict[int, tuple[LateCompilation, ...]] = {}
        self._register_callbacks()

    def end_step(self, step: int) -> None:
        self._register_callbacks()
        new = self._count_new()
        if step < self._step or self._step < 0:
            self._first = step
        elif new > 0 and step > self._first + WARM_UP_STEPS:
            self.late += new
            # The last `number` compilations; torch remembers only some dozens.
            late: list[LateCompilation] = []
            for each in [each for each in _dynamo_utils().get_compilation_metrics() if each.co_name][-new:]:
                what = f"{each.co_name} ({Path(each.co_filename or '').name}:{each.co_firstlineno})"
                why = (each.recompile_reason or "it was not compiled before").strip().splitlines()[0]
                late.append(LateCompilation(what=what, why=why))
            self._late_by_step = {step: tuple(late)}  # taken before the next step ends
        self._step = step

    def restart(self) -> None:
        """Start the warm-up again with the next step: the plan has changed, and with it what is compiled."""
        self._step = -1

    @contextmanager
    def outside_steps(self, step: int) -> Iterator[None]:
        """After `step`, count what is compiled inside the `with` block without assigning it to a step."""
        self.end_step(step)
        yield
        self._count_new()

    def _register_callbacks(self) -> None:
        """Have torch call us when it compiles, once dynamo is imported."""
        if not self._has_callbacks and (callbacks := sys.modules.get("torch._dynamo.callback")) is not None:
            self._has_callbacks = True
            callbacks.on_compile_start(self._on_start)
            callbacks.on_compile_end(self._on_end)

    def _on_start(self, args: Any) -> None:
        if self._compiling is None:
            self._compiling = self._link.section("compile")
            self._compiling.__enter__()
            self._what, self._began, self._number = self._name(args), time.monotonic(), self._number + 1
            self._write_event({})

    def _on_end(self, _: object) -> None:
        if self._compiling is not None:
            self._compiling.__exit__(None, None, None)
            self._compiling = None
            seconds = time.monotonic() - self._began
            if self._step <= self._first:
                self._functions[self._what] = self._functions.get(self._what, 0.0) + seconds
            self._write_event({"seconds": round(seconds, 3)})

    def _write_event(self, data: dict[str, Any]) -> None:
        if self._journal is not None and self._step <= self._first and self._number <= MAX_EVENTS // 2:
            step = max(0, self._step)
            self._journal.event("compile", step=step, what=self._what, number=self._number, **data)

    def _name(self, args: Any) -> str:
        """Return what torch compiles now; `args` is what it passes to a callback at the start."""
        trigger, number = getattr(args.callback_trigger, "name", ""), str(args.compile_id)
        if trigger == "DYNAMO":
            return self._names.setdefault(number, _compiled_function())
        if trigger == "LAZY_BACKWARD":
            return f"{self._names.get(number, 'a function')}, backward"
        return "CUDA graphs" if trigger == "CUDAGRAPH_RECORDING" else trigger.lower().replace("_", " ")

    def _count_new(self) -> int:
        new = _count() - self._count_before - self.count
        if new:
            self.count, self.seconds = self.count + new, _seconds() - self._seconds_before
        return new

    def is_first(self, step: int) -> bool:
        """Whether `step` is the first one after a start or a rewind."""
        return step == self._first + 1

    def take_late(self, step: int) -> tuple[LateCompilation, ...]:
        """Return the late compilations of `step`; a second call returns none."""
        if self._step < step:
            self.end_step(step)
        return self._late_by_step.pop(step, ())

    @property
    def metrics(self) -> dict[str, int]:
        return {"compiles": self.count, "recompiles": self.late} if self.count else {}

    def summary(self) -> dict[str, Any]:
        """Return the counts, the seconds and the cache hits and misses, for the event of the first step."""
        counters = _dynamo_utils().counters["inductor"] if self.count else {}
        hits, misses = (counters.get(f"fxgraph_cache_{name}", 0) for name in ("hit", "miss"))
        found = {"compiles": self.count, "seconds": self.seconds, "cache_hits": hits, "cache_misses": misses}
        functions = {what: round(seconds, 3) for what, seconds in self._functions.items()}
        return found | ({"functions": functions} if functions else {})


def _compiled_function() -> str:
    """Return what dynamo compiles, inside its callback: torch passes it to the callback's caller only."""
    frame = sys._getframe()
    for _ in range(MAX_FRAMES):
        if frame is None:
            break
        if frame.f_code.co_name == "_compile" and (code := frame.f_locals.get("code")) is not None:
            return code.co_qualname
        frame = frame.f_back
    return "a function"


def _dynamo_utils() -> Any:
    return sys.modules["torch._dynamo.utils"]


def _count() -> int:
    """Return how many functions this process has compiled. Does not import dynamo where nothing is compiled."""
    if "torch._dynamo.utils" not in sys.modules:
        return 0
    return len(_dynamo_utils().compilation_time_metrics.get(COMPILE_TIME_METRIC, ()))


def _seconds() -> float:
    if not _count():
        return 0.0
    utils = _dynamo_utils()
    backwards = [each.duration_us or 0 for each in utils.get_compilation_metrics() if each.is_forward is False]
    return sum(utils.compilation_time_metrics[COMPILE_TIME_METRIC]) + sum(backwards) / 1e6
