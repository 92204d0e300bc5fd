"""A rank that lost the connection to one that refused to run says so, and shows no raw network error."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runs import new_run
from trimaran.core import UserError
from trimaran.runs import Journal, find_refusal, says_connection_lost

REFUSAL = UserError("M024", "transformers cannot load this model", where="x", fix="y")
RANK = """
import os, sys, time
import torch.distributed as dist
from trimaran.core import UserError
from trimaran.train import worker

def build(*args, **kwargs):
    if os.environ["RANK"] == "0":
        raise UserError("M024", "transformers cannot load this model", where="x", fix="y")
    if os.environ["WAITS_IN"] == "store":
        time.sleep(2)
        dist.new_group([0, 1])  # through the store of rank 0, which has ended
    dist.barrier()

worker.build_worker_parts = build
from trimaran.app.main import main
sys.exit(main())
"""


def test_the_refusal_of_another_rank_is_found(tmp_path: Path) -> None:
    run, began = new_run(tmp_path / "run"), time.time()
    assert find_refusal(run, 1, since=began, wait_seconds=0.0) is None
    with Journal(run, 0) as journal:
        journal.event("start", world_size=2)
        journal.event("error", **REFUSAL.as_dict())
    with Journal(run, 1) as journal:
        journal.event("error", type="RuntimeError", message="Connection closed by peer")
    rank, mistake = find_refusal(run, 1, since=began) or pytest.fail("rank 0 refused")
    assert (rank, mistake["code"]) == (0, "M024")
    assert (
        find_refusal(run, 0, since=began, wait_seconds=0.0) is None
    )  # a rank that lost its connection has not refused
    assert find_refusal(run, 1, since=began + 60, wait_seconds=0.0) is None, "an earlier start"


def test_errors_of_lost_connections_are_recognised() -> None:
    assert says_connection_lost(RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:429"))
    assert says_connection_lost(type("DistNetworkError", (RuntimeError,), {})("any text"))
    assert not says_connection_lost(ValueError("shape mismatch"))


@pytest.mark.slow
@pytest.mark.parametrize("waits_in", ["collective", "store"])
def test_a_rank_ends_with_the_reason_of_the_rank_that_refused(waits_in: str, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    arguments = ["train", "--set", "train.steps=2", "--run-dir", "run", "--no-check"]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29741"}
    ranks = []
    for rank in ("0", "1"):
        own = os.environ | shared | {"RANK": rank, "LOCAL_RANK": rank, "WAITS_IN": waits_in, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "rank.py", *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        ranks.append(subprocess.Popen(command, cwd=tmp_path, env=own, **pipes))
    texts = [rank.communicate()[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert "M024: transformers cannot load this model" in texts[0]
    assert "rank 1 ended because rank 0 did: M024" in texts[1]
    assert "Traceback" not in texts[1]
