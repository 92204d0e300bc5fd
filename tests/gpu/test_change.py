"""Changes of the plan on a GPU: afterwards a run needs as much memory as one that started with the new plan."""

import json
import multiprocessing
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.changes import request_after
from trimaran.core import Recipe, parse_recipe
from trimaran.machine import parse_cluster
from trimaran.models import spec_of
from trimaran.planner import choose
from trimaran.runs import RunDirectory, change_answers, create_run, open_run
from trimaran.train import read_rank_info, run_worker

pytestmark = pytest.mark.gpu

SERVER = multiprocessing.get_context("forkserver")
STEPS = 40
SETTINGS = (
    "model.shape={layers: 12, hidden: 1024, heads: 16, kv_heads: 16, ffn: 2816, vocab: 32000}",
    "data.seq_len=512",
    f"train.steps={STEPS}",
    "train.global_batch=64",
    "train.sample.tokens=0",
    "train.evaluate.batches=0",
    "train.save=false",
    "checkpoint.every=off",
    "checkpoint.memory=0",
    "plan.precision=bf16",
    "plan.compile=false",
    "plan.cuda_graphs=true",
)
CHANGES = {
    8: {"plan.recompute": "none"},
    16: {"plan.micro_batch": 8},
    24: {"plan.micro_batch": 32},
    32: {"plan.micro_batch": 64},  # without accumulation, gradients are kept in another way
}


def _train(path: str, changes: Mapping[int, Any]) -> None:
    """Run the only rank of a run, which changes its plan after the given steps."""
    os.environ.update(RANK="0", WORLD_SIZE="1")
    request_after(RunDirectory(Path(path)), dict(changes))
    rank_info = read_rank_info(os.environ)
    sys.exit(run_worker(open_run(Path(path)), rank_info, cache=Path(path).parent / "cache"))


def _recipe(*settings: str) -> Recipe:
    cluster = f"cluster=1x{parse_cluster('auto').device.name}"
    return parse_recipe("", name="test", overrides=[*SETTINGS, cluster, *settings])


def _run(folder: Path, recipe: Recipe, changes: Mapping[int, Any]) -> tuple[RunDirectory, list[dict[str, Any]]]:
    """Train in a process of its own, and return the run and its metrics."""
    plan = choose(recipe, spec_of(recipe.model), parse_cluster(recipe.cluster))
    run = create_run(folder / f"run-{len(list(folder.iterdir()))}", recipe, plan)
    SERVER.set_forkserver_preload([__name__, "torch._dynamo"])
    rank = SERVER.Process(target=_train, args=(str(run.path), changes))
    rank.start()
    rank.join(240)
    rank.kill()
    rank.join()
    assert rank.exitcode == 0, run.events(0).read_text()
    return run, [json.loads(line) for line in run.metrics.read_text().splitlines()]


def _memory(lines: list[dict[str, Any]], before: int) -> tuple[float, float]:
    """Return what was reserved before a step, and the peak of that step."""
    line = lines[before - 1]
    return line["memory"]["reserved"], line["peak_bytes"]


def test_after_a_change_the_memory_of_the_old_plan_and_its_graphs_is_free(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    first = ("plan.micro_batch=32", "plan.recompute=full")
    run, lines = _run(tmp_path / "runs", _recipe(*first), CHANGES)
    answers = [event["data"] for event in change_answers(run)]
    assert [(each["status"], each["how"]) for each in answers] == [
        ("applied", "in place"), ("applied", "in place"), ("applied", "in place"), ("applied", "rebuilt"),
    ]  # fmt: skip
    assert all(each["pause_seconds"] < 5 for each in answers)
    alone = {
        rows: _run(tmp_path / "runs", _recipe(f"plan.micro_batch={rows}", "plan.recompute=none"), {})[1]
        for rows in (8, 32, 64)
    }
    needed = [(_memory(lines, at), _memory(alone[rows], 8)) for rows, at in ((32, 16), (8, 24), (32, 32), (64, STEPS))]
    print(*needed, [each["pause_parts"] for each in answers], sep="\n")
    for (reserved, peak), (reserved_alone, peak_alone) in needed:
        assert reserved < 1.2 * reserved_alone + 0.2e9
        assert peak < 1.1 * peak_alone
