"""Runs a function on ranks, forked from a process that has torch imported: a run starts in 0.1 s instead of 10 s."""

import contextlib
import os
import pickle
import random
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import IO, Any

from tests.forked import Forked, call


@dataclass
class Rank:
    """A forked rank, the pipe that its pickled result comes through, and a file for its native stacks."""

    process: Forked
    pipe: IO[bytes]
    stacks: IO[bytes]

    def result(self) -> Any:
        """Return the result of a rank whose pipe is readable; fail with its error."""
        result = None
        try:
            result, error = pickle.load(self.pipe)  # not up to its end: children of the rank keep it open
        except EOFError:
            self.stacks.seek(0)
            error = f"died without a result, exit code {self.process.wait(5.0)}\n{self.stacks.read().decode()}"
        assert error is None, error
        return result


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """Return the results of `function(*args)` on `world_size` forked ranks, each with a launcher's environment.

    Ranks know nothing that this process has changed in modules: function, arguments and results are pickled. If a rank
    raises, dies or takes longer than `timeout` seconds, the test fails and all ranks are killed.
    """
    port = free_port()
    with contextlib.ExitStack() as files:
        ranks = [_start(rank, world_size, port, function, args, files) for rank in range(world_size)]
        try:
            return _collect(ranks, timeout)
        finally:
            for rank in ranks:
                rank.process.kill()
            for rank in ranks:
                rank.process.wait()


def _start(
    rank: int,
    world_size: int,
    port: int,
    function: Callable[..., Any],
    args: Sequence[Any],
    files: contextlib.ExitStack,
) -> Rank:
    launched = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    pipe = files.enter_context(os.fdopen(ours, "rb"))
    stacks = files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  the stack closes it
    try:
        process = call(function, args, os.environ | launched, theirs, stacks.fileno())
    finally:
        os.close(theirs)  # so that a rank that dies closes its end
    return Rank(process, pipe, stacks)


def _collect(ranks: Sequence[Rank], timeout: float) -> list[Any]:
    answers: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while left := {rank.pipe.fileno(): number for number, rank in enumerate(ranks) if number not in answers}:
        ready = wait([*left], max(0.0, deadline - time.monotonic()))
        assert ready, f"ranks {sorted(left.values())} are silent for {timeout} s"
        for pipe in ready:
            assert isinstance(pipe, int)
            number = left[pipe]
            try:
                answers[number] = ranks[number].result()
            except AssertionError as error:
                raise AssertionError(f"rank {number}: {error}") from None
        deadline = time.monotonic() + timeout
    return [answers[number] for number in range(len(ranks))]


def free_port() -> int:
    """Return a free port outside the ephemeral range: a busy machine might assign one of those before rank 0 binds."""
    while True:
        port = random.SystemRandom().randrange(16_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
