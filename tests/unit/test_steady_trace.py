"""What the test of the steady state (tests/gpu/test_steady.py) calls waiting, on a trace made by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.steady import MARK, WATCHED, waits_in


def trace_of(folder: Path, *events: dict[str, Any]) -> Path:
    marks = [{"name": MARK, "ph": "X", "ts": 100.0 * each, "dur": 1.0} for each in range(1, WATCHED + 2)]
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": [{"name": "process_name", "ph": "M"}, *marks, *events]}))
    return path


def test_only_what_happens_between_the_first_and_the_last_mark_counts(tmp_path: Path) -> None:
    waits = [{"name": "cudaStreamSynchronize", "ph": "X", "ts": ts, "dur": 5.0} for ts in (50.0, 150.0, 10_000.0)]
    assert waits_in(trace_of(tmp_path, *waits)) == {"cudaStreamSynchronize": 1}


@pytest.mark.parametrize(
    ("name", "size", "waits"),
    [
        ("cudaEventSynchronize", 0, False),
        ("cudaDeviceSynchronize", 0, True),
        ("cudaMemcpyAsync", 1 << 20, False),
        ("Memcpy HtoD (Pinned -> Device)", 1 << 20, False),
        ("Memcpy HtoD (Pageable -> Device)", 64, False),
        ("Memcpy HtoD (Pageable -> Device)", 1 << 20, True),
    ],
)
def test_events_and_copies_that_nobody_waits_for_are_allowed(tmp_path: Path, name: str, size: int, waits: bool) -> None:
    event = {"name": name, "ph": "X", "ts": 250.0, "dur": 1.0, "args": {"bytes": size}}
    assert bool(waits_in(trace_of(tmp_path, event))) == waits


def test_a_trace_without_marks_proves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": []}))
    with pytest.raises(AssertionError, match="no marks"):
        waits_in(path)
