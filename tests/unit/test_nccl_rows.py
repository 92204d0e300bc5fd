"""The rows, results and page of `tests.nccl`, without a GPU; ranks on CPUs with gloo for one of the rows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environment import environment
from tests.nccl.__main__ import chosen_rows, parse_flags
from tests.nccl.page import add_result, read_results, render_page
from tests.nccl.parity_rows import ParityRow, parity_rows
from trimaran.launch import shared_gpu_environment
from trimaran.train import read_operations


def test_every_row_has_its_own_name_and_all_variants_are_there() -> None:
    rows = parity_rows()
    assert len({row.name for row in rows}) == len(rows)
    assert {row.variant for row in rows} == {"fp32", "bf16", "fp32-compiled", "bf16-compiled"}
    assert {row.ranks for row in rows} == {2, 4, 8}


def test_rows_that_passed_are_not_run_again(tmp_path: Path) -> None:
    results, first = tmp_path / "results.jsonl", parity_rows()[0]
    flags = parse_flags(["--only", "parity", "--results", str(results)])
    add_result(results, {"section": "parity", "name": first.name, "passed": False})
    assert first in chosen_rows(flags)["parity"]
    add_result(results, {"section": "parity", "name": first.name, "passed": True})
    assert first not in chosen_rows(flags)["parity"]
    assert len(chosen_rows(flags)["parity"]) == len(parity_rows()) - 1


def test_fp32_rows_bound_all_differences_and_bf16_rows_loss_and_norm() -> None:
    case = next(row.case for row in parity_rows() if row.case.model.startswith("dense"))
    fp32, bf16 = ParityRow(case), ParityRow(case, "bf16")
    assert fp32.verdict(9e-6, 9e-6, 9e-6)
    assert not fp32.verdict(1e-7, 1e-7, 2e-5)
    assert bf16.verdict(9e-5, 9e-4, 1.0)
    assert not bf16.verdict(2e-4, 0.0, 0.0)
    assert not bf16.verdict(0.0, 2e-3, 0.0)


def test_the_page_shows_failures_and_what_was_not_run() -> None:
    row = {"section": "parity", "name": "a", "plan": "tp2", "model": "dense-tied", "ranks": 2, "precision": "fp32"}
    row |= {"compiled": False, "tolerance": 1e-5, "passed": False, "error": "Traceback\nValueError: no"}
    page = render_page([row], {"torch": "2.11"}, missing=["b"])
    assert "Of 2 rows 0 pass, 1 fail and 1 were not run." in page
    assert "| tp2 | dense-tied | 2 | fp32 | no | - | - | - | 1e-05 | 0 | FAIL: ValueError: no |" in page
    assert "- b" in page


def test_ranks_share_a_gpu_only_when_asked() -> None:
    assert shared_gpu_environment({}, 1) == {}
    hosts = [shared_gpu_environment({"TRIMARAN_SHARE_GPUS": "1"}, rank)["NCCL_HOSTID"] for rank in range(3)]
    assert len(set(hosts)) == 3


def test_operations_of_nccl_are_those_of_another_group_than_gloos() -> None:
    """The keys are those of torch's recorder for NCCL, 2.11."""
    entry = {"process_group": ["0", "default_pg"], "collective_seq_id": 7, "profiling_name": "nccl:all_reduce"}
    entry |= {"input_sizes": [[5]], "input_dtypes": ["Long"], "state": "completed", "retired": False, "is_p2p": False}
    entry |= {"time_created_ns": 2_000_000_000}
    batch = entry | {"profiling_name": "nccl:coalesced", "collective_seq_id": 1}
    found = read_operations(json.dumps({"entries": [entry, batch, entry | {"is_p2p": True}]}), suffix="/nccl")
    assert found == [
        {"group": "0/nccl", "number": 7, "op": "all_reduce", "sizes": [[5]], "dtypes": ["Long"], "state": "completed",
         "done": True, "time": 2.0}
    ]  # fmt: skip


@pytest.mark.slow
def test_a_row_runs_with_gloo(tmp_path: Path) -> None:
    results, page = tmp_path / "results.jsonl", tmp_path / "page.md"
    command = [sys.executable, "-W", "ignore", "-m", "tests.nccl", "--backend", "gloo", "--only", "parity"]
    command += ["--variants", "fp32", "--rows", "dp_replicate2-accumulate", "--results", str(results)]
    command += ["--write", str(page)]
    subprocess.run(command, env=environment(OMP_NUM_THREADS="1"), timeout=300, check=True)
    assert [each["passed"] for each in read_results(results).values()] == [True]
    assert "dp_replicate2" in page.read_text()
