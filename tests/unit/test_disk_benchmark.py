"""`benchmarks/disk_offload.py`: its plans, the comparison of losses, and the table of stored results."""

import json
from pathlib import Path

import benchmarks.disk_offload as benchmark
import pytest
from benchmarks.disk_offload import MODELS, equal_runs, plan_fields, predicted, table

from trimaran.core import Plan
from trimaran.planner import check_disk

RESULTS = Path(benchmark.__file__).parent / "h200_disk.jsonl"
LINES = [json.loads(text) for text in RESULTS.read_text().splitlines()]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("run", ["none", "optimizer", "optimizer/disk", "parameters", "parameters/disk"])
def test_every_run_is_a_plan(model: str, run: str) -> None:
    plan = Plan.model_validate(plan_fields(f"{model}/{run}", "/nvme"))
    check_disk(plan)
    assert plan.offloads_to_disk == run.endswith("/disk")


def test_the_table_predicts_stored_runs_with_the_rates_of_their_disk() -> None:
    ours = next(line for line in LINES if line["name"] == "1b/optimizer/disk")
    faster = ours | {"rates": {key: 2 * rate for key, rate in ours["rates"].items()}}
    assert predicted(faster)[0] == pytest.approx(predicted(ours)[0] / 2, rel=0.05)
    done = [line for line in LINES if "failed" not in line]
    assert len(table([*done, {"name": "1b/none", "failed": "it was killed"}]).splitlines()) == 2 + len(done)


def test_runs_are_equal_only_if_losses_and_gradient_norms_are() -> None:
    one = {"name": "one", "losses": [2.0, 1.0], "grad_norms": [4.0, 3.0]}
    same, other = one | {"name": "same", "losses": [2.0], "grad_norms": [4.0]}, one | {"name": "other"}
    other["grad_norms"] = [4.0, 3.0000002]
    assert equal_runs(one, [one, same, other]) == ["same"]
