"""The plan that a search finds is legal, fits, and no plan of the space is better."""

import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from trimaran.core import CONTEXTS, GIB, Bytes, Comm, Flops, Mesh, Pipeline, Plan, Recipe, UserError, show_bytes
from trimaran.cost import predict
from trimaran.machine import DEVICES, Cluster, parse_cluster
from trimaran.models import (
    PRESETS,
    Block,
    ExpertSpec,
    ModelSpec,
    Opaque,
    Outline,
    OutlineLayer,
    Tower,
    outline_of,
    split_outline,
)
from trimaran.planner import (
    GOALS,
    TIE_RATIO,
    PlanEvaluator,
    Question,
    Space,
    check_plan,
    find_plans,
    fits_on,
    resized_cluster,
    search,
    smallest_cluster,
)


def question_for(spec: ModelSpec, text: str, *, batch: int, seq_len: int, **more: object) -> Question:
    recipe = Recipe.model_validate(
        {"data": {"seq_len": seq_len}, "train": {"global_batch": batch}, "plan": more.pop("plan", "auto")}
    )
    return Question(
        recipe=recipe,
        spec=spec,
        outline=outline_of(spec),
        cluster=parse_cluster(text),
        **more,  # type: ignore[arg-type]
    )


def every_plan(question: Question) -> Iterator[Plan]:
    """Yield every plan that can run, enumerated without the planner's own space."""
    world, batch = question.cluster.world_size, question.recipe.train.global_batch
    degrees = [each for each in range(1, world + 1) if world % each == 0]
    assert question.outline is not None
    for shard, tp, pp, cp, ep in product(degrees, repeat=5):
        replicas, left = divmod(world, shard * tp * pp * cp)
        if left or not replicas or batch % (replicas * shard):
            continue
        if tp > question.cluster.devices_per_node:
            continue  # the planner keeps tp inside a node
        mesh = Mesh(dp_replicate=replicas, dp_shard=shard, tp=tp, pp=pp, cp=cp, ep=ep)
        share = batch // mesh.dp
        sizes = [each for each in range(1, share + 1) if share % each == 0]
        for pipeline, size in product(pipelines(question, pp), sizes):
            for plan in plans_with(mesh, pipeline, size, share // size):
                try:
                    check_plan(plan, question.recipe, question.spec, question.cluster)
                except UserError:
                    continue
                yield plan


def pipelines(question: Question, pp: int) -> Iterator[Pipeline]:
    if pp == 1:
        yield Pipeline()
        return
    assert question.outline is not None
    rounds = {"gpipe": (1,), "1f1b": (1,), "interleaved": (2, 3, 4, 5, 6, 7, 8), "zero-bubble": (2,)}
    for schedule, each in ((name, num) for name, nums in rounds.items() for num in nums):
        if each * pp <= question.outline.layers:
            stages = split_outline(question.outline, each * pp, seq_len=question.recipe.data.seq_len)
            yield Pipeline(schedule=schedule, stages=stages)  # type: ignore[arg-type]


def plans_with(mesh: Mesh, pipeline: Pipeline, size: int, count: int) -> Iterator[Plan]:
    cut = mesh.pp > 1 and pipeline.schedule == "zero-bubble"
    base = Plan.model_construct(
        mesh=mesh, pipeline=pipeline, micro_batch=size, grad_accum=count, precision="bf16", compile=not cut
    )
    losses = ("fused", "chunked") if mesh.tp == mesh.pp == 1 else ("logits",)
    comms = [{"context": each} for each in (CONTEXTS if mesh.cp > 1 else ("gather",))]
    comms += [{"overlap": False}] if mesh.world_size == mesh.dp_replicate > 1 else []
    for sharding, recompute, offload, comm, loss in product(
        ("none", "optimizer", "gradients", "parameters"), ("none", "selective", 2, "full"),
        ("none", "activations", "optimizer", "parameters"), map(Comm.model_validate, comms), losses,
    ):  # fmt: skip
        fields = {"sharding": sharding, "recompute": recompute, "offload": offload, "comm": comm, "loss": loss}
        yield base.model_copy(update=fields)


def small_spec(layers: int, heads: int, kv_heads: int, experts: int) -> ModelSpec:
    block = Block(experts=ExpertSpec(num_experts=experts, top_k=2, ffn=1024)) if experts else Block()
    return ModelSpec(
        name="small", layers=layers, hidden=128 * heads, heads=heads, kv_heads=kv_heads, head_dim=128, ffn=4096,
        vocab=32_000, max_seq_len=65_536, block=block,
    )  # fmt: skip


SPECS = st.builds(
    small_spec, st.integers(2, 6), st.sampled_from([16, 32]), st.sampled_from([2, 8]), st.sampled_from([0, 4])
)


@pytest.mark.slow
@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    spec=SPECS,
    nodes=st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (1, 4)]),
    gib=st.sampled_from([6.0, 8.0, 12.0, 16.0, 24.0]),
    batch=st.sampled_from([2, 3, 4]),
    seq_len=st.sampled_from([2048, 8192]),
)
def test_no_plan_of_any_small_space_beats_the_search(
    spec: ModelSpec, nodes: tuple[int, int], gib: float, batch: int, seq_len: int
) -> None:
    assert_no_plan_beats_the_search(spec, nodes, gib, batch, seq_len)


