"""Requests between the API and the engine: who waits, who runs, and what happens to them when the engine dies."""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from trimaran.core import UserError
from trimaran.infer.engine.engine_request import EngineRequest, TokenOutput
from trimaran.infer.server.api_error import crashed_twice, weights_changed

MAX_CRASHES = 2  # of the engine, while a request runs


class Ticket:
    """The requests of one call: their outputs, each with the number of its request, in the order in which they come.

    The outputs that wait here are bounded: a request has at most `max_tokens` of them.
    """

    def __init__(self, count: int) -> None:
        self._outputs: asyncio.Queue[tuple[int, TokenOutput | UserError]] = asyncio.Queue()
        self.num_open = count
        self.weights = ""

    async def next(self) -> tuple[int, TokenOutput]:
        """Return the next output. Raises UserError if the request cannot be answered."""
        number, item = await self._outputs.get()
        if isinstance(item, UserError):
            raise item
        return number, item

    def put(self, number: int, item: TokenOutput | UserError) -> None:
        self._outputs.put_nowait((number, item))


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
        self._max_waiting, self._on_times = max_waiting, on_times
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
        if self.num_waiting + len(requests) - max(0, free) > self._max_waiting:
            raise UserError("U008", f"the queue is full: {self.num_waiting} requests wait", where="the server",
                            fix="try again after the time in Retry-After, or start a server with a longer --max-queue"
                            )  # fmt: skip
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

    def receive(self, output: TokenOutput) -> None:
        """Hand an output to its call. That of an unknown request is ignored: it was cancelled."""
        active = self._running.get(output.request)
        if active is None:
            return
        now = time.monotonic()
        self._on_times(now - active.last_time, not active.has_output)
        active.last_time, active.has_output = now, True
        if output.token is not None:
            active.generated.append(output.token)
        if output.finish == "error":
            self.refuse(output.request, UserError("U010", f"the engine could not answer: {output.error}",
                        where="the request", fix="send it again; if that fails too, see the server's log"))  # fmt: skip
            return
        if output.finish is not None:
            self._close(active)
        active.ticket.put(active.number, output)

    def refuse(self, request_id: str, error: UserError) -> None:
        """End a request with an error."""
        if active := self._running.get(request_id):
            self._close(active)
            active.ticket.put(active.number, error)

    def cancel(self, ticket: Ticket) -> list[str]:
        """Drop the requests of a call. Returns the ids of those that the engine has, to abort them there."""
        if not ticket.num_open:
            return []
        running = [name for name, each in self._running.items() if each.ticket is ticket]
        for name in running:
            self._close(self._running[name])
        if ticket.num_open:
            kept = [each for each in self._waiting if each.ticket is not ticket]
            ticket.num_open -= len(self._waiting) - len(kept)
            self._waiting = deque(kept)
        return running

    def cancel_one(self, ticket: Ticket, number: int) -> list[str]:
        """Drop one request of a call, whose answer has ended with a stop sequence. Returns the ids to abort."""
        found = [each for each in self._running.values() if each.ticket is ticket and each.number == number]
        waiting = [each for each in self._waiting if each.ticket is ticket and each.number == number]
        for active in (*found, *waiting):
            self._close(active)
        if waiting:
            self._waiting = deque(each for each in self._waiting if each not in waiting)
        return [each.request.id for each in found]

    def crash(self) -> None:
        """Take note of the engine's death. What ran waits again, first; what ran in two deaths has failed."""
        for active in sorted(self._running.values(), key=lambda each: each.order, reverse=True):
            active.crashes += 1
            if active.crashes >= MAX_CRASHES:
                self._close(active)
                active.ticket.put(active.number, crashed_twice())
            else:
                self._waiting.appendleft(active)
        self._running.clear()

    def change_weights(self, weights: str) -> None:
        """Take note that an engine was started with these weights. An answer that began with others has failed."""
        kept: deque[ActiveRequest] = deque()
        for active in self._waiting:
            if active.has_output and active.weights != weights:
                self._close(active)
                active.ticket.put(active.number, weights_changed())
            else:
                active.weights = weights if active.weights else ""
                kept.append(active)
        self._waiting = kept

    def fail_all(self, error: UserError) -> None:
        """End all requests with an error."""
        for active in (*self._running.values(), *self._waiting):
            active.ticket.num_open -= 1
            active.ticket.put(active.number, error)
        self._running.clear()
        self._waiting.clear()

    def _close(self, active: ActiveRequest) -> None:
        active.ticket.num_open -= 1
        self._running.pop(active.request.id, None)
