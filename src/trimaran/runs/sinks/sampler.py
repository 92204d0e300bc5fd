"""Writes `telemetry/node-N.jsonl`: a sample of a node every few seconds."""

import logging
import time
from typing import Any

from trimaran.machine.gpus import GpuSampler
from trimaran.runs.heartbeat import HeartbeatBoard
from trimaran.runs.line_files import LineWriter
from trimaran.runs.run_directory import RunDirectory
from trimaran.runs.sinks.host_sampler import HostSampler

log = logging.getLogger(__name__)

FIRST_SAMPLE_SECONDS = 1.0  # after the start, so that short runs have a sample too
MIN_LAST_SAMPLE_SECONDS = 0.2  # between the last periodic sample and the one at the end


class Sampler:
    """Writes samples of this machine, node `node` of the run. `supervisor` is the process that started the ranks.

    `board` has the heartbeats of the ranks on this machine.
    """

    def __init__(
        self,
        run: RunDirectory,
        node: int,
        *,
        supervisor: int,
        visible: str | None,
        board: HeartbeatBoard | None = None,
        writer: LineWriter | None = None,
    ) -> None:
        self.node, self._board = node, board
        self._host, self._gpus = HostSampler(run.path, supervisor=supervisor), GpuSampler(visible)
        self._writer = writer or LineWriter(run.samples(node))  # keeps samples in memory while the disk is full
        self._warned = False
        self._last = time.monotonic()

    def take(self) -> dict[str, Any]:
        """Write a sample and return it."""
        self._last = time.monotonic()
        host = self._host.sample()
        if self._board is not None:
            add_heartbeats(host["ranks"], self._board)
        line = {"time": round(time.time(), 3), "node": self.node, **host, "gpus": self._gpus.sample()}
        try:
            self._writer.write(line)
        except OSError as error:  # such as a missing permission
            if not self._warned:
                log.warning("samples are lost: %s", error)
            self._warned = True
        return line

    def take_last(self) -> dict[str, Any] | None:
        """Write a sample at the end of the run, unless one was just written."""
        return self.take() if time.monotonic() - self._last > MIN_LAST_SAMPLE_SECONDS else None

    def close(self) -> None:
        self._gpus.close()
        self._writer.close()


def add_heartbeats(ranks: dict[str, dict[str, Any]], board: HeartbeatBoard) -> None:
    """Add to each rank what it does, its step, and the seconds since its last progress and its last heartbeat."""
    now, first = time.monotonic(), board.first_rank
    for rank, found in ranks.items():
        if 0 <= (row := int(rank) - first) < board.num_ranks:
            beat = board.read(row)
            found |= {"section": beat.section, "step": beat.step, "progress_seconds": round(now - beat.entered, 2),
                      "heartbeat_seconds": round(now - beat.alive, 2)}  # fmt: skip