@pytest.mark.parametrize(
    ("layers", "experts", "nodes", "gib", "batch", "seq_len"),
    [
        (2, 0, (1, 1), 6.0, 2, 8192),
        (4, 0, (1, 2), 8.0, 4, 2048),
        (2, 4, (2, 1), 16.0, 2, 8192),
        (3, 0, (2, 2), 6.0, 2, 2048),
    ],
)  # fmt: skip
def test_no_plan_of_a_small_space_beats_the_search(
    layers: int, experts: int, nodes: tuple[int, int], gib: float, batch: int, seq_len: int
) -> None:
    assert_no_plan_beats_the_search(small_spec(layers, 16, 2, experts), nodes, gib, batch, seq_len)


def assert_no_plan_beats_the_search(
    spec: ModelSpec, nodes: tuple[int, int], gib: float, batch: int, seq_len: int
) -> None:
    device = replace(DEVICES["H100"], memory_bytes=Bytes(int(gib * GIB)))
    cluster = Cluster(device=device, num_nodes=nodes[0], devices_per_node=nodes[1], host_bytes=Bytes(64 * GIB))
    question = replace(question_for(spec, "H100", batch=batch, seq_len=seq_len), cluster=cluster)
    space = Space(question)
    found = find_plans(space, PlanEvaluator(space)).ranked()
    assert [each.plan for each in found] == [each.plan for each in find_plans(space, PlanEvaluator(space)).ranked()]
    fitting = [each for each in (predict(question.job, cluster, plan) for plan in every_plan(question)) if each.fits]
    assert bool(found) == bool(fitting)
    if fitting:
        best = found[0]
        check_plan(best.plan, question.recipe, spec, cluster)
        prediction = predict(question.job, cluster, best.plan)
        assert prediction.fits
        assert prediction.step_seconds == pytest.approx(best.seconds)
        assert best.seconds <= TIE_RATIO * min(each.step_seconds for each in fitting) * (1 + 1e-9)


def test_every_goal_is_met() -> None:
    question = question_for(PRESETS["llama-3-8b"], "2xH100", batch=16, seq_len=4096)
    fast, lean, cheap, few = (search(replace(question, goal=goal)) for goal in GOALS[:4])
    predictions = [answer.ranked[0].prediction for answer in (fast, lean, cheap, few)]
    assert all(each is not None and each.fits for each in predictions)
    seconds = [each.step_seconds for each in predictions if each is not None]
    used = [each.device_bytes for each in predictions if each is not None]
    assert seconds[0] == min(seconds)
    assert used[1] == min(used)
    worlds = [answer.ranked[0].mesh.world_size for answer in (fast, lean, cheap, few)]
    assert worlds[:2] == [2, 2]
    assert seconds[2] * worlds[2] <= TIE_RATIO * min(time * world for time, world in zip(seconds, worlds, strict=True))
    # One device: weights, gradients and moments are 120 GiB, and an H100 has 79. The host has enough memory.
    assert (worlds[3], few.ranked[0].offload != "none", str(few.part)) == (1, True, "1xH100")


