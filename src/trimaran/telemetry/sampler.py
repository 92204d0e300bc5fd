"""Lines of `telemetry/node-N.jsonl`: how a machine of the run was doing, every few seconds."""

import logging
import time
from pathlib import Path
from typing import Any

from trimaran.run.journal import LineWriter
from trimaran.run.run_directory import RunDirectory
from trimaran.telemetry.host_sampler import HostSampler
from trimaran.telemetry.nvml import Gpus

log = logging.getLogger(__name__)

FIRST_SECONDS = 1.0  # after the start: also a short run has a sample
LEAST_SECONDS = 0.2  # between the last sample and one at the end


class Sampler:
    """Writes samples of this machine, node `node` of the run. `supervisor` is the process whose ranks are looked at."""

    def __init__(self, run: RunDirectory, node: int, *, supervisor: int, visible: str | None) -> None:
        self.node = node
        self._host, self._gpus = HostSampler(run.path, supervisor=supervisor), Gpus(visible)
        self._lines = PatientWriter(run.samples(node))
        self._last = time.monotonic()

    def take(self) -> dict[str, Any]:
        """Write a sample, and return it."""
        self._last = time.monotonic()
        line = {"time": round(time.time(), 3), "node": self.node, **self._host.sample(), "gpus": self._gpus.sample()}
        self._lines.write(line)
        return line

    def take_last(self) -> dict[str, Any] | None:
        """Write how it was at the end, unless that has just been done."""
        return self.take() if time.monotonic() - self._last > LEAST_SECONDS else None

    def close(self) -> None:
        self._gpus.close()


class PatientWriter:
    """Lines for a file that perhaps cannot be opened yet, or not any more. What cannot be written is lost."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: LineWriter | None = None
        self._told = False

    def write(self, record: dict[str, Any]) -> None:
        try:
            if self._writer is None:
                self._writer = LineWriter(self._path)
            self._writer.write(record)
        except OSError as error:
            if not self._told:
                log.warning("samples are lost: %s", error)
            if self._writer is not None:
                self._writer.close()
            self._told, self._writer = True, None
