"""A real run whose loss rises when its gradients begin to be compressed too much: F075."""

from pathlib import Path

import pytest

from tests.fault.harness import Supervised
from trimaran.core import Finding
from trimaran.doctor import diagnose, read_evidence

pytestmark = pytest.mark.slow
WARMUP, STEPS = 60, 90
SPARSE = f"{{kind: topk, ratio: 0.001, error_feedback: false, warmup_steps: {WARMUP}, check_every: 5}}"


def findings(tmp_path: Path, compression: str) -> dict[str, Finding]:
    """Train two replicas on a small text, which they learn by heart, and return the findings by code."""
    text = tmp_path / "small.txt"
    text.write_text("\n".join(f"line {number} of a small text, {number**2} squared" for number in range(60)))
    settings = (f"train.steps={STEPS}", f"plan.comm.compression={compression}", "train.lr=0.02", "train.clip_norm=0",
                "train.schedule={kind: constant, warmup_steps: 0}", "data.source=text", f"data.path={text}",
                "data.holdout=0")  # fmt: skip
    with Supervised.start(tmp_path / "run", *settings) as supervised:
        assert supervised.wait(300) == 0, supervised.run.agent_log.read_text()
        return {each.code: each for each in diagnose(read_evidence(supervised.run))}


def test_a_loss_that_rises_with_compressed_gradients_is_reported(tmp_path: Path) -> None:
    found = findings(tmp_path, SPARSE)["F075"]
    assert "compressed by topk" in found.verdict
    assert found.patch == {"plan.comm.compression": "bf16"}
    assert found.evidence["error"] > 0.8, "nearly nothing of the gradient is sent"
    assert found.evidence["last_loss"] > 1.1 * found.evidence["lowest_loss"]


def test_without_compression_the_same_run_has_nothing_to_report_about_it(tmp_path: Path) -> None:
    assert "F075" not in findings(tmp_path, "none")
