"""Which calls tests/gpu/test_steady.py counts as synchronisation, on hand-written traces."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.steady import MARK, PROFILED_STEPS, count_waits


def trace_of(folder: Path, *events: dict[str, Any]) -> Path:
    marks = [{"name": MARK, "ph": "X", "ts": 100.0 * each, "dur": 1.0} for each in range(1, PROFILED_STEPS + 2)]
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": [{"name": "process_name", "ph": "M"}, *marks, *events]}))
    return path


def test_only_calls_between_the_first_and_the_last_mark_count(tmp_path: Path) -> None:
    waits = [{"name": "cudaStreamSynchronize", "ph": "X", "ts": ts, "dur": 5.0} for ts in (50.0, 150.0, 10_000.0)]
    assert count_waits(trace_of(tmp_path, *waits)) == {"cudaStreamSynchronize": 1}


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
def test_events_and_copies_that_do_not_block_are_allowed(tmp_path: Path, name: str, size: int, waits: bool) -> None:
    event = {"name": name, "ph": "X", "ts": 250.0, "dur": 1.0, "args": {"bytes": size}}
    assert bool(count_waits(trace_of(tmp_path, event))) == waits


def test_a_trace_without_marks_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": []}))
    with pytest.raises(AssertionError, match="no marks"):
        count_waits(path)