def test_ranked_plans_have_different_meshes_and_misses_say_why_they_lost() -> None:
    answer = search(question_for(PRESETS["llama-3-8b"], "8xH100", batch=64, seq_len=8192))
    cuts = [(plan.mesh.tp, plan.mesh.pp, plan.mesh.cp, plan.mesh.ep) for plan in answer.ranked]
    assert len(cuts) == len(set(cuts)) >= 4
    best = answer.ranked[0]
    assert best.prediction is not None
    for miss in answer.misses:
        assert miss.plan.prediction is not None
        assert ("over" in miss.why) == (not miss.plan.prediction.fits)
    assert any(miss.why.endswith("GiB over") for miss in answer.misses)
    assert any("recompute costs" in miss.why for miss in answer.misses)
    slower = [plan.prediction.step_seconds for plan in answer.ranked[1:] if plan.prediction]
    assert best.prediction.step_seconds <= TIE_RATIO * min(slower)


def test_a_hint_is_true() -> None:
    question = question_for(PRESETS["llama-3-8b"], "8xH100", batch=64, seq_len=8192)
    answer = search(question)
    advice, _, claim = next(hint for hint in answer.hints if hint.startswith("use ")).partition(":")
    larger = search(replace(question, cluster=parse_cluster(advice.removeprefix("use "))))
    before, after = answer.ranked[0].prediction, larger.ranked[0].prediction
    assert before is not None
    assert after is not None
    assert before.step_seconds / after.step_seconds >= float(claim.split()[0]) - 0.01


SLOW_LINK = {"name": "internet", "gb_per_second": 0.125, "latency_us": 2e4}


def test_on_a_slow_link_hints_name_what_synchronises_less_and_it_is_as_fast_as_they_say(tmp_path: Path) -> None:
    file = tmp_path / "two-sites.yaml"
    file.write_text(json.dumps({"device": "H100", "num_nodes": 2, "devices_per_node": 2, "links": [SLOW_LINK]}))
    question = question_for(PRESETS["llama-3.2-1b"], str(file), batch=64, seq_len=2048)
    answer = search(question)
    hint = next(hint for hint in answer.hints if hint.startswith("synchronise less often"))
    settings_text, _, claim = hint.partition(", which changes the results: ")
    assert "plan.mesh.dp_replicate=2" in settings_text
    local = re.search(r"local_steps=({.*})'", settings_text)
    assert local is not None
    plan = {"mesh": {"dp_replicate": 2}, "comm": {"local_steps": yaml.safe_load(local[1])}}
    followed = search(question_for(PRESETS["llama-3.2-1b"], str(file), batch=64, seq_len=2048, plan=plan))
    assert answer.ranked[0].prediction is not None
    assert followed.ranked[0].prediction is not None
    gain = answer.ranked[0].prediction.step_seconds / followed.ranked[0].prediction.step_seconds
    assert float(claim.split()[0]) == pytest.approx(gain, rel=0.05)
    assert gain > 3
    near = search(question_for(PRESETS["llama-3.2-1b"], "2x2xH100", batch=64, seq_len=2048))
    assert not [hint for hint in near.hints if "changes the results:" in hint and "plan.comm" in hint]


def test_local_steps_are_named_although_a_pipeline_is_the_fastest_exact_plan(tmp_path: Path) -> None:
    file = tmp_path / "two-sites.yaml"
    link = SLOW_LINK | {"gb_per_second": 0.005}  # so slow that the speed of this CPU decides nothing
    file.write_text(json.dumps({"device": "cpu", "num_nodes": 2, "devices_per_node": 1, "links": [link]}))
    answer = search(question_for(PRESETS["tiny"], str(file), batch=16, seq_len=64))
    assert answer.ranked[0].mesh.pp == 2
    named = [hint for hint in answer.hints if "changes the results:" in hint and "plan.comm" in hint]
    assert [hint.startswith("synchronise less often") for hint in named] == [True]


def test_if_nothing_fits_the_smallest_plan_and_cluster_are_named() -> None:
    pins = {"offload": "none", "mesh": {"ep": 1, "cp": 1, "pp": 1}}
    question = question_for(PRESETS["llama-3-70b"], "8xH100", batch=64, seq_len=2048, plan=pins)
    answer = search(question)
    assert answer.ranked == ()
    smallest = answer.misses[0]
    assert smallest.plan.prediction is not None
    assert answer.missing_bytes == smallest.plan.prediction.device_bytes - question.cluster.device.memory_bytes > 0
    assert smallest.why.endswith("GiB over")
    assert answer.smallest is not None
    assert search(replace(question, cluster=answer.smallest)).ranked
    fewer = replace(answer.smallest, num_nodes=answer.smallest.num_nodes - 1)
    assert not search(replace(question, cluster=fewer)).ranked
    assert "leave plan.offload out: a plan fits" in answer.hints


