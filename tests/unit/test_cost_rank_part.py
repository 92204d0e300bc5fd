"""The part of each pipeline rank, worked by hand."""

from dataclasses import replace
from typing import Any

import pytest

from trimaran.core import Plan
from trimaran.cost import (
    Job,
    distinct_parts,
    find_stack,
    head_memory,
    memory_inputs_of,
    nanotron_stages,
    num_owned,
    num_owned_in,
    parts_of,
    peak_memory_of,
    pipeline_order,
    predict,
    stage_memory_of,
)
from trimaran.machine import Cluster, find_device
from trimaran.models import PRESETS, ModelSpec, Outline, OutlineLayer, Tower, outline_of

TINY, MIXTURE = PRESETS["tiny"], PRESETS["tiny-moe"]
ENDS = TINY.vocab * TINY.hidden
H100 = Cluster(device=find_device("H100"), devices_per_node=4)
# The Llama shape of nanotron's published runs with 1B: the head weighs as much as four layers.
LAYER = OutlineLayer(hidden=2048, heads=32, kv_heads=32, head_dim=64, ffn=8192, extras=4096)
LLAMA = Outline(
    name="llama-like-1B",
    towers=(
        Tower(
            name="language", runs=((LAYER, 16),), hidden=2048, vocab=131072, outputs=131072, tied=True, extras=2048
        ),
    ),
)  # fmt: skip


def pipeline(schedule: str, *, pp: int, count: int, **fields: Any) -> Plan:
    return Plan.model_validate({"mesh": {"pp": pp}, "pipeline": {"schedule": schedule}, "grad_accum": count} | fields)


@pytest.mark.parametrize("tied", [True, False])
def test_one_rank_holds_all_parameters(tied: bool) -> None:
    for spec in (replace(TINY, tied=tied), replace(MIXTURE, tied=tied), PRESETS["qwen2.5-0.5b"]):
        (part,) = parts_of(outline_of(spec), Plan(), seq_len=64)
        assert part.parameters == part.trained == spec.num_parameters
        assert part.root == spec.vocab * spec.hidden * (1 if spec.tied else 2)


@pytest.mark.parametrize(("tied", "copies"), [(True, 1), (False, 0)])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble"])
def test_stages_hold_every_parameter_once_but_a_tied_embedding_twice(schedule: str, tied: bool, copies: int) -> None:
    spec = replace(TINY, tied=tied)
    parts = parts_of(outline_of(spec), pipeline(schedule, pp=2, count=4), seq_len=64)
    assert sum(part.layers for part in parts) == 4
    assert sum(part.parameters for part in parts) == spec.num_parameters + copies * ENDS
    heads = [part.head_tower is not None for part in parts]
    assert heads == ([True, False] if schedule == "zero-bubble" else [False, True])


def test_a_split_tower_holds_parameters_outside_its_blocks_once() -> None:
    layer = OutlineLayer(hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=256)
    vision = Tower(name="vision", runs=((layer, 6),), hidden=64, extras=1000, positions=64)
    language = Tower(name="language", runs=((layer, 2),), hidden=64, vocab=100, outputs=100, extras=64)
    outline = Outline(name="both", towers=(vision, language))
    parts = parts_of(outline, pipeline("1f1b", pp=4, count=4, pipeline={"stages": (2, 2, 2, 2)}), seq_len=64)
    assert sum(part.parameters for part in parts) == outline.num_parameters


def test_tp_and_ep_divide_the_parameters() -> None:
    plan = Plan.model_validate({"mesh": {"tp": 2, "ep": 4, "dp_shard": 8}, "sharding": "parameters"})
    outline = outline_of(MIXTURE)
    (part,) = parts_of(outline, plan, seq_len=64)
    assert part.experts == 4 * 3 * 128 * 96 * 8 // 8
    assert num_owned(plan.mesh, part.holdings[0], "parameters") == part.dense / 8 + part.experts / 2
    (alone,) = parts_of(outline, Plan(), seq_len=64)
    assert part.dense < alone.dense < 2 * part.dense  # norms and routers are not split


def test_the_largest_part_of_an_odd_vocabulary_counts() -> None:
    outline = outline_of(replace(TINY, vocab=32_002, tied=False))
    plan = Plan.model_validate({"mesh": {"tp": 3}})
    (part,) = parts_of(outline, plan, seq_len=64)
    assert (part.embedding, part.head) == (10_668 * TINY.hidden, 10_668 * TINY.hidden)
    job = Job(outline=outline, seq_len=64)
    assert head_memory(memory_inputs_of(job, H100, plan), part).logits == pytest.approx(8 * 64 * 10_668)  # in fp32


@pytest.mark.parametrize(("sharding", "shards"), [("none", 1), ("parameters", 4)])
def test_a_tower_that_tensor_parallel_ranks_do_not_split_is_whole_or_sharded_over_them(
    sharding: str, shards: int
) -> None:
    layer = OutlineLayer(hidden=64, heads=5, kv_heads=5, head_dim=16, ffn=256)
    vision = Tower(name="vision", runs=((layer, 6),), hidden=64, positions=5 * 256, segment=256)
    job = Job(outline=Outline(name="both", towers=(vision, outline_of(TINY).main)), seq_len=64)
    plan = Plan.model_validate(
        {"mesh": {"tp": 4}, "micro_batch": 2, "towers": {"vision": {"tp": 1, "sharding": sharding}}}
    )
    (part,) = parts_of(job.outline, plan, seq_len=64)
    seeing, reading = part.holdings
    assert seeing.parameters == vision.parameters
    assert reading.parameters < TINY.num_parameters / 3
    assert num_owned_in(job, plan, seeing) == vision.parameters / shards
    # Ten images on four ranks: two of them encode three.
    assert job.positions(vision, plan) == 3 * 256
    assert job.positions(job.outline.main, plan) == 2 * 64


