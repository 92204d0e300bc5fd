"""Times how long this rank waits in collectives inside layers, by the axis of the mesh that they are for."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

Span = Callable[[str], AbstractContextManager[None]]  # from an axis to the context manager that times a wait
NO_SPAN = nullcontext()


class AxisWaits:
    """What times the waits of the running lap. Outside a step nothing does.

    There is one for the process, because autograd functions and forward hooks have no other way to reach it: a rank
    runs one step at a time.
    """

    __slots__ = ("_span",)

    def __init__(self) -> None:
        self._span: Span | None = None

    def start(self, span: Span) -> None:
        self._span = span

    def stop(self) -> None:
        self._span = None

    def span(self, axis: str) -> AbstractContextManager[None]:
        """Return a context manager that times a collective and its wait, on a GPU by marks; not in compiled code."""
        return NO_SPAN if self._span is None else self._span(axis)


AXIS_WAITS = AxisWaits()


def axis_span(axis: str) -> AbstractContextManager[None]:
    """Return `AxisWaits.span`, or in code that is being compiled one that does nothing."""
    return nullcontext() if torch.compiler.is_compiling() else AXIS_WAITS.span(axis)
