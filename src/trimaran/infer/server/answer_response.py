"""Sends answers: whole ones and streams. Both end when the client goes away, and free what the engine holds for it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trimaran.core import UserError
from trimaran.infer.server.answer_bodies import AnswerFormat
from trimaran.infer.server.answer_choice import AnswerChoice
from trimaran.infer.server.api_error import dump_json, error_body, error_response, json_response
from trimaran.infer.server.engine_client import EngineClient
from trimaran.infer.server.request_queue import Ticket
from trimaran.infer.server.serving_metrics import ServingMetrics

LOG = logging.getLogger(__name__)
DONE = b"data: [DONE]\n\n"
CLIENT_GONE = 499  # what web servers log for it
MAX_SEND_SECONDS = 120.0  # a client that takes nothing for this long has its connection closed


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingAnswer:
    """A call that the engine works on, and how its answer looks."""

    client: EngineClient
    metrics: ServingMetrics
    ticket: Ticket
    choices: Sequence[AnswerChoice]
    format: AnswerFormat
    fingerprint: Callable[[str], str]

    async def whole(self) -> dict[str, Any]:
        """Return the answer when all of it is there."""
        async for _ in self.deltas():
            pass
        return self.format.whole(self.choices, self.fingerprint(self.ticket.weights))

    async def deltas(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the objects of a stream, as outputs come."""
        begun: set[int] = set()
        while any(not choice.is_finished for choice in self.choices):
            number, output = await self.ticket.next()
            choice = self.choices[number]
            if choice.is_finished:
                continue  # its stop sequence was found; the engine had not heard of it yet
            delta, weights = choice.add(output), self.fingerprint(self.ticket.weights)
            if delta.finish is not None and output.finish is None:
                self.client.cancel_one(self.ticket, number)
            if number not in begun:
                begun.add(number)
                if (first := self.format.begin(number, weights)) is not None:
                    yield first
            if delta.text or delta.tokens or delta.finish:
                yield self.format.part(number, delta, weights)

    def cancel(self) -> None:
        self.client.cancel(self.ticket)


class AnswerResponse(Response):
    """Answers a call: with one object, or with `stream` as server-sent events.

    The first output decides the status: a request that cannot be answered gets its error, not an empty stream.
    """

    def __init__(self, answer: PendingAnswer, *, stream: bool, include_usage: bool = False) -> None:
        super().__init__()
        self._answer, self._stream, self._include_usage = answer, stream, include_usage
        self._path = ""

    def counted(self, path: str) -> "AnswerResponse":
        """Count the answer under this path once its status is known. Returns this response."""
        self._path = path
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        produce = self._send_stream if self._stream else self._send_whole
        gone = asyncio.create_task(_wait_for_disconnect(receive))
        work = asyncio.create_task(produce(scope, receive, send))
        try:
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
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

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = json_response(await self._answer.whole())
        except UserError as error:
            response = self._failed(error)
        self._answer.metrics.observe_answer(self._path, response.status_code)
        await response(scope, receive, send)

    def _failed(self, error: UserError) -> Response:
        self._answer.metrics.observe_error(error.code)
        return error_response(error)

    async def _send_stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts = self._answer.deltas()
        try:
            first = await anext(parts)
        except UserError as error:
            response = self._failed(error)
            self._answer.metrics.observe_answer(self._path, response.status_code)
            await response(scope, receive, send)
            return
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _send_event(send, first)
        try:
            async for part in parts:
                await _send_event(send, part)
            if self._include_usage:
                weights = self._answer.fingerprint(self._answer.ticket.weights)
                await _send_event(send, self._answer.format.last(self._answer.choices, weights))
        except UserError as error:
            self._answer.metrics.observe_error(error.code)
            await _send_event(send, error_body(error))
        except TimeoutError:
            LOG.info("a client took nothing for %.0f s; its connection is closed", MAX_SEND_SECONDS)
            return  # the response is not complete: the server closes the connection
        self._answer.metrics.observe_answer(self._path, 200)
        await send({"type": "http.response.body", "body": DONE, "more_body": False})


async def _send_event(send: Send, body: dict[str, Any]) -> None:
    async with asyncio.timeout(MAX_SEND_SECONDS):
        await send({"type": "http.response.body", "body": b"data: " + dump_json(body) + b"\n\n", "more_body": True})


async def _wait_for_disconnect(receive: Receive) -> None:
    with suppress(asyncio.CancelledError):
        while (await receive())["type"] != "http.disconnect":
            pass
