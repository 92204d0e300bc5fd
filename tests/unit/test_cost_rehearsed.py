"""The cost model beside ranks of 27 multi-GPU plans that were rehearsed on one H200."""

import json
from pathlib import Path
from statistics import median

import benchmarks
from benchmarks.rehearsals import with_prediction

LINES = [json.loads(line) for line in (Path(benchmarks.__path__[0]) / "h200_rehearsals.jsonl").read_text().splitlines()]
# Stages whose micro-batches wait for their weight gradients, or for the other stages of the rank; and two others.
KNOWN_PEAK_ERRORS = {"pp4-8b-zero-bubble": 0.18, "pp4-8b-interleaved": 0.08, "tp4-fsdp8-70b-full": 0.06,
                     "tp8-pp4-70b-first": 0.06}  # fmt: skip


def test_peaks_and_compute_of_rehearsed_ranks_are_predicted() -> None:
    assert len(LINES) == 27
    errors = {line["name"]: with_prediction(line)["error"] for line in LINES}
    peaks = {name: abs(error["peak"]) for name, error in errors.items()}
    assert {name for name, error in peaks.items() if error > KNOWN_PEAK_ERRORS.get(name, 0.03)} == set()
    assert median(peaks.values()) < 0.01
    compute = sorted(abs(error["compute"]) for error in errors.values())
    assert median(compute) < 0.05
    assert compute[-1] < 0.09