@pytest.mark.slow
def test_the_smallest_cluster_may_have_any_number_of_nodes() -> None:
    question = question_for(PRESETS["llama-3-70b"], "1xA100-40GB", batch=5040, seq_len=4096, plan={"offload": "none"})
    found = smallest_cluster(question)
    assert found is not None
    sizes = [resized_cluster(found, num, found.devices_per_node) for num in range(1, found.num_nodes)]
    assert fits_on(question, found)
    assert not any(fits_on(question, each) for each in sizes)
    few = search(replace(question, cluster=resized_cluster(found, 16, found.devices_per_node), goal="fewest-gpus"))
    assert few.part == found


def test_missing_memory_is_reported_for_device_and_host() -> None:
    cluster = replace(parse_cluster("8xH100"), host_bytes=Bytes(64 * GIB))
    pins = {"offload": "optimizer", "mesh": {"dp_replicate": 8}, "recompute": "none", "micro_batch": 8}
    question = replace(
        question_for(PRESETS["llama-3-70b"], "8xH100", batch=64, seq_len=8192, plan=pins), cluster=cluster
    )
    answer = search(question)
    prediction = answer.misses[0].plan.prediction
    assert prediction is not None
    over = show_bytes(Bytes(prediction.device_bytes - cluster.device.memory_bytes))
    host = show_bytes(Bytes(prediction.host_bytes - int(0.9 * 64 * GIB)))
    assert answer.missing == f"{over} of device memory and {host} of host memory a node"
    assert answer.misses[0].why == f"{over} over, {host} over on the host"


@pytest.mark.slow
def test_each_ranked_mesh_is_about_as_fast_as_when_it_is_pinned() -> None:
    question = question_for(PRESETS["llama-3-70b"], "8x8xH100", batch=512, seq_len=4096)
    first, *others = search(question).ranked
    times = [plan.prediction.step_seconds for plan in others if plan.prediction]
    assert times == sorted(times)
    for plan, seconds in zip(others, times, strict=True):
        mesh = Mesh(tp=plan.mesh.tp, pp=plan.mesh.pp, cp=plan.mesh.cp, ep=plan.mesh.ep)
        space = Space(replace(question, recipe=question.recipe.model_copy(update={"plan": Plan(mesh=mesh)})))
        without = space.without_offload() if plan.offload == "none" else space
        assert seconds <= 1.1 * find_plans(without, PlanEvaluator(space)).ranked()[0].seconds
    for most in (1, 3, 12):
        shown = search(replace(question, max_plans=most)).ranked
        assert shown[0] == first
        assert len(shown) == most or 8 <= len(shown) < most


def test_a_miss_is_faster_only_in_a_tie_or_against_a_pin() -> None:
    pins = {"recompute": "full", "micro_batch": 1}
    pinned = question_for(PRESETS["llama-3.2-3b"], "8xH100", batch=64, seq_len=4096, plan=pins)
    assert any(miss.why.endswith("faster, and plan.recompute is pinned") for miss in search(pinned).misses)
    lean = search(question_for(PRESETS["llama-3-8b"], "8xH100", batch=64, seq_len=4096, goal="memory"))
    assert all("chance" not in miss.why for miss in lean.misses)
    assert any(miss.why.startswith("needs ") for miss in lean.misses)


def test_the_sequence_length_does_not_matter_for_fixed_positions() -> None:
    layer = OutlineLayer(hidden=1024, heads=16, kv_heads=16, head_dim=64, ffn=4096, gated=False)
    outline = Outline(name="vit", towers=(Tower(name="vision", runs=((layer, 24),), hidden=1024, positions=257),))
    answers = []
    for seq_len in (128, 65_536):
        recipe = Recipe.model_validate({"data": {"seq_len": seq_len}, "train": {"global_batch": 4096}})
        question = Question(
            recipe=recipe, spec=None, outline=outline, cluster=parse_cluster("8xH100"), for_trainer=False
        )
        answers.append(search(question))
    short, long = answers
    assert short.ranked == long.ranked
    assert short.hints == long.hints
    assert short.ranked[0].micro_batch >= 32


