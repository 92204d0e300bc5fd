"""A bit that flips at rest in a shard is found before the next update, and the run restores an earlier state."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.optim import Optimizer

from tests.cases import slow
from tests.dist.test_guard import recipe_with, watch_optimizer
from tests.environment import CACHE
from tests.parity import plan_for
from tests.ranks import run_ranks
from trimaran.checkpoint import step_path
from trimaran.nets import local_part
from trimaran.runs import RunDirectory, create_run
from trimaran.train import Updater, read_rank_info, run_worker

STEPS, FLIPPED_AFTER = 7, 4


def flip_a_bit(optimizer: Optimizer, state: str) -> None:
    """Flip one bit of the largest shard of this rank, or of one of its optimizer states."""
    held = [each for group in optimizer.param_groups for each in group["params"]]
    parameter = max(held, key=lambda each: local_part(each).numel())
    tensor = parameter if state == "weight" else optimizer.state[parameter][state]
    local_part(tensor).detach().view(-1).view(torch.int32)[-1] ^= 1 << 3


def train_with_flip(path: Path, state: str) -> int:
    rank_info, update, calls, built = read_rank_info(os.environ), Updater.update, [], watch_optimizer()

    def update_and_flip(self: Updater, lr: float, loss: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
        result = update(self, lr, loss, squares)
        calls.append(lr)
        if len(calls) == FLIPPED_AFTER and rank_info.rank == 1 and state:
            flip_a_bit(built[0], state)
        return result

    Updater.update = update_and_flip  # pyrefly: ignore[bad-assignment]
    return run_worker(RunDirectory(path), rank_info, cache=CACHE)


def train(path: Path, fields: dict[str, Any], state: str) -> RunDirectory:
    recipe = recipe_with(train={"steps": STEPS}, faults={"not_finite": "rewind", "shard_check": 1.0})
    run = create_run(path, recipe, plan_for(recipe, **({"grad_accum": 1} | fields)))
    assert run_ranks(2, train_with_flip, run.path, state) == [0, 0]
    return run


def last_state(run: RunDirectory) -> dict[str, Tensor]:
    files = step_path(run.checkpoints, STEPS).glob("rank-*.safetensors")
    return {f"{file.name} {name}": each for file in files for name, each in load_file(file).items()}


def events(run: RunDirectory, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in run.events(0).read_text().splitlines()]
    return [each for each in found if each["kind"] == kind]


@pytest.mark.parametrize(
    ("fields", "states"),
    [
        ({"dp_shard": 2, "sharding": "parameters"}, ("weight",)),
        slow(({"dp_shard": 2, "sharding": "optimizer"}, ("exp_avg", "exp_avg_sq"))),
        slow(({"dp_shard": 2, "sharding": "gradients"}, ("weight", "exp_avg", "step"))),
        slow(({"dp_replicate": 2}, ("weight", "exp_avg"))),
        slow(({"tp": 2}, ("weight", "exp_avg"))),
        slow(({"pp": 2, "grad_accum": 2}, ("weight", "exp_avg"))),
    ],
    ids=["zero-3", "zero-1", "zero-2", "replicas", "tensor", "pipeline"],
)
def test_a_flipped_bit_of_a_shard_names_its_rank_and_is_undone(
    tmp_path: Path, fields: dict[str, Any], states: tuple[str, ...]
) -> None:
    expected = last_state(train(tmp_path / "calm", fields, ""))
    for state in states:
        run = train(tmp_path / state, fields, state)
        (differ,), (rewind,) = events(run, "differ"), events(run, "rewind")
        assert (differ["step"], differ["data"]["ranks"]) == (FLIPPED_AFTER + 1, [1])
        assert differ["data"]["type"] == "MemoryChanged"
        (key,) = differ["data"]["keys"]
        assert key.startswith("model/" if state == "weight" else f"optimizer/{state}")
        assert rewind["data"]["to_step"] == FLIPPED_AFTER - 1  # the copy after it may hold the flipped bit
        found = last_state(run)
        assert found.keys() == expected.keys()
        assert [name for name in found if not torch.equal(found[name], expected[name])] == []
