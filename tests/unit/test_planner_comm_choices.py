"""The planner's choice of bucket size and prefetch depth, from latency and bandwidth."""

import time
from dataclasses import replace

import pytest

from trimaran.core import Plan, Seconds, parse_recipe
from trimaran.cost import GatheredUnit, exposed_gathers, exposed_reduction, ring_of
from trimaran.machine import parse_cluster
from trimaran.models import outline_if_known, spec_of
from trimaran.planner import Question, choose, choose_comm, search

MEBIBYTE = 1 << 20


def question_of(*settings: str, cluster: str = "4x8xH100", preset: str = "llama-3.2-1b", batch: int = 256) -> Question:
    fields = [f"model.preset={preset}", f"cluster={cluster}", "data.seq_len=2048", f"train.global_batch={batch}"]
    recipe = parse_recipe("", name="test", overrides=[*fields, *settings])
    outline = outline_if_known(recipe.model, recipe.data)
    spec = spec_of(recipe.model)
    return Question(recipe=recipe, spec=spec, outline=outline, cluster=parse_cluster(cluster), max_plans=1)


def replicas(degree: int = 32, **fields: object) -> Plan:
    tree = {"mesh": {"dp_replicate": degree}, "precision": "bf16", "micro_batch": 8, "recompute": "selective"}
    return Plan.model_validate(tree | fields)


def slower(question: Question, *, latency: float = 1.0, bandwidth: float = 1.0) -> Question:
    """Return the question on links with so many times the latency and the bandwidth."""
    links = tuple(
        replace(
            each,
            latency=Seconds(each.latency * latency),
            bandwidth=each.bandwidth * bandwidth,
            reached={name: rate * bandwidth for name, rate in each.reached.items()},
        )
        for each in question.cluster.levels
    )
    return replace(question, cluster=replace(question.cluster, links=links))


def test_small_buckets_pay_latency_and_large_ones_are_exposed_at_the_end() -> None:
    ring = ring_of(parse_cluster("4x8xH100").levels, 32, 1)
    num_bytes = 4e9
    by_size = [exposed_reduction(num_bytes, size * MEBIBYTE, ring, backward=0.4) for size in (1, 50, 4000)]
    assert by_size[0] > 2 * by_size[1] < by_size[2]
    whole = exposed_reduction(num_bytes, num_bytes, ring, backward=0.4)
    assert exposed_reduction(num_bytes, 9 * num_bytes, ring, backward=0.4) == whole, "there is one bucket at least"


def test_between_equal_units_no_prefetch_depth_helps_and_between_unequal_ones_it_does() -> None:
    equal = [GatheredUnit(2.0, 1.0)] * 8
    assert exposed_gathers(equal, 1) == pytest.approx(exposed_gathers(equal, 4)) == pytest.approx(9.0)
    unequal = [GatheredUnit(0.5, 1.0), GatheredUnit(0.5, 1.0), GatheredUnit(2.0, 1.0)] * 4
    assert exposed_gathers(unequal, 2) < 0.5 * exposed_gathers(unequal, 1)
    assert exposed_gathers([GatheredUnit(0.5, 1.0)] * 8, 1) == pytest.approx(0.5), "only the first is exposed"


def test_fast_links_keep_the_default() -> None:
    for cluster, degree in (("8xH100", 8), ("2xH100", 2)):
        found = choose_comm(replicas(degree), question_of(cluster=cluster))
        assert found.plan.comm.bucket_mb == 25
        assert found.reasons == ()


def test_a_high_latency_asks_for_larger_buckets_and_says_why() -> None:
    found = choose_comm(replicas(), slower(question_of(), latency=10))
    assert found.plan.comm.bucket_mb > 25
    (reason,) = found.reasons
    assert f"comm.bucket_mb {found.plan.comm.bucket_mb}" in reason
    assert "shorten steps by" in reason


def test_a_pinned_bucket_and_reductions_without_buckets_stay() -> None:
    slow = slower(question_of("plan.comm.bucket_mb=25"), latency=10)
    assert choose_comm(replicas(), slow).plan.comm.bucket_mb == 25
    slow = slower(question_of(), latency=10)
    for plan in (
        replicas(comm={"overlap": False}),
        replicas(comm={"compression": "bf16"}),
        replicas(comm={"local_steps": 8}),
        replicas(16, mesh={"dp_replicate": 16, "tp": 2}),
    ):
        assert choose_comm(plan, slow).plan == plan


def test_the_choice_is_part_of_the_answer_and_of_the_plan_that_trains() -> None:
    question = slower(question_of("plan.sharding=none", "plan.mesh.tp=1", "plan.comm.overlap=true"), latency=10)
    answer = search(question)
    assert answer.ranked[0].comm.bucket_mb > 25
    assert any("comm.bucket_mb" in each for each in answer.choices)
    chosen = choose(question.recipe, question.spec, question.cluster, question.outline)
    assert chosen.comm.bucket_mb == answer.ranked[0].comm.bucket_mb


def test_another_system_and_an_unknown_model_keep_their_settings() -> None:
    slow = slower(question_of(), latency=10)
    assert choose_comm(replicas(), replace(slow, for_trainer=False)).plan == replicas()
    assert choose_comm(replicas(), replace(slow, outline=None)).plan == replicas()
    deepspeed = replicas(engine="deepspeed", sharding="optimizer")
    assert choose_comm(deepspeed, slow).plan == deepspeed


def test_sharded_plans_keep_their_settings_where_blocks_are_large_and_equal() -> None:
    plan = replicas(mesh={"dp_shard": 32}, sharding="parameters")
    for latency, bandwidth in ((1.0, 1.0), (1.0, 0.1)):
        found = choose_comm(plan, slower(question_of(), latency=latency, bandwidth=bandwidth))
        assert found.plan.comm.prefetch == 1


def test_small_layers_share_larger_units_where_latency_is_high_and_memory_allows_it() -> None:
    shape = "model.shape={layers: 48, hidden: 512, heads: 8, kv_heads: 8, ffn: 2048, vocab: 32000}"
    plan = replicas(mesh={"dp_shard": 32}, sharding="parameters")
    found = choose_comm(plan, slower(question_of(shape), latency=10))
    assert found.plan.comm.bucket_mb > 25
    assert "small layers share units" in found.reasons[0]
    assert choose_comm(plan, question_of(shape, "plan.comm.bucket_mb=25")).plan == plan


def test_a_choice_takes_a_few_milliseconds() -> None:
    question, plan = slower(question_of(), latency=10), replicas()
    choose_comm(plan, question)
    begin = time.process_time()
    for _ in range(10):
        choose_comm(plan, question)
    assert (time.process_time() - begin) / 10 < 0.1
