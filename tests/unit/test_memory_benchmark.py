"""The memory benchmark: its configurations are legal, and its table shows measured and predicted memory."""

from typing import Any

import pytest
from benchmarks.accuracy.ask import question_of
from benchmarks.accuracy.rows import merged
from benchmarks.memory import memory_tables
from benchmarks.planner import configurations, plan_fields

from trimaran.core import Plan, Recipe
from trimaran.cost import predict
from trimaran.machine import parse_cluster
from trimaran.models import spec_of
from trimaran.planner import check_plan

ROWS = configurations() | configurations("held-out")


@pytest.mark.parametrize("name", ROWS)
def test_every_row_is_legal_on_one_h200_and_predicted_to_fit(name: str) -> None:
    row, cluster = ROWS[name], parse_cluster("1xH200")
    batch = row["micro_batch"] * row["grad_accum"]
    recipe = Recipe.model_validate(
        {
            "model": {"preset": row["preset"], "shape": row["shape"]},
            "data": {"seq_len": row["seq_len"]},
            "train": {"global_batch": batch},
        }
    )
    plan = Plan(**plan_fields(row))
    check_plan(plan, recipe, spec_of(recipe.model), cluster)
    job, asked = question_of(row)
    assert asked == plan
    assert predict(job, cluster, asked).fits


def test_the_rows_cover_the_memory_options_of_three_models() -> None:
    by_model: dict[str, list[dict[str, Any]]] = {}
    for name, row in configurations().items():
        by_model.setdefault(name.split()[0], []).append(row)
    for model in ("1b", "3b", "8b"):
        rows = by_model[model]
        assert len({(row["recompute"], row["loss"], row["states"], row["offload"]) for row in rows}) >= 4
    spanned = {key: {row[key] for row in by_model["1b"]} for key in ("loss", "states", "offload", "precision")}
    assert spanned["loss"] == {"logits", "fused", "chunked"}
    assert spanned["states"] == {"fp32", "bf16", "8bit"}
    assert spanned["offload"] == {"none", "optimizer", "activations", "parameters"}


def test_the_table_has_a_line_per_configuration_and_marks_oom() -> None:
    measured = [("1b 4x4096", 40.0, 64_000.0), ("1b 4x4096 loss=chunked", 37.0, 62_720.0)]
    rows = [ROWS[name] | {"peak_bytes": gib * 2**30, "tokens_per_second": speed} for name, gib, speed in measured]
    rows.append(ROWS["1b 4x4096 loss=logits"] | {"failed": "torch.OutOfMemoryError: CUDA out of memory. Tried"})
    lines = memory_tables([rows[1], rows[0], rows[2]]).splitlines()
    assert lines[0] == "### 1b"
    plain, pieces, logits = (line.split(" | ") for line in lines[4:7])
    assert (plain[2], plain[3], plain[7], plain[9], plain[11]) == ("none", "fused", "40.0", "64,000", "1.00 |")
    assert (pieces[3], pieces[7], pieces[11]) == ("chunked", "37.0", "0.98 |")
    assert logits[7].startswith("out of memory")


def test_a_new_measurement_replaces_the_row_and_its_older_version() -> None:
    plain, full = ROWS["1b 4x4096"], ROWS["1b 4x4096 recompute=full loss=chunked"]
    before = plain | {"peak_bytes": 1}
    older = [{key: value for key, value in row.items() if key != "loss"} | {"shape": {}, "name": name, "peak_bytes": 2}
             for row, name in ((plain, "old"), (full, "old full"))]  # fmt: skip
    fresh = [plain | {"peak_bytes": 3}, full | {"failed": "out of memory"}]
    rows_after = merged([before, *older], fresh)
    assert [(row["name"], row["peak_bytes"], row.get("older")) for row in rows_after] == [
        ("1b 4x4096", 3, None), ("old full", 2, True)
    ]  # fmt: skip
    assert merged(rows_after, [], forget_older=True) == rows_after[:1]