def test_a_frozen_tower_is_not_trained_and_counts_apart() -> None:
    vision = OutlineLayer(hidden=8, heads=2, kv_heads=2, head_dim=4, ffn=16, gated=False, extras=16)
    towers = (Tower(name="vision", runs=((vision, 3),), hidden=8, extras=5, frozen=True), outline_of(TINY).main)
    (part,) = parts_of(Outline(name="vlm", towers=towers), Plan(), seq_len=64)
    assert [holding.tower.name for holding in part.holdings] == ["vision", "language"]
    assert part.frozen == towers[0].parameters
    assert part.trained == TINY.num_parameters


@pytest.mark.parametrize(
    ("schedule", "count", "in_flight"),
    [
        ("gpipe", 8, [8, 8, 8, 8]),
        ("1f1b", 8, [4, 3, 2, 1]),
        ("1f1b", 4, [4, 3, 2, 1]),
        ("interleaved", 8, [5.5, 4.5, 3.5, 2.5]),  # 11, 9, 7 and 5 stages with two per rank
        ("interleaved", 7, [7, 6, 5, 4]),  # one round of seven
        ("zero-bubble", 8, [4, 4, 3, 3.5]),
    ],
)
def test_as_many_micro_batches_are_in_flight_as_the_schedule_starts(
    schedule: str, count: int, in_flight: list[float]
) -> None:
    deep = outline_of(replace(TINY, layers=8))
    assert [part.in_flight for part in parts_of(deep, pipeline(schedule, pp=4, count=count), seq_len=64)] == in_flight


@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (4, 8), (4, 16), (8, 16)])
def test_a_zero_bubble_rank_holds_the_most_when_its_schedule_does(ranks: int, count: int) -> None:
    order = pipeline_order("zero-bubble", ranks=ranks, num_stages=2 * ranks, micro_batches=count)
    deep = outline_of(replace(TINY, layers=2 * ranks))
    parts = parts_of(deep, pipeline("zero-bubble", pp=ranks, count=count), seq_len=64)
    for part, passes in zip(parts, order.passes, strict=True):
        started = finished = with_gradients = 0
        held = []
        for each in passes:
            started += each.kind == "forward"
            with_gradients += each.kind in ("backward", "input_grad")
            finished += each.kind in ("backward", "weight_grad")
            held.append((started - finished, with_gradients - finished))
        # Of a layer, deferred gradients are about 0.6 of its activations.
        fullest = max(held, key=lambda both: both[0] + 0.6 * both[1])
        assert (2 * part.in_flight, 2 * part.deferred) == fullest


def test_the_memory_of_messages_does_not_grow_with_the_number_of_micro_batches() -> None:
    def activations(count: int) -> int:
        job = Job(outline=outline_of(TINY), seq_len=64)
        return stage_memory_of(job, H100, pipeline("1f1b", pp=2, count=count), 0).terms["activations"]

    assert activations(64) == activations(4)


def test_gpipe_holds_the_logits_of_all_micro_batches() -> None:
    def logits(schedule: str) -> int:
        wide = Job(outline=outline_of(replace(TINY, vocab=32_000)), seq_len=64)
        return peak_memory_of(wide, H100, pipeline(schedule, pp=2, count=4)).terms["logits"]

    assert logits("1f1b") == 12 * 64 * 32_000
    assert logits("gpipe") == (12 + 3 * 8) * 64 * 32_000


def test_ranks_that_hold_no_more_than_another_are_skipped() -> None:
    deep = outline_of(replace(TINY, layers=8, vocab=16))
    parts, has_work = distinct_parts(deep, pipeline("1f1b", pp=8, count=8), 64, "cheapest")
    assert [(part.in_flight, part.head_tower is not None) for part in parts] == [(8, False), (1, True)]
    assert has_work


def test_the_peak_is_that_of_the_fullest_rank() -> None:
    def terms(spec: ModelSpec) -> dict[str, int]:
        job = Job(outline=outline_of(spec), seq_len=256)
        return dict(peak_memory_of(job, H100, pipeline("1f1b", pp=4, count=8, micro_batch=8)).terms)

    assert "logits" not in terms(TINY)  # the first rank, which has four micro-batches in flight
    assert "logits" in terms(replace(TINY, vocab=32_000))  # the last one, which has the vocabulary


def test_nanotron_fills_a_stage_until_it_exceeds_its_fraction() -> None:
    # Weights are 16 layers and a head of 4: half is 10, and the eleventh layer is the first to exceed it.
    assert nanotron_stages(LLAMA, 2) == ((11, 5), (12, 9))
    # Of 16 shares of 1.25 the first takes two layers. Norm and head make the 13th, cast and loss the next two.
    layers, modules = nanotron_stages(LLAMA, 16)
    assert layers == (2, 1, 1, 2, 1, 1, 1, 2, 1, 1, 1, 2, 0, 0, 0, 0)
    assert modules[12:] == (2, 1, 1, 0)


def test_a_plan_with_an_empty_stage_does_not_fit() -> None:
    nanotron = Job(outline=LLAMA, seq_len=4096, stack=find_stack("nanotron"))
    cluster = Cluster(device=find_device("H100"), num_nodes=2, devices_per_node=8)

    def fits(pp: int, count: int) -> bool:
        return predict(nanotron, cluster, pipeline("1f1b", pp=pp, count=count, precision="bf16")).fits

    assert fits(8, 8)
    assert not fits(16, 16)
    assert fits(8, 7)
    assert not fits(8, 6)  # its schedule wants a micro-batch for every stage but one
