"""Writes `telemetry/node-N.jsonl`: a sample of a node every few seconds."""

import logging
import time
from pathlib import Path
from typing import Any

from trimaran.run.journal import LineWriter
from trimaran.run.run_directory import RunDirectory
from trimaran.telemetry.host_sampler import HostSampler
from trimaran.telemetry.nvml import GpuSampler

log = logging.getLogger(__name__)

FIRST_SAMPLE_SECONDS = 1.0  # after the start, so that short runs have a sample too
MIN_LAST_SAMPLE_SECONDS = 0.2  # between the last periodic sample and the one at the end


class Sampler:
    """Writes samples of this machine, node `node` of the run. `supervisor` is the process that started the ranks."""

    def __init__(self, run: RunDirectory, node: int, *, supervisor: int, visible: str | None) -> None:
        self.node = node
        self._host, self._gpus = HostSampler(run.path, supervisor=supervisor), GpuSampler(visible)
        self._writer = RetryingWriter(run.samples(node))
        self._last = time.monotonic()

    def take(self) -> dict[str, Any]:
        """Write a sample and return it."""
        self._last = time.monotonic()
        line = {"time": round(time.time(), 3), "node": self.node, **self._host.sample(), "gpus": self._gpus.sample()}
        self._writer.write(line)
        return line

    def take_last(self) -> dict[str, Any] | None:
        """Write a sample at the end of the run, unless one was just written."""
        return self.take() if time.monotonic() - self._last > MIN_LAST_SAMPLE_SECONDS else None

    def close(self) -> None:
        self._gpus.close()


class RetryingWriter:
    """Writes lines to a file, and reopens it after an error. Lines that cannot be written are lost."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: LineWriter | None = None
        self._warned = False

    def write(self, record: dict[str, Any]) -> None:
        try:
            if self._writer is None:
                self._writer = LineWriter(self._path)
            self._writer.write(record)
        except OSError as error:
            if not self._warned:
                log.warning("samples are lost: %s", error)
            if self._writer is not None:
                self._writer.close()
            self._warned, self._writer = True, None
