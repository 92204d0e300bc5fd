"""Of two plans that tie, the planner takes the simpler one: what makes a plan less simple, one thing at a time."""

from typing import Any

import pytest

from trimaran.core import Mesh, Pipeline, Plan
from trimaran.planner import FoundPlan, complexity

PLAIN = Plan(mesh=Mesh(dp_replicate=2, dp_shard=2, tp=2, pp=2, cp=2), sharding="optimizer", grad_accum=4)


def mesh(**degrees: int) -> dict[str, Any]:
    return {"mesh": PLAIN.mesh.model_copy(update=degrees)}


def comm(**settings: Any) -> dict[str, Any]:
    return {"comm": PLAIN.comm.model_copy(update=settings)}


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("model_axes", mesh(ep=2)),
        ("offload", {"offload": "activations"}),
        ("towers", {"towers": {"vision": {}}}),
        ("recompute", {"recompute": "elementwise"}),
        ("regathers", comm(regather=True)),
        ("is_chunked", {"loss": "chunked"}),
        ("sharding", {"sharding": "gradients"}),
        ("pp", mesh(pp=4)),
        ("stages_per_rank", {"pipeline": Pipeline(schedule="interleaved")}),
        ("tp", mesh(tp=4)),
        ("cp", mesh(cp=4)),
        ("dp_shard", mesh(dp_shard=4)),
        ("context", comm(context="exchange")),
        ("reduces_late", comm(overlap=False)),
    ],
)
def test_a_plan_with_one_more_thing_is_less_simple(field: str, change: dict[str, Any]) -> None:
    one = complexity(FoundPlan(1.0, PLAIN))._asdict()
    other = complexity(FoundPlan(1.0, PLAIN.model_copy(update=change)))._asdict()
    assert {name for name in one if one[name] != other[name]} - {"ep"} == {field}
    assert other[field] > one[field]


def test_an_expert_axis_of_higher_degree_is_less_simple() -> None:
    two, four = (complexity(FoundPlan(1.0, PLAIN.model_copy(update=mesh(ep=ep)))) for ep in (2, 4))
    assert four._replace(ep=two.ep) == two < four


def test_replicas_of_shards_are_less_simple_than_shards_alone() -> None:
    shards = complexity(FoundPlan(1.0, PLAIN.model_copy(update=mesh(dp_replicate=1))))
    both = complexity(FoundPlan(1.0, PLAIN))
    assert both._replace(has_replicas_of_shards=False) == shards < both


def test_pinned_host_memory_counts_more_than_axes_and_a_full_device() -> None:
    plain = Plan(mesh=Mesh(tp=2))
    pinned = FoundPlan(1.0, Plan(), is_nearly_full=False, pinned_fraction=0.01)
    assert complexity(FoundPlan(1.0, plain, is_nearly_full=True)) < complexity(pinned)
    assert complexity(FoundPlan(1.0, Plan())) < complexity(FoundPlan(1.0, Plan(), is_nearly_full=True))


def test_recompute_of_every_few_layers_is_between_selective_and_full() -> None:
    levels = [
        complexity(FoundPlan(1.0, Plan(recompute=each))) for each in ("none", "elementwise", "selective", 2, "full")
    ]
    assert levels == sorted(set(levels))
