"""A sink: a table of the steps, for a spreadsheet. `telemetry: {sinks: {csv: {file: steps.csv}}}`."""

import csv
from collections.abc import Mapping
from typing import Any

from trimaran.runs import RunDirectory

COLUMNS = ("step", "loss", "grad_norm", "lr", "tokens", "step_seconds")


class CsvSink:
    name = "csv"

    def __init__(self, run: RunDirectory, name: str) -> None:
        self._file = (run.path / name).open("a", newline="")
        self._rows = csv.DictWriter(self._file, COLUMNS, extrasaction="ignore")
        if not self._file.tell():
            self._rows.writeheader()

    def step(self, line: dict[str, Any]) -> None:
        self._rows.writerow(line)
        self._file.flush()

    def event(self, line: dict[str, Any]) -> None: ...

    def incident(self, line: dict[str, Any]) -> None: ...

    def sample(self, line: dict[str, Any]) -> None: ...

    def close(self) -> None:
        self._file.close()


class CsvPlugin:
    contract = 1

    def open(self, run: RunDirectory, options: Mapping[str, Any]) -> CsvSink:
        return CsvSink(run, options.get("file", "steps.csv"))
