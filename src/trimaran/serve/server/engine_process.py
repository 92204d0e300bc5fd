"""Starts the processes of an engine, one for each rank, and ends them. Rank 0 talks over a socket pair."""

import asyncio
import contextlib
import json
import logging
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimaran.serve.engine.engine_messages import MAX_MESSAGE_BYTES, dump_message

LOG = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1"
STOP_SECONDS = 10.0


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

    async def wait_any(self) -> None:
        """Return when a rank has ended. The engine is not usable any more then."""
        waits = [asyncio.ensure_future(rank.wait()) for rank in self.ranks]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()

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
    address = f"{LOOPBACK}:{_free_port()}"
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


def _free_port() -> int:
    """Return a port that is free now, for the rendezvous of the ranks."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]
