"""Runs a server until it is asked to stop: HTTP, the engine, and the checkpoints of a run that it follows."""

import asyncio
import contextlib
import gc
import logging
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from types import FrameType
from typing import Any

import uvicorn

from trimaran.checkpoint import DamagedError, complete_steps, looks_complete, refuse_damaged_weights, step_path
from trimaran.core import UserError
from trimaran.runs import RunDirectory
from trimaran.serve.server.access import LOCAL_NAMES, AccessMiddleware, Application
from trimaran.serve.server.api import ApiModel, OpenAiApi
from trimaran.serve.server.api_error import error_response
from trimaran.serve.server.calls import PromptReader
from trimaran.serve.server.connection_guard import MAX_CONNECTIONS, ConnectionGuard, guarded_http, limits_of_process
from trimaran.serve.server.engine_client import EngineClient, EngineProcess, start_engine
from trimaran.serve.server.request_queue import RequestQueue
from trimaran.serve.server.serving_metrics import ServingMetrics
from trimaran.serve.settings import EngineConfig, ServerSettings, TrainedWeights
from trimaran.serve.trained_model import open_texts

LOG = logging.getLogger(__name__)
LOOPBACK = ("127.0.0.1", "localhost", "::1")
CLOSE_SECONDS = 5.0
# Longer than clients usually keep an idle connection: a request that crosses a close on its way is lost.
KEEP_ALIVE_SECONDS = 75
EXIT_ENGINE_GONE = 1


def newest_weights(run: RunDirectory, *, besides: Collection[int | None] = ()) -> TrainedWeights | None:
    """Return the newest complete checkpoint of a run, other than those of the steps `besides`; None if it has none."""
    step = max((each for each in complete_steps(run.checkpoints) if each not in besides), default=None)
    if step is None or not looks_complete(path := step_path(run.checkpoints, step)):
        return None
    return TrainedWeights(path=path, run=run, step=step)


def damage_of(weights: TrainedWeights) -> str:
    """Return what checksums say is wrong with a checkpoint's weights, not its optimizer; empty if nothing is."""
    try:
        refuse_damaged_weights(weights.path, num_threads=1)
    except DamagedError as error:
        return "; ".join(f"{each.file} {each.what}" for each in error.damages[:3])
    except (UserError, OSError) as error:
        return str(error)
    return ""


async def follow_run(run: RunDirectory, client: EngineClient, *, after: int, seconds: float = 1.0) -> None:
    """Load the newest checkpoint after step `after`, until cancelled. One that fails is not tried again."""
    while True:
        await asyncio.sleep(seconds)
        found = await asyncio.to_thread(newest_weights, run)
        if found is None or found.step is None or found.step <= max(after, client.weights.step or 0):
            continue
        after = found.step
        if damage := await asyncio.to_thread(damage_of, found):
            LOG.warning("the checkpoint of step %d is damaged and is not loaded: %s", after, damage)
        elif await client.load(found):
            LOG.info("the weights of step %d answer from now on", after)
        else:
            LOG.warning("the weights of step %d could not be loaded", after)


