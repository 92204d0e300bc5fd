"""Sends answers: whole ones and streams. Both end when the client goes away, and free what the engine holds for it."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trimaran.core import UserError
from trimaran.serve.server.answers import AnswerChoice, ChoiceDelta
from trimaran.serve.server.api_error import dump_json, error_body, error_response, json_response
from trimaran.serve.server.engine_client import EngineClient
from trimaran.serve.server.request_queue import Ticket
from trimaran.serve.server.serving_metrics import ServingMetrics

LOG = logging.getLogger(__name__)
DONE = b"data: [DONE]\n\n"
CLIENT_GONE = 499  # what web servers log for it
MAX_SEND_SECONDS = 120.0  # a client that takes nothing for this long has its connection closed
WHOLE_OUTPUTS = 64  # of a whole answer, handled together: nobody waits for them before the last


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingAnswer:
    """A call that the engine works on, and how its answer looks."""

    client: EngineClient
    metrics: ServingMetrics
    ticket: Ticket
    choices: Sequence[AnswerChoice]
    format: Any  # an AnswerFormat; of embeddings only its `whole`
    fingerprint: Callable[[str], str]

    async def whole(self) -> dict[str, Any]:
        """Return the answer when all of it is there. A stop sequence is looked for in each output when it comes."""
        num_awaited = 1 if any(choice.has_stops for choice in self.choices) else WHOLE_OUTPUTS
        while not all(choice.is_finished for choice in self.choices):
            await self._take(num_awaited)
        return self.format.whole(self.choices, self.fingerprint(self.ticket.weights))

    async def events(self, *, include_usage: bool) -> AsyncIterator[bytes]:
        """Yield the events of a stream as outputs come; those of outputs that come together are one piece of bytes."""
        begun: set[int] = set()
        weights, head, is_finished = None, b"", False
        while not is_finished:
            bodies: list[dict[str, Any]] = []
            for number, delta in await self._take(1):
                if number not in begun:
                    begun.add(number)
                    if (first := self.format.begin(number)) is not None:
                        bodies.append(first)
                if delta.text or delta.tokens or delta.finish:
                    bodies.append(self.format.part(number, delta))
            is_finished = all(choice.is_finished for choice in self.choices)
            if include_usage and is_finished:
                bodies.append(self.format.last(self.choices))
            if weights != self.ticket.weights:
                weights = self.ticket.weights
                head = dump_json(self.format.fields(self.fingerprint(weights)))
            if bodies:
                yield b"".join(event_of(each, head) for each in bodies)

    async def _take(self, num_awaited: int) -> list[tuple[int, ChoiceDelta]]:
        """Wait for outputs or an answer's end; return what they add by number. A stopped answer gets no more."""
        added: list[tuple[int, ChoiceDelta]] = []
        for number, new in (await self.ticket.take(num_awaited)).items():
            choice = self.choices[number]
            if choice.is_finished:
                continue
            added.append((number, choice.add(new)))
            if choice.is_finished and new[-1].finish is None:
                self.client.cancel(self.ticket, number)
        return added

    def cancel(self) -> None:
        self.client.cancel(self.ticket)


class AnswerResponse(Response):
    """Answers a call: with one object, or with `stream` as server-sent events.

    The first output decides the status: a request that cannot be answered gets its error, not an empty stream.
    """

    def __init__(
        self,
        answer: PendingAnswer,
        *,
        stream: bool,
        include_usage: bool = False,
        max_send_seconds: float = MAX_SEND_SECONDS,
    ) -> None:
        super().__init__()
        self._max_send_seconds = max_send_seconds
        self._answer, self._stream, self._include_usage = answer, stream, include_usage
        self._path = ""
        self._send_began: float | None = None  # of an event that the client has not taken yet

    def counted(self, path: str) -> "AnswerResponse":
        """Count the answer under this path once its status is known. Returns this response."""
        self._path = path
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_wait_for_disconnect(receive))
        work = asyncio.create_task(self._produce(scope, receive, send))
        try:
            while not gone.done() and not work.done():
                waited = 0.0 if self._send_began is None else time.monotonic() - self._send_began
                if waited >= self._max_send_seconds:
                    break
                left = self._max_send_seconds - waited
                await asyncio.wait({gone, work}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not gone.done() and not work.done():
                # The response is not complete: the HTTP server closes the connection.
                LOG.info("a client took nothing for %.0f s; its connection is closed", self._max_send_seconds)
            elif not work.done():
                self._answer.metrics.disconnects.inc()
                self._answer.metrics.observe_answer(self._path, CLIENT_GONE)
        finally:
            self._answer.cancel()
            for task in (gone, work):
                if not task.done():
                    task.cancel()
            await asyncio.gather(gone, work, return_exceptions=True)
        if not work.cancelled() and (error := work.exception()) is not None:
            raise error

    async def _produce(self, scope: Scope, receive: Receive, send: Send) -> None:
        events, metrics = self._answer.events(include_usage=self._include_usage), self._answer.metrics
        first, response = b"", None
        try:
            if self._stream:
                first = await anext(events)
            else:
                response = json_response(await self._answer.whole())
        except UserError as error:
            metrics.observe_error(error.code)
            response = error_response(error)
        if response is not None:
            metrics.observe_answer(self._path, response.status_code)
            await response(scope, receive, send)
            return
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send_events(send, first)
        try:
            async for each in events:
                await self._send_events(send, each)
        except UserError as error:
            metrics.observe_error(error.code)
            await self._send_events(send, event_of(error_body(error)))
        metrics.observe_answer(self._path, 200)
        await send({"type": "http.response.body", "body": DONE, "more_body": False})

    async def _send_events(self, send: Send, events: bytes) -> None:
        """Send events, and note since when: a timeout for each of them would cost as much as the rest."""
        self._send_began = time.monotonic()
        await send({"type": "http.response.body", "body": events, "more_body": True})
        self._send_began = None


def event_of(body: Mapping[str, Any], head: bytes = b"{}") -> bytes:
    """Return an object as an event. `head` is a JSON object whose fields come before those of `body`."""
    fields = head[1:-1] + b"," if len(head) > 2 else b""
    return b"data: {" + fields + dump_json(body)[1:] + b"\n\n"


async def _wait_for_disconnect(receive: Receive) -> None:
    with suppress(asyncio.CancelledError):
        while (await receive())["type"] != "http.disconnect":
            pass
