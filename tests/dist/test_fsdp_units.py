"""Small decoder layers share FSDP units: the same training, bit for bit, with fewer collectives."""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from tests.cases import slow
from tests.ranks import run_ranks
from tests.resume import recipe_for, train_segment
from trimaran.core import Plan, num_units, unit_sizes
from trimaran.parallel import build_mesh, parameter_groups
from trimaran.train import build_networks, join_process_group, read_rank_info

# A layer has slightly more than 1 MiB of gradients.
WIDE = {"layers": 5, "hidden": 128, "heads": 4, "kv_heads": 4, "head_dim": 32, "ffn": 512}
SHARDED = {"mesh": {"dp_shard": 2}, "sharding": "parameters", "micro_batch": 6}


def plan_with(bucket_mb: int, **fields: Any) -> Plan:
    return Plan.model_validate(SHARDED | fields | {"comm": {"bucket_mb": bucket_mb}})


def test_a_unit_is_about_as_large_as_a_bucket() -> None:
    plan, block = plan_with(25), 1_500_000  # 5.7 MiB of gradients
    assert unit_sizes(plan, block, 16) == [4, 4, 4, 4]
    assert unit_sizes(plan, block, 18) == [5, 5, 4, 4]
    assert unit_sizes(plan, block, 4) == [4]
    assert unit_sizes(plan, 10_000_000, 4) == [1, 1, 1, 1]
    assert unit_sizes(plan, block, 1) == [1]
    others: list[dict[str, Any]] = [
        {"mesh": {"dp_shard": 2, "pp": 2}}, {"mesh": {"dp_shard": 2, "ep": 2}}, {"offload": "parameters"},
        {"sharding": "none", "mesh": {"dp_replicate": 2}}, {"engine": "deepspeed"},
    ]  # fmt: skip
    assert all(num_units(plan_with(25, **each), block, 16) == 16 for each in others)


def units_on_rank(plan: Plan) -> tuple[list[list[str]], list[str]]:
    rank_info = read_rank_info(os.environ)
    join_process_group(rank_info)
    ranks = build_mesh(plan.mesh, device_type="cpu")
    (network,) = build_networks(recipe_for(shape=WIDE), plan, rank_info, ranks)
    names = {module: name for name, module in network.module.named_modules()}
    groups = {id(each): each for each in parameter_groups(network.module)}  # layers of a unit yield the same one
    units = [[names[each] for each in group.modules] for group in groups.values()]
    dist.barrier()
    return sorted(units), [name for name, _ in network.module.named_parameters()]


def test_layers_are_joined_in_order_and_names_stay() -> None:
    joined, alone = (run_ranks(2, units_on_rank, plan_with(size))[0] for size in (2, 1))
    assert joined[0] == [[""], ["layers.0", "layers.1"], ["layers.2", "layers.3"], ["layers.4"]]
    assert alone[0] == [[""], *([f"layers.{number}"] for number in range(5))]
    assert joined[1] == alone[1]


CASES = [
    {"grad_accum": 2, "micro_batch": 3},
    slow({"sharding": "optimizer", "grad_accum": 2, "micro_batch": 3, "recompute": 2}),
    slow({"sharding": "gradients", "grad_accum": 2, "micro_batch": 3}),
    slow({"recompute": "full"}),
    slow({"recompute": "selective"}),
    slow({"compile": True}),
    slow({"compile": True, "recompute": "full"}),
    slow({"mesh": {"dp_shard": 2, "tp": 2}}),
    slow({"mesh": {"dp_shard": 2, "dp_replicate": 2}, "micro_batch": 3}),
]


@pytest.mark.parametrize("fields", CASES, ids=str)
def test_joined_layers_train_the_same_and_resume_apart(fields: dict[str, Any]) -> None:
    """Two shards are added up in any order, so even the last bits agree. Checkpoints know nothing of units."""
    recipe = recipe_for(shape=WIDE)
    joined, alone = plan_with(2, **fields), plan_with(1, **fields)
    first = train_segment(recipe, joined, steps=1)
    whole = train_segment(recipe, alone, steps=2)
    rest = train_segment(recipe, alone, steps=1, after=first.saved)
    replace(rest, losses=[*first.losses, *rest.losses]).assert_same_end(whole)


@pytest.mark.slow
def test_prefetched_units_train_the_same() -> None:
    recipe = recipe_for(shape=WIDE | {"layers": 6})
    one = Plan.model_validate(SHARDED | {"comm": {"bucket_mb": 2}})
    two = Plan.model_validate(SHARDED | {"comm": {"bucket_mb": 2, "prefetch": 2}})
    train_segment(recipe, one, steps=1).assert_same_end(train_segment(recipe, two, steps=1))