class DrainingServer(uvicorn.Server):
    """A uvicorn server that finishes running requests when it is asked to stop. A second signal stops it at once."""

    on_signal: Callable[[], object] = staticmethod(lambda: None)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take note of a signal. It is not raised again at the end, so that a drained server exits with 0."""
        self.on_signal()


class Server:
    """The parts of one server. `run` runs them."""

    def __init__(self, config: EngineConfig, settings: ServerSettings) -> None:
        self._config, self._settings = config, settings
        self.metrics = ServingMetrics()
        queue = RequestQueue(max_waiting=settings.max_queue, on_times=self.metrics.observe_output)
        self.client = EngineClient(self._start_engine, config.weights, queue, self.metrics, settings.policy)
        if (run := config.weights.run) is not None and settings.follow_after is not None:
            self.client.newest_weights = lambda failed: newest_weights(run, besides=failed)
        # Tokenizers have state: prompts are encoded in a thread, and answers are decoded in the event loop.
        texts, encoding = open_texts(config.weights), open_texts(config.weights)
        model = ApiModel(name=settings.name, adapters=tuple(config.adapters), texts=texts, created=int(time.time()))
        self.api = OpenAiApi(model, PromptReader(encoding), self.client, self.metrics)
        application = AccessMiddleware(
            self.api.application(), token=settings.token, hosts=LOCAL_NAMES if settings.host in LOOPBACK else None,
            max_body_bytes=settings.max_body_bytes, on_refusal=self._count_refusal,
        )  # fmt: skip
        limits = limits_of_process(settings.max_client_connections)
        guard = ConnectionGuard(limits, error_response, self._count_refusal)
        self._http = DrainingServer(http_config(application, guard))
        self._stop_now = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None

    async def run(self, listening: socket.socket, on_start: Callable[[str], None]) -> int:
        """Serve until a signal. `on_start` gets the name of the weights when they answer. Returns the exit code.

        Raises UserError if the engine cannot be started the first time.
        """
        loop = asyncio.get_running_loop()
        self._http.on_signal = lambda: loop.call_soon_threadsafe(self._begin_drain)
        http = asyncio.create_task(self._http.serve(sockets=[listening]))
        starting = asyncio.create_task(self.client.start())
        others: list[asyncio.Task[Any]] = []
        try:
            await asyncio.wait({http, starting}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                return 0  # a signal came before the engine was ready
            starting.result()
            engine = asyncio.create_task(self.client.run())
            others = [engine]
            run, after = self._config.weights.run, self._settings.follow_after
            if run is not None and after is not None:
                following = follow_run(run, self.client, after=after, seconds=self._settings.follow_seconds)
                others.append(asyncio.create_task(following))
            on_start(self.client.weights.label)
            await asyncio.wait({http, engine}, return_when=asyncio.FIRST_COMPLETED)
            return 0 if self._draining is not None else EXIT_ENGINE_GONE
        finally:
            for task in (starting, *others):
                task.cancel()
            await asyncio.gather(starting, *others, return_exceptions=True)
            await self.client.stop()
            self._http.should_exit = True
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(http, 2 * CLOSE_SECONDS)
            self.api.close()

    def _count_refusal(self, error: UserError) -> None:
        self.metrics.observe_error(error.code)

    async def _start_engine(self, weights: TrainedWeights) -> EngineProcess:
        config = replace(self._config, weights=weights)
        return await start_engine(config.as_dict(), num_ranks=config.num_ranks)

    def _begin_drain(self) -> None:
        """Refuse new requests and finish the running ones; called again, stop at once."""
        if self._draining is None:
            self.api.is_draining = True
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        else:
            self._stop_now.set()

    async def _drain(self) -> None:
        LOG.info("stopping: %d requests are not answered yet", self.client.num_unanswered)
        stopped = asyncio.create_task(self._stop_now.wait())
        end = time.monotonic() + self._settings.drain_seconds
        while self.client.num_unanswered and time.monotonic() < end and not stopped.done():
            await asyncio.wait({stopped}, timeout=0.05)
        stopped.cancel()
        await self.client.stop()
        self._http.should_exit = True


def http_config(application: Application, guard: ConnectionGuard) -> uvicorn.Config:
    return uvicorn.Config(
        application,
        http=guarded_http(guard),
        h11_max_incomplete_event_size=guard.limits.h11_bytes,
        access_log=False,
        log_level="warning",
        lifespan="off",
        proxy_headers=False,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=int(CLOSE_SECONDS),
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        ws="none",
    )


def serve(
    config: EngineConfig, settings: ServerSettings, listening: socket.socket, on_start: Callable[[str], None]
) -> int:
    """Serve until SIGTERM or SIGINT, and return the exit code."""

    async def run() -> int:
        server = Server(config, settings)
        gc.freeze()  # a collection among the objects of the libraries would be a pause for every request
        return await server.run(listening, on_start)

    with asyncio.Runner(loop_factory=uvicorn.Config("").get_loop_factory()) as runner:
        return runner.run(run())
