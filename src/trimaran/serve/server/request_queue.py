"""Requests between the API and the engine: who waits, who runs, and what happens to them when the engine dies."""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from trimaran.core import UserError
from trimaran.serve.engine.engine_request import EngineRequest, TokenOutput

MAX_CRASHES = 2  # of the engine, while a request runs


class Ticket:
    """The requests of one call: their outputs by the number of the request, in the order in which they come.

    The outputs that wait here are bounded: a request has at most `max_tokens` of them.
    """

    def __init__(self, count: int) -> None:
        self._outputs: dict[int, list[TokenOutput]] = {}
        self._num_waiting, self._num_awaited = 0, 1
        self._has_end = False  # one of the outputs that wait is the last of its request
        self._arrived: asyncio.Future[None] | None = None
        self._error: UserError | None = None
        self.num_open = count
        self.weights = ""

    async def take(self, num_awaited: int = 1) -> dict[int, list[TokenOutput]]:
        """Return all outputs that wait, once there are as many or a request has ended; one call may wait at a time.

        Raises UserError if a request cannot be answered, after the outputs that came before.
        """
        self._num_awaited = num_awaited
        if self._num_waiting < num_awaited and not self._has_end and self._error is None:
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
        if not self._outputs and self._error is not None:
            raise self._error
        taken, self._outputs = self._outputs, {}
        self._num_waiting, self._has_end = 0, False
        return taken

    def put(self, number: int, output: TokenOutput) -> None:
        """Add an output. The last one of a request wakes up the call at once."""
        if self._error is not None:
            return
        if number in self._outputs:
            self._outputs[number].append(output)
        else:
            self._outputs[number] = [output]
        self._num_waiting += 1
        if output.finish is not None:
            self._has_end = True
        if self._has_end or self._num_waiting >= self._num_awaited:
            self._wake_up()

    def fail(self, error: UserError) -> None:
        """End the call with an error. What follows is ignored."""
        if self._error is None:
            self._error = error
            self._wake_up()

    def _wake_up(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request that is not answered yet. `weights` is the set of weights that its first token came from."""

    request: EngineRequest
    ticket: Ticket
    number: int
    order: int
    generated: list[int] = field(default_factory=list)
    has_output: bool = False
    crashes: int = 0
    weights: str = ""
    last_time: float = field(default_factory=time.monotonic)

    @property
    def remaining(self) -> EngineRequest:
        """The request to send to a restarted engine: with the tokens generated so far."""
        if not self.has_output:
            return self.request
        return replace(self.request, generated=tuple(self.generated), prompt_logprobs=False)


class RequestQueue:
    """Requests that wait and requests that run. `on_times` gets the seconds before each output, and if it is the first.

    All methods are called from one thread.
    """

    def __init__(self, *, max_waiting: int, on_times: Callable[[float, bool], None] = lambda seconds, first: None
                 ) -> None:  # fmt: skip
        self.max_waiting, self._on_times = max_waiting, on_times
        self._waiting: deque[ActiveRequest] = deque()
        self._running: dict[str, ActiveRequest] = {}
        self._orders = itertools.count()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_begun(self) -> bool:
        """Whether any request, running or waiting, has output already."""
        return any(each.has_output for each in (*self._running.values(), *self._waiting))

    def submit(self, requests: Sequence[EngineRequest], *, free: int) -> Ticket:
        """Add requests, all or none. Raises UserError if too many wait; the first `free` would not wait."""
        if self.num_waiting + len(requests) - max(0, free) > self.max_waiting:
            raise UserError("U008.queue-full-requests", where="the server", num_waiting=self.num_waiting)
        ticket = Ticket(len(requests))
        for number, request in enumerate(requests):
            self._waiting.append(ActiveRequest(request, ticket, number, next(self._orders)))
        return ticket

    def take(self, count: int, weights: str, *, only_begun: bool = False) -> Iterator[ActiveRequest]:
        """Yield the next requests for the engine, which has these weights. They are running then."""
        for _ in range(max(0, count)):
            if not self._waiting or (only_begun and not self._waiting[0].has_output):
                return
            taken = self._waiting.popleft()
            taken.weights = taken.weights or weights
            taken.ticket.weights = taken.weights
            self._running[taken.request.id] = taken
            yield taken

    def receive(self, outputs: Iterable[TokenOutput]) -> None:
        """Hand the outputs of a message to their calls. Those of unknown requests are ignored: they were cancelled."""
        now = time.monotonic()
        for output in outputs:
            active = self._running.get(output.request)
            if active is None:
                continue
            self._on_times(now - active.last_time, not active.has_output)
            active.last_time, active.has_output = now, True
            if output.token is not None:
                active.generated.append(output.token)
            if output.finish == "error":
                self.refuse(output.request, UserError("U010.engine-could", where="the request", error=output.error))
                continue
            if output.finish is not None:
                self._close(active)
            active.ticket.put(active.number, output)

    def refuse(self, request_id: str, error: UserError) -> None:
        if active := self._running.get(request_id):
            self._close(active)
            active.ticket.fail(error)

    def cancel(self, ticket: Ticket, number: int | None = None) -> list[str]:
        """Drop the requests of a call, or one of them. Returns the ids of those that the engine has, to abort them."""
        if not ticket.num_open:
            return []

        def is_meant(each: ActiveRequest) -> bool:
            return each.ticket is ticket and number in (None, each.number)

        running = [each for each in self._running.values() if is_meant(each)]
        for active in running:
            self._close(active)
        if ticket.num_open and (waiting := [each for each in self._waiting if is_meant(each)]):
            ticket.num_open -= len(waiting)
            self._waiting = deque(each for each in self._waiting if not is_meant(each))
        return [each.request.id for each in running]

    def crash(self) -> None:
        """Take note of the engine's death. What ran waits again, first; what ran in two deaths has failed."""
        for active in sorted(self._running.values(), key=lambda each: each.order, reverse=True):
            active.crashes += 1
            if active.crashes >= MAX_CRASHES:
                self._close(active)
                active.ticket.fail(UserError("U010.engine-died-twice", where="the request"))
            else:
                self._waiting.appendleft(active)
        self._running.clear()

    def change_weights(self, weights: str) -> None:
        """Take note that an engine was started with these weights. An answer that began with others has failed."""
        kept: deque[ActiveRequest] = deque()
        for active in self._waiting:
            if active.has_output and active.weights != weights:
                self._close(active)
                active.ticket.fail(UserError("U010.engine-died-weights", where="the request"))
            else:
                active.weights = weights if active.weights else ""
                kept.append(active)
        self._waiting = kept

    def fail_all(self, error: UserError) -> None:
        for active in (*self._running.values(), *self._waiting):
            active.ticket.num_open -= 1
            active.ticket.fail(error)
        self._running.clear()
        self._waiting.clear()

    def _close(self, active: ActiveRequest) -> None:
        active.ticket.num_open -= 1
        self._running.pop(active.request.id, None)
