"""Several ranks on this GPU over NCCL. `make nccl` runs all rows of `tests.nccl`; here is one of each kind."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.environment import environment
from tests.nccl.page import read_results

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("section", "rows", "num_rows"),
    [
        ("parity", "dp_shard2-tp2-ep2", 2),
        ("parity", "reduced-after", 1),  # replayed as CUDA graphs on both ranks
        ("faults", "@dp_shard 2", 5),
        ("resume", "memory copies", 1),
    ],
)
def test_ranks_on_one_gpu_train_recover_and_resume_over_nccl(
    tmp_path: Path, section: str, rows: str, num_rows: int
) -> None:
    """In a process of its own: this one may use the GPU already, and must not be forked then."""
    results = tmp_path / "results.jsonl"
    command = [sys.executable, "-W", "ignore", "-m", "tests.nccl", "--only", section, "--rows", rows]
    command += ["--variants", "fp32", "--ranks", "2,4", "--results", str(results)]
    done = subprocess.run(command, env=environment(OMP_NUM_THREADS="1"), timeout=400, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert [each["passed"] for each in read_results(results).values()] == [True] * num_rows
