"""The doctor against gradients that travel in pieces of the wrong size: F010."""

from pathlib import Path
from statistics import median

import pytest

from tests.doctoring import findings, in_slow_network, measured, mended, recipe_of, train
from tests.fault.harness import Supervised, lines
from trimaran.core import EXIT_DONE
from trimaran.doctor.predicted_gain import settings_of
from trimaran.doctor.rules.speed.bucket import IDLE
from trimaran.run import RunDirectory

pytestmark = pytest.mark.chaos


def test_pieces_that_are_too_small_are_found_and_larger_ones_help(tmp_path: Path) -> None:
    """Eight ranks pass each piece on fourteen times, which takes longer than its bytes do."""
    recipe = recipe_of(
        "cluster=8xcpu", "plan.mesh.dp_replicate=8", "plan.micro_batch=1", "plan.grad_accum=1", "train.global_batch=8",
        "data.seq_len=16", "train.steps=17", "model.shape={layers: 16, hidden: 128, heads: 4, kv_heads: 4, ffn: 512}",
        "plan.comm.bucket_mb=1", "checkpoint.memory=0",
    )  # fmt: skip
    small = train(recipe, tmp_path / "small")
    found = findings(small)["F010"]
    assert found.culprit == "plan.comm.bucket_mb=1"
    assert found.evidence["pieces"] == 17
    assert "too small" in found.verdict
    assert found.patch["plan.comm.bucket_mb"] >= 10
    large = train(mended(recipe, found), tmp_path / "large")
    assert "F010" not in findings(large)
    assert measured(large).step < measured(small).step


LARGE = (
    "model.shape={layers: 8, hidden: 128, heads: 4, kv_heads: 4, ffn: 512}", "data.seq_len=16", "train.global_batch=2",
    "plan.micro_batch=1", "plan.grad_accum=1", "train.steps=20", "train.save=false", "checkpoint.every=0",
    "checkpoint.memory=0", "telemetry.sample_seconds=1",
)  # fmt: skip


def paused(path: Path, *settings: str) -> RunDirectory:
    """Train with two ranks whose layers take 80 ms for a backward, in which they need no core."""
    extra = {"TRIMARAN_TEST_PLUGIN": "tests.fault.dips", "TRIMARAN_TEST_DIPS": "0 0.08 0 0"}
    with Supervised.start(path, *LARGE, *settings, extra=extra) as sailing:
        assert sailing.wait(120) == EXIT_DONE
    return sailing.run


def test_one_piece_that_hides_behind_nothing_is_found_and_smaller_ones_help(tmp_path: Path) -> None:
    """On a slow network the gradients of the last layers could travel while those of the first are computed."""
    whole = in_slow_network("400mbit", paused, tmp_path / "whole", "plan.comm.bucket_mb=100")
    if median(each["cpu"] for each in lines(whole.samples(0)) if "cpu" in each) > IDLE:
        pytest.skip("other processes use the cores, so nothing would be hidden")
    found = findings(whole)["F010"]
    assert found.culprit == "plan.comm.bucket_mb=100"
    assert "too large: the last piece hides behind nothing" in found.verdict
    assert found.patch["plan.comm.bucket_mb"] <= 2
    pieces = in_slow_network("400mbit", paused, tmp_path / "pieces", *settings_of(found.patch))
    assert "F010" not in findings(pieces)
    assert measured(pieces).step < (1 - found.gain / 2) * measured(whole).step
