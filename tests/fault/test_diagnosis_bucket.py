"""The doctor on a wrong gradient bucket size: F010."""

from pathlib import Path
from statistics import median

import pytest

from tests.diagnosed_runs import findings, in_slow_network, measured, recipe_of, train, with_patch
from tests.fault.harness import Supervised, lines
from trimaran.core import EXIT_DONE
from trimaran.doctor import MAX_BUSY_CORES_FRACTION, patch_settings
from trimaran.runs import RunDirectory

pytestmark = pytest.mark.chaos


def test_too_small_buckets_are_found_and_larger_ones_help(tmp_path: Path) -> None:
    """With eight ranks each bucket takes fourteen hops, whose latency is longer than the transfer."""
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
    large = train(with_patch(recipe, found), tmp_path / "large")
    assert "F010" not in findings(large)
    assert measured(large).step < measured(small).step


LARGE = (
    "model.shape={layers: 8, hidden: 128, heads: 4, kv_heads: 4, ffn: 512}", "data.seq_len=16", "train.global_batch=2",
    "plan.micro_batch=1", "plan.grad_accum=1", "train.steps=20", "train.save=false", "checkpoint.every=0",
    "checkpoint.memory=0", "telemetry.sample_seconds=1",
)  # fmt: skip


def train_slow_backward(path: Path, *settings: str) -> RunDirectory:
    """Train with two ranks whose layers sleep 80 ms in backward, which needs no core."""
    extra = {"TRIMARAN_TEST_PLUGIN": "tests.fault.slow_rank", "TRIMARAN_TEST_SLOW_SECONDS": "0 0.08 0 0"}
    with Supervised.start(path, *LARGE, *settings, extra=extra) as supervised:
        assert supervised.wait(120) == EXIT_DONE
    return supervised.run


def test_one_large_bucket_without_overlap_is_found_and_smaller_ones_help(tmp_path: Path) -> None:
    """On a slow network, the gradients of the last layers could be reduced while those of the first are computed."""
    large = in_slow_network("400mbit", train_slow_backward, tmp_path / "large", "plan.comm.bucket_mb=100")
    if median(each["cpu"] for each in lines(large.samples(0)) if "cpu" in each) > MAX_BUSY_CORES_FRACTION:
        pytest.skip("other processes use the cores, so nothing would be hidden")
    found = findings(large)["F010"]
    assert found.culprit == "plan.comm.bucket_mb=100"
    assert "too large: the last bucket does not overlap with backward" in found.verdict
    assert found.patch["plan.comm.bucket_mb"] <= 2
    small = in_slow_network("400mbit", train_slow_backward, tmp_path / "small", *patch_settings(found.patch))
    assert "F010" not in findings(small)
    assert found.gain is not None
    assert measured(small).step < (1 - found.gain / 2) * measured(large).step
