"""Ranks in worker processes forked out of one that has torch imported: 0.1 s instead of 10 s a run."""

import contextlib
import os
import random
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

# What the ranks need is imported here, once, before any of them is forked.
import torch
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.multiprocessing as multiprocessing


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """Return what `function(*args)` answers in each of `world_size` forked ranks with a launcher's environment.

    A rank that raises, dies or outlasts `timeout` fails the test, and takes the others with it.
    """
    context = multiprocessing.get_context("fork")
    port = _free_port()
    pipes, processes = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(rank, world_size, port, theirs, function, args))
        process.start()
        theirs.close()  # so that a rank that dies closes its end
        pipes.append(ours)
        processes.append(process)
    try:
        return _collect(pipes, processes, timeout)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(pipes: list[Connection], processes: list[Any], timeout: float) -> list[Any]:
    answers: dict[int, Any] = {}
    while left := [pipe for rank, pipe in enumerate(pipes) if rank not in answers]:
        ready = wait(left, timeout)
        assert ready, f"ranks {[rank for rank in range(len(pipes)) if rank not in answers]} are silent for {timeout} s"
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                answers[rank], error = pipe.recv()
            except EOFError:
                processes[rank].join(1.0)
                error = f"died without a word, exit code {processes[rank].exitcode}"
            assert error is None, f"rank {rank}: {error}"
    return [answers[rank] for rank in range(len(pipes))]


def _rank(
    rank: int, world_size: int, port: int, pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    try:
        pipe.send((function(*args), None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
    finally:
        parent = os.getppid()
        while os.getppid() == parent:  # until it ends us: others may still need the store, which rank 0 holds
            time.sleep(0.02)
        os._exit(0)  # pytest's own exit handlers belong to the parent


def _free_port() -> int:
    """Return a port that nobody listens at. It is none of those that the system gives to whoever connects somewhere:
    on a busy machine such a one may be gone before rank 0 listens there."""
    while True:
        port = random.SystemRandom().randrange(16_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
