"""Our vision-language model trains the trajectory of one process under every axis; many micro-batches have no image."""

from typing import Any

import pytest

from tests.cases import slow
from tests.vlm_training import (
    DEEP,
    GLOBAL_BATCH,
    MIXTURE,
    SPEC,
    STEPS,
    TIED,
    Case,
    assert_each_trains_as_one_process,
    batch_of,
    plan_of,
    row,
    train_all_ranks,
)
from trimaran.data import DataShare

REPLICATED = {"vision": {"tp": 1}}
SHARDED = {"vision": {"tp": 1, "sharding": "parameters"}, "projector": {"tp": 1, "sharding": "parameters"}}
ZERO_1 = {"vision": {"tp": 1, "sharding": "optimizer"}}
PLANS: dict[str, dict[str, Any]] = {
    "ddp": {"mesh": {"dp_replicate": 2}},
    "zero-3": {"mesh": {"dp_shard": 2}, "sharding": "parameters"},
    "tp": {"mesh": {"tp": 2}},
    "tp, vision and projector replicated": {"mesh": {"tp": 2}, "towers": REPLICATED | {"projector": {"tp": 1}}},
    "tp, vision and projector sharded over its ranks": {"mesh": {"tp": 2}, "towers": SHARDED},
    "cp": {"mesh": {"cp": 2}},
    "pp by cost": {"mesh": {"pp": 2}},
    "pp inside the vision": {"mesh": {"pp": 2}, "pipeline": {"stages": [1, 4]}},
    "pp after the projector": {"mesh": {"pp": 2}, "pipeline": {"stages": [3, 2], "schedule": "gpipe"}},
}
COMBINED: dict[str, dict[str, Any]] = {
    "zero-2": {"mesh": {"dp_shard": 2}, "sharding": "gradients", "grad_accum": 4},
    "tp, vision replicated": {"mesh": {"tp": 2}, "towers": REPLICATED},
    "dp and tp": {"mesh": {"dp_replicate": 2, "tp": 2}, "towers": REPLICATED},
    "zero-3 and tp": {"mesh": {"dp_shard": 2, "tp": 2}, "sharding": "parameters"},
    "zero-2 and tp, vision replicated": {
        "mesh": {"dp_shard": 2, "tp": 2},
        "sharding": "gradients",
        "towers": REPLICATED,
    },
    "tp, states of the vision over its ranks": {"mesh": {"tp": 2}, "towers": ZERO_1, "grad_accum": 4},
    "dp and tp, vision sharded over tp": {"mesh": {"dp_replicate": 2, "tp": 2}, "towers": SHARDED},
    "zero-3 over all ranks of vision and projector": {
        "mesh": {"dp_shard": 2, "tp": 2},
        "sharding": "parameters",
        "towers": REPLICATED | {"projector": {"tp": 1}},
    },
    "zero-1 over all ranks of the vision": {
        "mesh": {"dp_shard": 2, "tp": 2},
        "sharding": "optimizer",
        "towers": REPLICATED,
        "grad_accum": 4,
    },
    "zero-3 and tp, vision in full on every rank": {
        "mesh": {"dp_shard": 2, "tp": 2},
        "sharding": "parameters",
        "towers": {"vision": {"tp": 1, "sharding": "none"}},
    },
    "hsdp and tp, vision sharded over tp": {
        "mesh": {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
        "sharding": "parameters",
        "towers": SHARDED,
    },
    "zero-3 over cp and tp in the vision": {"mesh": {"cp": 2, "tp": 2}, "sharding": "parameters", "towers": SHARDED},
    "pp, zero-3 and tp, vision sharded over tp": {
        "mesh": {"pp": 2, "dp_shard": 2, "tp": 2},
        "sharding": "parameters",
        "towers": SHARDED,
        "pipeline": {"stages": [1, 4]},
    },
    "exchange": {"mesh": {"cp": 2}, "comm": {"context": "exchange"}},
    "ring": {"mesh": {"cp": 2}, "comm": {"context": "ring"}},
    "ring and tp": {"mesh": {"cp": 2, "tp": 2}, "comm": {"context": "ring"}, "recompute": "full"},
    "zero-3 over cp": {"mesh": {"cp": 2}, "sharding": "parameters"},
    "cp and tp": {"mesh": {"cp": 2, "tp": 2}},
    "cp and tp, vision replicated": {"mesh": {"cp": 2, "tp": 2}, "towers": REPLICATED},
    "cp and tp, both replicated": {"mesh": {"cp": 2, "tp": 2}, "towers": REPLICATED | {"projector": {"tp": 1}}},
    "pp and tp, both replicated": {
        "mesh": {"pp": 2, "tp": 2},
        "towers": REPLICATED | {"projector": {"tp": 1}},
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
# Qwen3-VL: features of two vision layers are added after the first two of three decoder layers; six blocks in all.
DEEP_PLANS: dict[str, dict[str, Any]] = {
    "zero-3, recomputed": {"mesh": {"dp_shard": 2}, "sharding": "parameters", "recompute": "full"},
    "tp": {"mesh": {"tp": 2}},
    "pp inside the vision": {"mesh": {"pp": 2}, "pipeline": {"stages": [1, 5]}},
    "pp after the first decoder layer": {"mesh": {"pp": 2}, "pipeline": {"stages": [4, 2]}},
}
DEEP_COMBINED: dict[str, dict[str, Any]] = {
    "ddp": {"mesh": {"dp_replicate": 2}},
    "cp": {"mesh": {"cp": 2}},
    "tp, vision and projector sharded over its ranks": {"mesh": {"tp": 2}, "towers": SHARDED},
    "pp after the projector": {"mesh": {"pp": 2}, "pipeline": {"stages": [3, 3], "schedule": "gpipe"}},
    "pp and tp": {"mesh": {"pp": 2, "tp": 2}, "pipeline": {"stages": [4, 2]}},
    "interleaved pp": {"mesh": {"pp": 2}, "grad_accum": 4,
                       "pipeline": {"schedule": "interleaved", "stages": [1, 2, 2, 1]}},
    "pp and zero-3": {"mesh": {"pp": 2, "dp_shard": 2}, "sharding": "parameters", "pipeline": {"stages": [4, 2]}},
}  # fmt: skip
# Qwen3-VL-MoE: the same with experts in the decoder.
MIXTURE_PLANS: dict[str, dict[str, Any]] = {
    "ep and zero-3": {"mesh": {"dp_shard": 2, "ep": 2}, "sharding": "parameters"},
    "tp": {"mesh": {"tp": 2}},
}
MIXTURE_COMBINED: dict[str, dict[str, Any]] = {
    "pp after the first decoder layer": {"mesh": {"pp": 2}, "pipeline": {"stages": [4, 2]}},
    "cp and ep": {"mesh": {"cp": 2, "ep": 2}, "sharding": "parameters"},
    "ep, zero-3 and tp": {"mesh": {"dp_shard": 2, "tp": 2, "ep": 2}, "sharding": "parameters"},
    "pp, ep and zero-3": {
        "mesh": {"pp": 2, "dp_shard": 2, "ep": 2},
        "sharding": "parameters",
        "pipeline": {"stages": [1, 5]},
    },
}
STAGES = {"gpipe": [1, 4], "1f1b": [2, 3], "interleaved": [1, 1, 1, 2], "zero-bubble": [1, 1, 1, 2]}


CASES = {
    f"{kind}, {name}": Case(spec, plan_of(**fields))
    for kind, spec, tables in (
        ("plain", SPEC, (PLANS, COMBINED)),
        ("deepstack", DEEP, (DEEP_PLANS, DEEP_COMBINED)),
        ("experts", MIXTURE, (MIXTURE_PLANS, MIXTURE_COMBINED)),
    )
    for plans in tables
    for name, fields in plans.items()
} | {
    f"tied, {schedule}": Case(TIED, plan_of(mesh={"pp": 2}, pipeline={"schedule": schedule, "stages": stages},
                                            grad_accum=4))
    for schedule, stages in STAGES.items()
}  # fmt: skip
# Where towers are split, cut into stages and sharded each in their own way. Products of axes are slow.
QUICK = (
    "plain, zero-3",
    "plain, tp",
    "plain, tp, vision and projector sharded over its ranks",
    "plain, cp",
    "plain, pp inside the vision",
    "plain, pp after the projector",
    "deepstack, tp",
    "deepstack, pp inside the vision",
    "experts, ep and zero-3",
    "tied, interleaved",
    "tied, zero-bubble",
)


def on_ranks(world_size: int) -> dict[str, Case]:
    """Return the cases that are not quick, on this many ranks."""
    chosen = {name: each for name, each in CASES.items() if each.plan.mesh.world_size == world_size}
    return {name: each for name, each in chosen.items() if name not in QUICK}


@pytest.mark.parametrize(
    "cases",
    [{name: CASES[name] for name in QUICK}, *(slow(on_ranks(each)) for each in (2, 4, 8))],
    ids=["quick", "2 ranks", "4 ranks", "8 ranks"],
)
def test_every_plan_trains_the_trajectory_of_one_process(cases: dict[str, Case]) -> None:
    assert_each_trains_as_one_process(cases)


def test_some_ranks_and_micro_batches_have_no_image() -> None:
    images = [[len(row(step, number)["grids"]) for number in range(GLOBAL_BATCH)] for step in range(STEPS)]
    assert [sum(counts) > 0 for counts in images] == [True, False, True], "one step has no images"
    shares = [DataShare(rank=rank, dp=2, micro_batch=1, grad_accum=4) for rank in range(2)]
    found = [len(batch_of(0, share).micro(index)["patches"]) > 0 for share in shares for index in range(4)]
    assert set(found) == {True, False}
    assert any(found[index] != found[4 + index] for index in range(4)), "one rank has an image while the other has none"
    (alone,) = train_all_ranks(SPEC, plan_of(grad_accum=1))
    assert min(alone.towers[0].values()) > 0.01, "every tower must have a gradient"
