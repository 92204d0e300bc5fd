"""The loop of an engine's process, with steps in flight, over a real pair of sockets."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.engine_models import LateRunner, check_runner, expected_tokens, requests_of
from trimaran.serve import (
    BatchingEngine,
    EngineLoop,
    EngineRequest,
    EngineSettings,
    EngineSocket,
    TokenOutput,
    TrainedWeights,
    dump_message,
    output_from_json,
    request_to_json,
)

PATIENCE = 60.0  # seconds for one message


class Server:
    """The server's end of the connection."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(PATIENCE)
        self._connection, self._lines = connection, connection.makefile("rb")

    def send(self, **message: Any) -> None:
        self._connection.sendall(dump_message(message))

    def read_until(self, is_last: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        """Return the messages up to the first for which `is_last` holds."""
        found: list[dict[str, Any]] = []
        while not found or not is_last(found[-1]):
            found.append(json.loads(self._lines.readline()))
        return found

    def answer(self, request: EngineRequest) -> list[int]:
        """Submit a request, and return its tokens once it has ended."""
        self.send(add=request_to_json(request))
        messages = self.read_until(lambda each: any(one.finish for one in outputs_of(each)))
        return [one.token for each in messages for one in outputs_of(each) if one.token is not None]


def outputs_of(message: dict[str, Any]) -> list[TokenOutput]:
    return [output_from_json(each) for each in message.get("outputs", ())]


@contextmanager
def running(loads: list[TrainedWeights]) -> Iterator[Server]:
    ours, theirs = socket.socketpair()
    engine = BatchingEngine(check_runner(LateRunner(64, 4)), EngineSettings(max_running=4, max_step_tokens=16))
    thread = threading.Thread(target=EngineLoop(engine, EngineSocket(theirs), loads.append).run)
    thread.start()
    server = Server(ours)
    try:
        yield server
        server.send(stop=True)
    finally:
        ours.shutdown(socket.SHUT_WR)
        thread.join(PATIENCE)
        assert not thread.is_alive()
        ours.close()
        theirs.close()


def test_weights_are_loaded_while_the_token_after_a_stop_id_is_in_flight() -> None:
    (request,) = requests_of([(5, 6, 7)], [30])
    whole = expected_tokens(request, 30)
    stopping, loads = replace(request, stop_ids=frozenset({whole[6]})), []
    weights = TrainedWeights(path=Path("/elsewhere"))
    with running(loads) as server:
        for number in range(3):
            found = server.answer(replace(stopping, id=str(number)))
            assert found == whole[: whole.index(whole[6]) + 1]
            server.send(load=weights.as_dict())
            server.read_until(lambda each: "loaded" in each)
        assert server.answer(replace(request, id="last")) == whole
    assert loads == [weights] * 3


def test_an_abort_in_flight_frees_the_pages() -> None:
    first, second = requests_of([(1, 2, 3), (4, 5)], [200, 5])
    with running([]) as server:
        server.send(add=request_to_json(first))
        server.read_until(lambda each: bool(each.get("outputs")))
        server.send(abort=first.id)
        server.read_until(lambda each: each.get("stats", {}).get("used_pages") == 0)
        assert server.answer(second) == expected_tokens(second, 5)
