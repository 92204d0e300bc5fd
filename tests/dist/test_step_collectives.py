"""How many collectives a step has: each is a round trip, which a step of a few milliseconds notices."""

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.environment import CACHE
from tests.parity import plan_for
from tests.ranks import run_ranks
from trimaran.core import Recipe
from trimaran.runs import RunDirectory, create_run
from trimaran.train import StepRecorder, read_rank_info, run_worker

STEPS, WARM_STEPS = 8, 3
SMALL = {"layers": 2, "hidden": 16, "heads": 2, "kv_heads": 2, "ffn": 64}
COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "gather", "reduce", "barrier")


def count_collectives(path: Path, cache: Path) -> list[dict[str, int]]:
    """Run a worker and return the collectives that its Python code started, step by step."""
    called: list[Counter[str]] = []

    def counted(name: str) -> Callable[..., Any]:
        collective = getattr(dist, name)

        def call(*values: Any, **options: Any) -> Any:
            if called:
                called[-1][name] += 1
            return collective(*values, **options)

        return call

    note_batch = StepRecorder.note_batch

    def note(recorder: StepRecorder, *values: Any) -> None:
        called.append(Counter())
        note_batch(recorder, *values)

    for name in COLLECTIVES:
        setattr(dist, name, counted(name))
    StepRecorder.note_batch = note  # pyrefly: ignore[bad-assignment]
    assert run_worker(RunDirectory(path), read_rank_info(os.environ), cache=cache) == 0
    return [dict(each) for each in called[WARM_STEPS:-1]]  # a checkpoint follows the last step


@pytest.mark.parametrize(("num_ranks", "local_steps", "count"), [(1, 1, 0), (2, 1, 2), (2, 4, 1)])
def test_a_step_has_no_collective_on_one_rank_and_two_on_several(
    num_ranks: int, local_steps: int, count: int, tmp_path: Path
) -> None:
    """One sums the counts before backward, one everything else. DDP reduces gradients without Python.

    Replicas that train alone have one, which nobody waits for in its step. Their weights are averaged after
    step 4, in two buckets: layers, and what is outside of layers.
    """
    recipe = Recipe.model_validate(
        {
            "model": {"preset": "tiny", "shape": SMALL},
            "data": {"seq_len": 32},
            "train": {"steps": STEPS, "global_batch": 4, "sample": {"tokens": 0}, "evaluate": {"batches": 0}},
            "telemetry": {"details_every": 1000},
            "checkpoint": {"memory": 0},
        }
    )
    comm = {"local_steps": local_steps}
    plan = plan_for(recipe, dp_replicate=num_ranks, grad_accum=4 // num_ranks, comm=comm)
    run = create_run(tmp_path / "run", recipe, plan)
    for steps in run_ranks(num_ranks, count_collectives, run.path, CACHE):
        numbers = range(WARM_STEPS + 1, STEPS)
        counts = [count + 2 * (local_steps > 1 and each % local_steps == 0) for each in numbers]
        assert steps == [{"all_reduce": each} if each else {} for each in counts]
