"""The loop of an engine's process: hears the server, computes a step, sends what is new."""

import json
import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trimaran.core import UserError
from trimaran.serve.engine.batching_engine import BatchingEngine
from trimaran.serve.engine.engine_request import (
    EngineLimits,
    TokenOutput,
    dump_message,
    output_to_json,
    request_from_json,
)
from trimaran.serve.settings import TrainedWeights

LOG = logging.getLogger(__name__)
STATS_SECONDS = 0.25
RECEIVE_BYTES = 1 << 16
LoadWeights = Callable[[TrainedWeights], None]


class ServerGoneError(Exception):
    """The server closed the connection."""


class EngineSocket:
    """The connection to the server: JSON lines both ways."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._buffer = connection, bytearray()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message. The server always reads, so that this does not wait for long."""
        try:
            self._connection.sendall(dump_message(message))
        except OSError:
            raise ServerGoneError from None

    def receive(self, *, wait: bool) -> Iterator[dict[str, Any]]:
        """Yield the messages that have arrived; with `wait` at least one. Raises ServerGoneError at the end."""
        while True:
            try:
                data = self._connection.recv(RECEIVE_BYTES, 0 if wait else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                raise ServerGoneError
            searched = len(self._buffer)
            self._buffer += data
            while (end := self._buffer.find(b"\n", searched)) >= 0:
                line = bytes(self._buffer[:end])
                del self._buffer[: end + 1]
                searched, wait = 0, False
                yield json.loads(line)


class EngineLoop:
    """Serves requests until the server says stop or goes away. `load` changes the weights of the network in place."""

    def __init__(self, engine: BatchingEngine, link: EngineSocket, load: LoadWeights) -> None:
        self._engine, self._link, self._load = engine, link, load
        self._is_stopped = False
        self._stats_time, self._was_busy = 0.0, False

    def run(self) -> None:
        engine, runner = self._engine, self._engine.runner
        limits = EngineLimits(
            max_length=engine.max_length,
            max_sequences=engine.settings.max_running,
            num_pages=runner.num_pages,
            page_size=runner.page_size,
            vocabulary=runner.vocabulary,
        )
        self._link.send({"ready": asdict(limits)})
        self._send([])
        try:
            while not self._is_stopped:
                for message in self._link.receive(wait=not self._engine.has_work):
                    if "add" in message:
                        try:
                            self._engine.add(request_from_json(message["add"]))
                        except UserError as error:
                            self._link.send({"refused": {"request": message["add"]["id"], "error": error.as_dict()}})
                    elif "abort" in message:
                        self._engine.abort(message["abort"])
                    elif "load" in message:
                        self._engine.finish_launched()  # it may compute a token after a stop id
                        assert not self._engine.has_work, "the server waits until nothing runs"
                        self._load(TrainedWeights.from_dict(message["load"]))
                        self._engine.flush_prefixes()
                        self._link.send({"loaded": message["load"]})
                    elif "stop" in message:
                        self._is_stopped = True
                self._send(self._engine.step() if self._engine.has_work else [])
        except ServerGoneError:
            LOG.debug("the server has closed the connection")

    def _send(self, outputs: Sequence[TokenOutput]) -> None:
        """Send outputs, and now and then how busy the engine is; always when it has become idle."""
        message: dict[str, Any] = {"outputs": [output_to_json(each) for each in outputs]} if outputs else {}
        now, is_busy = time.monotonic(), self._engine.has_work
        if now - self._stats_time > STATS_SECONDS or (self._was_busy and not is_busy) or not is_busy:
            self._stats_time = now
            message["stats"] = asdict(self._engine.stats())
        self._was_busy = is_busy
        if message:
            self._link.send(message)
