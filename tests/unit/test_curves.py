"""`benchmarks/curves.py`: its recipes, the table and plot of the losses, and one real run."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from benchmarks.curves import MEAN_OVER, SETTINGS, SHAPES, Line, arguments_of, loss_at, measure, plot, table

from tests.cases import slow
from trimaran.core import FP8_FEATURE_MULTIPLE, MIN_FP8_FEATURES, parse_recipe
from trimaran.models import spec_of
from trimaran.planner import check_fp8


def line(arm: str, seed: int, losses: list[float], held_out: float) -> Line:
    return {"arm": arm, "seed": seed, "losses": losses, "held_out": [[len(losses), held_out]]}


def falling(end: float) -> list[float]:
    return [end + 1 / step for step in range(1, 61)]


LINES = [line("bf16", 1, falling(1.0), 1.5), line("bf16", 2, falling(1.1), 1.7), line("bf16", 3, falling(1.2), 1.6),
         line("fp8", 1, falling(1.02), 1.45)]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("arm", SETTINGS)
def test_every_run_is_a_recipe(arm: str, shape: str) -> None:
    recipe = parse_recipe("", name="curve", overrides=arguments_of(arm, 3, shape, 500)[1::2])
    assert recipe.train.seed == 3
    assert recipe.train.optimizer.states == {"states-bf16": "bf16", "states-8bit": "8bit"}.get(arm, "fp32")
    assert recipe.data.source == "python-stdlib"


def test_the_model_has_layers_for_fp8_and_about_a_hundred_million_parameters() -> None:
    recipe = parse_recipe("", name="curve", overrides=arguments_of("fp8", 1, "small", 500)[1::2])
    spec: Any = spec_of(recipe.model)
    check_fp8(recipe.plan, spec)  # pyrefly: ignore[bad-argument-type]
    sizes = (spec.hidden, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.ffn)
    assert all(size >= MIN_FP8_FEATURES and size % FP8_FEATURE_MULTIPLE == 0 for size in sizes)
    assert 90e6 < spec.num_parameters < 120e6


def test_a_loss_is_the_mean_of_the_last_steps() -> None:
    record = line("bf16", 1, [float(step) for step in range(1, 101)], 0.0)
    assert loss_at(record, 100) == 100 - (MEAN_OVER - 1) / 2
    assert loss_at(record, 2) == 1.5


def test_the_table_shows_distances_in_standard_deviations_of_the_seeds() -> None:
    text = table([*LINES, {"arm": "states-8bit", "seed": 1, "failed": "P031: no"}])
    # The mean is 1.6, the standard deviation 0.1, and bf16 with seed 1 has 1.5.
    assert "| -0.1500 | -1.5 | -0.0500 |" in text
    assert "mean 1.6000, standard deviation 0.1000" in text
    assert "| states-8bit | 1 | P031: no |" in text


def test_the_plot_has_every_run_in_both_halves() -> None:
    root = ElementTree.fromstring(plot(LINES))
    assert len([each for each in root.iter() if each.tag.endswith("polyline")]) == 2 * len(LINES)


@pytest.mark.parametrize("arm", [slow("states-bf16")])
def test_a_run_records_its_losses(tmp_path: Path, arm: str) -> None:
    (record,) = measure([(arm, 1)], "tiny", 10, tmp_path / "out.jsonl")
    assert record == json.loads((tmp_path / "out.jsonl").read_text())
    assert len(record["losses"]) == 10
    assert [step for step, _ in record["held_out"]] == [2, 4, 6, 8, 10]
