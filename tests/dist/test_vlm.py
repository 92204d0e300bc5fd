"""A model that sees trains the course of one process under every axis, though many micro-batches have no image."""

from functools import cache
from typing import Any

import pytest

from tests.vlm_training import GLOBAL_BATCH, SPEC, STEPS, TIED, TrainingTrace, assert_traces_match, batch_of, train_all_ranks, plan_of, row
from trimaran.data.feed import DataShare

WHOLE = {"vision": {"tp": 1}}
PLANS: dict[str, dict[str, Any]] = {
    "ddp": {"mesh": {"dp_replicate": 2}},
    "zero-3": {"mesh": {"dp_shard": 2}, "sharding": "parameters"},
    "tp": {"mesh": {"tp": 2}},
    "tp, vision and projector whole": {"mesh": {"tp": 2}, "towers": WHOLE | {"projector": {"tp": 1}}},
    "cp": {"mesh": {"cp": 2}},
    "pp by cost": {"mesh": {"pp": 2}},
    "pp inside the vision": {"mesh": {"pp": 2}, "pipeline": {"stages": [1, 4]}},
    "pp behind the projector": {"mesh": {"pp": 2}, "pipeline": {"stages": [3, 2], "schedule": "gpipe"}},
}
SLOW: dict[str, dict[str, Any]] = {
    "zero-2": {"mesh": {"dp_shard": 2}, "sharding": "gradients", "grad_accum": 4},
    "tp, vision whole": {"mesh": {"tp": 2}, "towers": WHOLE},
    "dp and tp": {"mesh": {"dp_replicate": 2, "tp": 2}, "towers": WHOLE},
    "zero-3 and tp": {"mesh": {"dp_shard": 2, "tp": 2}, "sharding": "parameters"},
    "zero-2 and tp, vision whole": {"mesh": {"dp_shard": 2, "tp": 2}, "sharding": "gradients", "towers": WHOLE},
    "exchange": {"mesh": {"cp": 2}, "comm": {"context": "exchange"}},
    "zero-3 over cp": {"mesh": {"cp": 2}, "sharding": "parameters"},
    "cp and tp": {"mesh": {"cp": 2, "tp": 2}},
    "cp and tp, vision whole": {"mesh": {"cp": 2, "tp": 2}, "towers": WHOLE},
    "cp and tp, both whole": {"mesh": {"cp": 2, "tp": 2}, "towers": WHOLE | {"projector": {"tp": 1}}},
    "pp and tp, both whole": {
        "mesh": {"pp": 2, "tp": 2},
        "towers": WHOLE | {"projector": {"tp": 1}},
        "pipeline": {"stages": [1, 4]},
    },
    "pp and cp": {"mesh": {"pp": 2, "cp": 2}, "pipeline": {"stages": [1, 4]}},
    "pp and zero-3": {"mesh": {"pp": 2, "dp_shard": 2}, "sharding": "parameters", "pipeline": {"stages": [1, 4]}},
    "hsdp": {"mesh": {"dp_shard": 2, "dp_replicate": 2}, "sharding": "parameters"},
    "zero-3, activations on the host": {
        "mesh": {"dp_shard": 2},
        "sharding": "parameters",
        "offload": "activations",
    },
}
CUTS = {"gpipe": [1, 4], "1f1b": [2, 3], "interleaved": [1, 1, 1, 2], "zero-bubble": [1, 1, 1, 2]}


@cache
def alone() -> TrainingTrace:
    return train_all_ranks(SPEC, plan_of(grad_accum=1))[0]


@cache
def alone_and_tied() -> TrainingTrace:
    return train_all_ranks(TIED, plan_of(grad_accum=1))[0]


def test_ranks_and_micro_batches_without_a_picture_come_up() -> None:
    images = [[len(row(step, number)["grids"]) for number in range(GLOBAL_BATCH)] for step in range(STEPS)]
    assert [sum(of_step) > 0 for of_step in images] == [True, False, True], "one step has none at all"
    shares = [DataShare(rank=rank, dp=2, micro_batch=1, grad_accum=4) for rank in range(2)]
    found = [len(batch_of(0, share).micro(index)["patches"]) > 0 for share in shares for index in range(4)]
    assert set(found) == {True, False}
    assert any(found[index] != found[4 + index] for index in range(4)), "one rank sees while the other does not"
    assert min(alone().towers[0].values()) > 0.01, "a tower without a gradient proves nothing"


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_takes_the_course_of_one_process(name: str) -> None:
    assert_traces_match(train_all_ranks(SPEC, plan_of(**PLANS[name])), alone())


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_products_of_axes_and_their_variants_take_it_as_well(name: str) -> None:
    assert_traces_match(train_all_ranks(SPEC, plan_of(**SLOW[name])), alone())


@pytest.mark.parametrize("schedule", CUTS)
def test_every_schedule_takes_it_with_an_embedding_on_two_stages(schedule: str) -> None:
    plan = plan_of(mesh={"pp": 2}, pipeline={"schedule": schedule, "stages": CUTS[schedule]}, grad_accum=4)
    assert_traces_match(train_all_ranks(TIED, plan), alone_and_tied())
