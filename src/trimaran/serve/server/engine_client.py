"""Keeps an engine running: starts its processes, sends requests, receives outputs, and restarts it when it dies."""

import asyncio
import contextlib
import json
import logging
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimaran.core import UserError
from trimaran.serve.engine.engine_request import (
    MAX_MESSAGE_BYTES,
    EngineLimits,
    EngineRequest,
    dump_message,
    error_from_json,
    output_from_json,
    request_to_json,
)
from trimaran.serve.server.api_error import stopping
from trimaran.serve.server.request_queue import RequestQueue, Ticket
from trimaran.serve.server.serving_metrics import ServingMetrics
from trimaran.serve.settings import RestartPolicy, TrainedWeights

LOG = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """The running ranks of an engine, and the connection to rank 0."""

    ranks: Sequence[asyncio.subprocess.Process]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message. Does nothing if the engine has exited, which the reader notices."""
        with contextlib.suppress(OSError, RuntimeError):
            self.writer.write(dump_message(message))

    async def end(self, *, seconds: float = 0.0) -> list[int]:
        """End all ranks and return their exit codes. They have `seconds` to end by themselves."""
        with contextlib.suppress(OSError, RuntimeError):
            self.writer.close()
        if seconds:
            waits = [asyncio.ensure_future(rank.wait()) for rank in self.ranks]
            await asyncio.wait(waits, timeout=seconds)
        for rank in self.ranks:
            if rank.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    rank.kill()
        return [await rank.wait() for rank in self.ranks]


async def start_engine(config: Mapping[str, Any], *, num_ranks: int) -> EngineProcess:
    """Start the ranks of an engine. They are in their own session: Ctrl-C on the terminal does not reach them."""
    ours, theirs = socket.socketpair()
    with socket.create_server((LOOPBACK, 0)) as probe:  # a port that is free now, for the rendezvous of the ranks
        address = f"{LOOPBACK}:{probe.getsockname()[1]}"
    ranks: list[asyncio.subprocess.Process] = []
    try:
        for rank in range(num_ranks):
            command = [sys.executable, "-m", "trimaran.serve.engine", json.dumps(config)]
            command += [f"--rank={rank}", f"--world={num_ranks}", f"--address={address}"]
            passed = [theirs.fileno()] if rank == 0 else []
            command += [f"--fd={theirs.fileno()}"] if rank == 0 else []
            ranks.append(await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, pass_fds=passed, start_new_session=True))  # fmt: skip
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=MAX_MESSAGE_BYTES)
    except BaseException:
        ours.close()
        for each in ranks:
            each.kill()
        raise
    finally:
        theirs.close()
    return EngineProcess(ranks, reader, writer)


StartEngine = Callable[[TrainedWeights], Awaitable[EngineProcess]]


class EngineClient:
    """The connection to the engine, over its restarts. All methods are called from one event loop.

    `newest_weights` is asked for other weights if those of the dead engine cannot be loaded any more. It gets the steps
    that failed to load.
    """

    def __init__(
        self, start: StartEngine, weights: TrainedWeights, queue: RequestQueue, metrics: ServingMetrics,
        policy: RestartPolicy | None = None
    ) -> None:  # fmt: skip
        self._start, self._queue, self._metrics = start, queue, metrics
        self._policy = policy or RestartPolicy()
        self.newest_weights: Callable[[Collection[int | None]], TrainedWeights | None] = lambda _: None
        self.weights, self.limits = weights, None
        self._process: EngineProcess | None = None
        self._is_ready, self._is_stopping = False, False
        self._pending: tuple[TrainedWeights, asyncio.Future[bool]] | None = None
        self._is_loading = False
        self._last_heard = 0.0

    limits: EngineLimits | None

    @property
    def is_ready(self) -> bool:
        return self._is_ready and not self._is_stopping

    @property
    def num_unanswered(self) -> int:
        return self._queue.num_waiting + self._queue.num_running

    async def start(self) -> EngineLimits:
        """Start the engine and return its limits. Raises UserError with the engine's own mistake if it has one.

        A checkpoint that training removed before it was loaded is replaced by the newest one.
        """
        while True:
            try:
                self._process, self.limits = await self._start_once()
                break
            except UserError:
                newest = self.newest_weights(())
                if newest is None or newest.path == self.weights.path:
                    raise
                LOG.warning("%s was removed before it was loaded; %s is tried", self.weights.path, newest.path)
                self.weights = newest
        self._is_ready = True
        self._metrics.set_gauges(ready=1, pages=self.limits.num_pages)
        return self.limits

    async def run(self) -> None:
        """Hear the engine and restart it until `stop`. Returns earlier if it cannot be started any more."""
        while not self._is_stopping:
            assert self._process is not None, "run follows start"
            codes = await self._hear(self._process)
            self._is_ready = False
            self._metrics.set_gauges(ready=0)
            if self._is_stopping:
                return
            LOG.warning("the engine died (exit codes %s); it is started again", codes)
            self._metrics.set_gauges(used_pages=0)
            self._metrics.restarts.inc()
            self._queue.crash()
            self._drop_load()
            if not await self._restart():
                self._queue.fail_all(UserError("U009.engine-cannot-started", where="the server"))
                return

    async def stop(self) -> None:
        """End the engine. Requests that are left fail."""
        self._is_stopping, self._is_ready = True, False
        self._queue.fail_all(stopping())
        self._drop_load()
        if self._process is not None:
            self._process.send({"stop": True})
            await self._process.end(seconds=self._policy.stop_seconds)

    def measure(self) -> None:
        """Set the gauges of the queue, which change too often to be set at every change."""
        self._metrics.set_gauges(waiting_requests=self._queue.num_waiting, running_requests=self._queue.num_running)

    def check_count(self, count: int) -> None:
        """Raise UserError if a call of so many requests could not even be taken by an idle server."""
        most = self._queue.max_waiting + (self.limits.max_sequences if self.limits else 0)
        if count > most:
            raise UserError("U024.call-requests-most", where="the request", count=count, most=most)

    def submit(self, requests: Sequence[EngineRequest]) -> Ticket:
        """Add the requests of a call. Raises UserError if the server stops or the queue is full."""
        if self._is_stopping:
            raise stopping()
        free = 0
        if self._is_ready and self._pending is None and self.limits is not None:
            free = self.limits.max_sequences - self._queue.num_running
        ticket = self._queue.submit(requests, free=free)
        self._dispatch()
        return ticket

    def cancel(self, ticket: Ticket, number: int | None = None) -> None:
        """Abort what is left of a call, or of one of its requests, and free its pages."""
        for name in self._queue.cancel(ticket, number):
            if self._process is not None:
                self._process.send({"abort": name})
        self._dispatch()

    async def load(self, weights: TrainedWeights) -> bool:
        """Change the weights when every running answer has ended; new requests wait. Returns whether it worked."""
        assert self._pending is None, "one change at a time"
        self._pending = (weights, asyncio.get_running_loop().create_future())
        loaded = self._pending[1]
        self._dispatch()
        return await loaded

    def _dispatch(self) -> None:
        """Send what the engine can take: requests, or the change of weights once nothing runs."""
        if not self._is_ready or self._process is None or self.limits is None or self._is_loading:
            return
        free = self.limits.max_sequences - self._queue.num_running
        for active in self._queue.take(free, self.weights.label, only_begun=self._pending is not None):
            self._process.send({"add": request_to_json(active.remaining)})
        if self._pending is not None and not self._queue.num_running and not self._queue.has_begun:
            self._is_loading = True
            self._process.send({"load": self._pending[0].as_dict()})

    async def _hear(self, process: EngineProcess) -> list[int]:
        """Handle messages until the engine has exited, and return the exit codes. No message follows."""
        reading = asyncio.create_task(self._read(process))
        ended = [asyncio.ensure_future(rank.wait()) for rank in process.ranks]
        self._last_heard = time.monotonic()
        try:
            while not any(each.done() for each in (reading, *ended)):
                await asyncio.wait({reading, *ended}, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                silent = time.monotonic() - self._last_heard
                if self._queue.num_running and silent > self._policy.stall_seconds:
                    LOG.error("the engine has work and sent no message for %.0f s; it is killed", silent)
                    break
            codes = await process.end(seconds=self._policy.stop_seconds if self._is_stopping else 0.0)
            await asyncio.wait({reading}, timeout=5.0)  # what it sent before it died
            return codes
        finally:
            for task in (reading, *ended):
                task.cancel()
            await asyncio.gather(reading, *ended, return_exceptions=True)

    async def _read(self, process: EngineProcess) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while line := await process.reader.readline():
                if not line.endswith(b"\n"):
                    return  # it died inside a message
                self._last_heard = time.monotonic()
                message = json.loads(line)
                if outputs := message.get("outputs"):
                    self._queue.receive([output_from_json(each) for each in outputs])
                if refused := message.get("refused"):
                    self._queue.refuse(refused["request"], error_from_json(refused["error"]))
                if stats := message.get("stats"):
                    self._metrics.set_gauges(used_pages=stats["used_pages"], pages=stats["num_pages"])
                    self._metrics.add_counts(stats)
                if "loaded" in message and self._pending is not None:
                    self.weights, loaded = self._pending
                    self._pending, self._is_loading = None, False
                    self._metrics.weight_changes.inc()
                    if not loaded.done():
                        loaded.set_result(True)
                self._dispatch()

    async def _restart(self) -> bool:
        """Start the engine again, after pauses. Returns whether it runs."""
        pause, failed = self._policy.first_pause, set[int | None]()
        for _ in range(self._policy.max_failures):
            await asyncio.sleep(pause)
            pause = min(2 * pause, self._policy.longest_pause)
            if self._is_stopping:
                return False
            try:
                self._process, self.limits = await self._start_once()
            except UserError as error:
                LOG.error("the engine cannot be started: %s", error)
                failed.add(self.weights.step)
                self.weights = self.newest_weights(failed) or self.weights
                continue
            self._queue.change_weights(self.weights.label)
            self._is_ready = True
            self._metrics.set_gauges(ready=1)
            self._dispatch()
            return True
        return False

    async def _start_once(self) -> tuple[EngineProcess, EngineLimits]:
        process = await self._start(self.weights)
        try:
            line = await process.reader.readline()
            message = json.loads(line) if line.endswith(b"\n") else {}
        except BaseException:
            await process.end()
            raise
        if "ready" in message:
            return process, EngineLimits(**message["ready"])
        codes = await process.end()
        if "failed" in message:
            raise error_from_json(message["failed"])
        raise UserError("U012.engine-ended-while", where="the engine", codes=codes)

    def _drop_load(self) -> None:
        """Forget a change of weights that died with the engine; one that had not begun stays."""
        if self._pending is not None and (self._is_loading or self._is_stopping):
            if not self._pending[1].done():
                self._pending[1].set_result(False)
            self._pending = None
        self._is_loading = False