def test_a_nearly_full_device_causes_a_warning() -> None:
    pins = {"mesh": {"dp_shard": 8}, "sharding": "parameters", "recompute": "none", "offload": "none", "micro_batch": 1}
    answer = search(question_for(PRESETS["llama-3-8b"], "8xH100", batch=64, seq_len=8192, plan=pins))
    plan = answer.ranked[0]
    assert plan.prediction is not None
    occupancy = plan.prediction.device_bytes / DEVICES["H100"].memory_bytes
    assert any("full" in warning for warning in answer.warnings) == (occupancy * (1 + plan.prediction.error) > 1)


def towers(heads: int = 16) -> Outline:
    """A small vision-language model; its vision tower has `heads` heads."""
    seeing = OutlineLayer(
        hidden=128 * heads, heads=heads, kv_heads=heads, head_dim=128, ffn=8192, gated=False, causal=False
    )
    reading = OutlineLayer(hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336)
    return Outline(
        name="both",
        towers=(
            Tower(name="vision", runs=((seeing, 24),), hidden=128 * heads, positions=4096, segment=1024),
            Tower(name="language", runs=((reading, 24),), hidden=4096, vocab=32_000, outputs=32_000),
        ),
    )


def test_an_unknown_model_is_split_for_other_stacks_and_sharded_in_our_trainer() -> None:
    recipe = Recipe.model_validate(
        {"model": {"family": "hf", "path": "."}, "data": {"seq_len": 4096}, "train": {"global_batch": 32}}
    )
    question = Question(recipe=recipe, spec=None, outline=towers(), cluster=parse_cluster("4xA100-40GB"))
    trained = search(question)
    assert {(plan.mesh.tp, plan.mesh.pp, plan.mesh.cp) for plan in trained.ranked} == {(1, 1, 1)}
    paper = search(replace(question, for_trainer=False))
    assert {plan.mesh.pp for plan in paper.ranked} > {1}
    before, after = trained.ranked[0].prediction, paper.ranked[0].prediction
    assert before is not None
    assert after is not None
    assert after.step_seconds <= TIE_RATIO * before.step_seconds
    assert any("freeze vision" in hint for hint in paper.hints)


def test_tp_divides_the_heads_of_every_tower() -> None:
    recipe = Recipe.model_validate({"data": {"seq_len": 4096}, "train": {"global_batch": 32}})
    question = Question(
        recipe=recipe, spec=None, outline=towers(heads=5), cluster=parse_cluster("2xH100"), for_trainer=False
    )
    assert {plan.mesh.tp for plan in search(question).ranked} == {1}
    wanted = recipe.model_copy(update={"plan": Plan(mesh=Mesh(tp=2))})
    with pytest.raises(UserError, match="tp 2 does not divide the 5 heads of tower vision"):
        search(replace(question, recipe=wanted))


def test_an_opaque_block_is_not_split_by_tp() -> None:
    block = Opaque(
        name="block", parameters=10**8, sample_flops=Flops(10**12), saved_bytes=Bytes(10**8),
        moved_bytes=Bytes(10**9), output_bytes=Bytes(10**6),
    )  # fmt: skip
    outline = Outline(name="odd", towers=(Tower(name="all", runs=((block, 12),), hidden=1, positions=1),))
    recipe = Recipe.model_validate({"train": {"global_batch": 64}})
    question = Question(recipe=recipe, spec=None, outline=outline, cluster=parse_cluster("8xH100"), for_trainer=False)
    assert {(plan.mesh.tp, plan.mesh.cp) for plan in search(question).ranked} == {(1, 1)}
    with pytest.raises(UserError, match="P021"):
        search(replace(question, recipe=recipe.model_copy(update={"plan": Plan(mesh=Mesh(tp=2))})))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text", "batch", "seq_len", "limit"),
    [
        # A fast machine takes a fifth of it; cores that are shared with others take up to four times as long.
        ("llama-3-70b", "8x8xH100", 512, 4096, 10),
        ("qwen3-30b-a3b", "8x8xH100", 512, 4096, 10),
        ("llama-3.1-405b", "2048x8xH100", 2048, 8192, 12),
        ("qwen3-235b-a22b", "2048x8xH100", 16384, 4096, 12),
    ],
)
def test_a_search_takes_at_most_seconds(name: str, text: str, batch: int, seq_len: int, limit: float) -> None:
    question = question_for(PRESETS[name], text, batch=batch, seq_len=seq_len)
    start = time.process_time()  # other processes may use the same cores
    assert search(question).ranked
    assert time.process_time() - start < limit
