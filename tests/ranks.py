"""Runs a function on forked ranks. The parent has torch imported, so a run starts in 0.1 s instead of 10 s."""

import contextlib
import faulthandler
import gc
import os
import random
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from multiprocessing.connection import Connection, wait
from typing import IO, Any

# Imported here once, before any rank is forked.
import torch
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.multiprocessing as multiprocessing
from tqdm import tqdm

from trimaran.train.process.fork_server import LAZY_MODULES

for _name in LAZY_MODULES:  # which ranks import when they need them
    import_module(_name)
tqdm.monitor_interval = 0  # no thread of its own, which lives to the end of the process


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """Return the results of `function(*args)` on `world_size` forked ranks, each with a launcher's environment.

    If a rank raises, dies or takes longer than `timeout` seconds, the test fails and all ranks are killed. What a rank
    was doing when native code crashed is part of the failure; the native stacks are on its standard error.
    """
    context = multiprocessing.get_context("fork")
    port = _free_port()
    pipes, processes = [], []
    with contextlib.ExitStack() as files:
        stacks = [files.enter_context(tempfile.TemporaryFile()) for _ in range(world_size)]
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(rank, world_size, port, theirs, stacks[rank], function, args))
            process.start()
            theirs.close()  # so that a rank that dies closes its end
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, processes, stacks, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Connection], processes: list[Any], stacks: Sequence[IO[bytes]], timeout: float) -> list[Any]:
    answers: dict[int, Any] = {}
    while left := [pipe for rank, pipe in enumerate(pipes) if rank not in answers]:
        ready = wait(left, timeout)
        assert ready, f"ranks {[rank for rank in range(len(pipes)) if rank not in answers]} are silent for {timeout} s"
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pipes.index(pipe)
            try:
                answers[rank], error = pipe.recv()
            except EOFError:
                processes[rank].join(1.0)
                stacks[rank].seek(0)
                error = f"died without a result, exit code {processes[rank].exitcode}\n{stacks[rank].read().decode()}"
            assert error is None, f"rank {rank}: {error}"
    return [answers[rank] for rank in range(len(pipes))]


def _rank(
    rank: int,
    world_size: int,
    port: int,
    pipe: Connection,
    stacks: IO[bytes],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    parent = os.getppid()
    # A garbage collection among the objects of the parent takes a second and copies their pages.
    gc.freeze()
    gc.unfreeze = lambda: None  # which a change of the plan calls, for the sake of CUDA graphs
    faulthandler.enable(stacks)
    # Threads of gloo crash without a Python stack. This prints those of all threads, then calls faulthandler.
    torch._C._set_print_stack_traces_on_fatal_signal(True)
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
        while os.getppid() == parent:  # until the parent kills it: other ranks may still need rank 0's store
            time.sleep(0.02)
        os._exit(0)  # without pytest's exit handlers


def _free_port() -> int:
    """Return a free port outside the ephemeral range: a busy machine might assign one of those before rank 0 binds."""
    while True:
        port = random.SystemRandom().randrange(16_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
