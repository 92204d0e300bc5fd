"""A vision tower that is sharded alone, over the tensor-parallel ranks that encode its images, in a pipeline."""

from typing import Any

import pytest
import torch

from tests.cases import slow
from tests.ranks import run_ranks
from tests.resume import HeldShard, SavedState, TrainedSegment, held, load, share_of
from tests.vlm_training import (
    SEQ_LEN,
    SPEC,
    STEPS,
    TRAIN,
    Case,
    assert_each_trains_as_one_process,
    batch_of,
    build_rank,
    plan_of,
    share_of_data,
    train_all_ranks,
)
from trimaran.core import Plan, TrainSection
from trimaran.cost import Job, num_owned_in, parts_of
from trimaran.models import ImageLimits, vlm_outline
from trimaran.nets import local_part, tower_of

VISION: dict[str, Any] = {"vision": {"tp": 1, "sharding": "parameters"}}
BOTH = VISION | {"projector": {"tp": 1, "sharding": "parameters"}}
ZERO_1 = {"vision": {"tp": 1, "sharding": "optimizer"}, "projector": {"tp": 1, "sharding": "gradients"}}
TP_AND_PP: dict[str, Any] = {"mesh": {"tp": 2, "pp": 2}}
PLANS: dict[str, dict[str, Any]] = {
    "a stage boundary in the tower": TP_AND_PP | {"towers": VISION, "pipeline": {"stages": [1, 4]}},
    "a stage without the towers": TP_AND_PP | {"towers": BOTH, "pipeline": {"stages": [3, 2]}},
}
SLOW: dict[str, dict[str, Any]] = {
    "a backward in two parts": TP_AND_PP
    | {"towers": BOTH, "pipeline": {"schedule": "zero-bubble", "stages": [1, 1, 1, 2]}, "grad_accum": 4},
    "two stages a rank": TP_AND_PP
    | {"towers": BOTH, "pipeline": {"schedule": "interleaved", "stages": [1, 1, 1, 2]}, "grad_accum": 4},
    "towers sharded differently": TP_AND_PP | {"towers": ZERO_1, "pipeline": {"stages": [1, 4]}, "grad_accum": 4},
    "weights freed after forward": TP_AND_PP
    | {"towers": BOTH, "pipeline": {"stages": [2, 3]}, "comm": {"reshard": "always"}, "grad_accum": 4},
    "recompute": TP_AND_PP | {"towers": BOTH, "pipeline": {"stages": [2, 3]}, "recompute": "full"},
    "replicas": {
        "mesh": {"tp": 2, "pp": 2, "dp_replicate": 2},
        "towers": BOTH,
        "pipeline": {"schedule": "gpipe", "stages": [2, 3]},
    },
    "context parallelism": {"mesh": {"tp": 2, "pp": 2, "cp": 2}, "towers": BOTH, "pipeline": {"stages": [3, 2]}},
    "zero-3, a stage without the towers": {
        "mesh": {"tp": 2, "pp": 2, "dp_shard": 2},
        "sharding": "parameters",
        "towers": BOTH,
        "pipeline": {"stages": [3, 2]},
    },
}


@pytest.mark.parametrize(
    "names",
    [
        list(PLANS),
        slow([name for name, each in SLOW.items() if len(each["mesh"]) == 2]),
        slow([name for name, each in SLOW.items() if len(each["mesh"]) == 3]),
    ],
    ids=["quick", "4 ranks", "8 ranks"],
)
def test_it_trains_the_trajectory_of_one_process(names: list[str]) -> None:
    assert_each_trains_as_one_process({name: Case(SPEC, plan_of(**(PLANS | SLOW)[name])) for name in names})


@pytest.mark.slow
def test_it_may_be_frozen() -> None:
    plan = plan_of(**PLANS["a stage boundary in the tower"])
    assert_each_trains_as_one_process({"frozen": Case(SPEC, plan, freeze=("vision",))})


@pytest.mark.slow
def test_its_checkpoint_loads_under_other_plans_and_theirs_under_it() -> None:
    chain = (
        plan_of(**PLANS["a stage boundary in the tower"]),
        plan_of(mesh={"dp_shard": 2}, sharding="parameters"),
        plan_of(**PLANS["a stage without the towers"]),
    )
    assert len(chain) == STEPS
    losses: list[float] = []
    saved: SavedState | None = None
    for step, plan in enumerate(chain):
        segment = train_step(plan, step, saved)
        if saved is not None:
            segment.assert_loaded(saved)
        losses, saved = losses + segment.losses, segment.saved
    (alone,) = train_all_ranks(SPEC, plan_of(grad_accum=1))
    assert losses == pytest.approx(alone.losses, rel=1e-5)


def train_step(plan: Plan, step: int, after: SavedState | None) -> TrainedSegment:
    """Train one step, from the start or from a saved state."""
    results = run_ranks(plan.mesh.world_size, train_step_of_rank, plan, step, after)
    losses, loaded, shares, progress = zip(*results, strict=True)
    saved = SavedState(step + 1, shares, progress[0])
    return TrainedSegment([losses[0]], list(loaded), saved, saved)


def train_step_of_rank(
    plan: Plan, step: int, after: SavedState | None
) -> tuple[float, list[HeldShard], list[HeldShard], dict[str, Any]]:
    _, stepper, ranks = build_rank(SPEC, plan)
    section = TrainSection.model_validate(TRAIN)
    state = stepper.state(section)
    if after is not None:
        load(state, after)
    state.gather()
    loaded = [held(shard) for shard in state.shards()]
    numbers = stepper.step(batch_of(step, share_of_data(plan, ranks)).to(torch.device("cpu")))
    _, refused = stepper.update(section.lr)
    assert not refused
    return numbers[0].item(), loaded, share_of(state), state.progress()


def test_a_rank_holds_as_much_of_the_tower_as_the_cost_model_says() -> None:
    plan = plan_of(**PLANS["a stage boundary in the tower"])
    job = Job(outline=vlm_outline(SPEC, ImageLimits()), seq_len=SEQ_LEN)
    parts = parts_of(job.outline, plan, seq_len=SEQ_LEN)
    for pp_rank, num_held in run_ranks(plan.mesh.world_size, held_of_vision, plan):
        holdings = [each for each in parts[pp_rank].holdings if each.tower.name == "vision"]
        whole = sum(each.parameters for each in holdings)
        assert num_held == pytest.approx(sum(num_owned_in(job, plan, each) for each in holdings), rel=0.02)
        assert num_held == pytest.approx(whole / plan.mesh.tp, rel=0.02)


def held_of_vision(plan: Plan) -> tuple[int, int]:
    """Return this rank's number in the pipeline, and how many values of the vision tower it holds."""
    networks, _, ranks = build_rank(SPEC, plan)
    parameters = [
        parameter
        for network in networks
        for name, parameter in network.module.named_parameters()
        if tower_of(name, network.towers) == "vision"
    ]
    return ranks.rank("pp"), sum(local_part(each).numel() for each in parameters)
