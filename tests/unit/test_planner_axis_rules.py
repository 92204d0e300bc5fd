"""Degrees that do not divide what they split are refused, and the error suggests some that do."""

from dataclasses import replace
from typing import Any

import pytest

from trimaran.core import DataSection, ModelSection, Plan, Recipe, TrainSection, UserError
from trimaran.machine import parse_cluster
from trimaran.models import PRESETS, ExpertSpec, HfFacts, ModelSpec
from trimaran.planner import check_hf_facts, check_plan

TINY, MIXTURE = PRESETS["tiny"], PRESETS["tiny-moe"]
EIGHT = parse_cluster("8xH100")


def check(mesh: dict[str, int], *, spec: ModelSpec | None = TINY, seq_len: int = 256, **rest: Any) -> None:
    """Check a plan on eight devices whose remaining ranks are replicas, with a matching batch."""
    filled = dict(mesh)
    for axis in ("tp", "pp", "cp"):
        filled.setdefault(axis, 1)
    filled.setdefault("dp_replicate", 8 // (filled["tp"] * filled["pp"] * filled["cp"] * filled.get("dp_shard", 1)))
    model = rest.pop("model", ModelSection())
    plan = Plan.model_validate({"mesh": filled, "grad_accum": 8} | rest)
    recipe = Recipe(
        model=model, data=DataSection(seq_len=seq_len), train=TrainSection(global_batch=plan.global_batch)
    )  # fmt: skip
    check_plan(plan, recipe, spec, EIGHT)


def refusal(mesh: dict[str, int], **rest: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        check(mesh, **rest)
    return caught.value


@pytest.mark.parametrize(
    "mesh", [{"tp": 2}, {"cp": 2}, {"pp": 2}, {"tp": 2, "pp": 2, "cp": 2}, {"tp": 2, "pp": 4}, {"cp": 8}]
)
def test_degrees_that_divide_the_model_are_legal(mesh: dict[str, int]) -> None:
    check(mesh)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"heads": 6}, "6 heads"),
        ({"kv_heads": 2}, "2 KV heads"),
        ({"ffn": 390}, "390 features of the feed-forward"),
    ],
)
def test_an_illegal_tp_names_what_it_does_not_divide(change: dict[str, int], name: str) -> None:
    fields: dict[str, Any] = {"heads": 8, "kv_heads": 4} | change
    spec = replace(TINY, **fields)
    error = refusal({"tp": 4}, spec=spec)
    assert (error.code, error.where, error.fix) == ("P008", "plan.mesh.tp", "use tp of 1 or 2")
    assert name in error.what


@pytest.mark.parametrize("family", ["decoder", "hf"])
def test_tp_need_not_divide_the_vocabulary(family: str) -> None:
    odd = replace(TINY, kv_heads=4, vocab=331)
    check({"tp": 4}, spec=odd, model=ModelSection.model_validate({"family": family, "path": "somewhere"}))


def test_tp_leaves_no_rank_without_a_row_of_the_vocabulary() -> None:
    few = replace(TINY, kv_heads=4)
    error = refusal({"tp": 4}, spec=replace(few, vocab=6))  # 2, 2, 2 and none
    assert (error.code, error.where, error.fix) == ("P008", "plan.mesh.tp", "use a tp whose square is at most 6")
    check({"tp": 4}, spec=replace(few, vocab=7))


@pytest.mark.parametrize(("ffn", "shared", "name"), [(90, 192, "90 features of an expert"), (96, 190, "190 features")])
def test_tp_must_divide_the_features_of_experts(ffn: int, shared: int, name: str) -> None:
    experts = ExpertSpec(num_experts=8, top_k=2, ffn=ffn, shared_ffn=shared)
    spec = replace(MIXTURE, kv_heads=4, block=replace(MIXTURE.block, experts=experts))
    assert name in refusal({"tp": 4}, spec=spec).what


def test_tp_must_divide_the_positions_of_a_rank() -> None:
    error = refusal({"tp": 2}, seq_len=255)
    assert (error.code, error.where) == ("P008", "data.seq_len")
    assert "254 or 256" in error.fix
    wide = replace(TINY, kv_heads=4)
    assert refusal({"tp": 2, "cp": 2}, spec=wide, seq_len=254, comm={"context": "exchange"}).code == "P008"
    check({"tp": 2, "cp": 2}, seq_len=252)


def test_tp_does_not_split_the_positions_of_a_hugging_face_model() -> None:
    check({"tp": 2}, seq_len=255, model=ModelSection(family="hf", path="somewhere"))


def test_gathering_keys_needs_two_chunks_per_rank_and_exchanging_one() -> None:
    error = refusal({"cp": 4}, seq_len=252)
    assert (error.code, error.where) == ("P009", "data.seq_len")
    assert error.fix == "set it to 248 or 256, or use cp of 1 or 2"
    check({"cp": 2}, seq_len=254, comm={"context": "exchange"})
    assert refusal({"cp": 2}, seq_len=254).code == "P009"
    assert refusal({"cp": 2}, seq_len=254, comm={"context": "ring"}).code == "P009"
    assert refusal({"cp": 2}, seq_len=255).fix == "set it to 252 or 256, or use cp of 1"


def test_cp_must_divide_the_heads_that_tp_leaves() -> None:
    error = refusal({"cp": 8}, comm={"context": "exchange"})
    assert (error.code, error.where) == ("P009", "plan.mesh.cp")
    assert error.fix == "use cp of 1 or 2 or 4, or set comm.context to ring or gather"
    assert "2 heads" in refusal({"cp": 4, "tp": 2}, comm={"context": "exchange"}).what
    check({"cp": 4}, comm={"context": "exchange"})  # each of the 2 KV heads goes to two ranks
    three = replace(TINY, heads=12, kv_heads=3)
    assert "3 KV heads" in refusal({"cp": 2}, spec=three, comm={"context": "exchange"}).what
    check({"cp": 8}, comm={"context": "ring"})


def test_experts_are_spread_over_ranks_with_different_tokens() -> None:
    check({"ep": 8}, spec=MIXTURE)
    check({"ep": 4, "dp_shard": 4}, spec=MIXTURE, sharding="parameters")
    error = refusal({"ep": 8, "dp_shard": 4}, spec=MIXTURE, sharding="parameters")
    assert (error.code, error.fix) == ("P010", "use ep of 1 or 2 or 4")
    assert "4 ranks of dp_shard x cp" in error.what
    assert "2 ranks of dp_replicate x cp" in refusal({"ep": 4, "tp": 2, "pp": 2}, spec=MIXTURE).what


def test_ep_needs_experts_that_it_divides() -> None:
    assert "tiny has none" in refusal({"ep": 2}).what
    three = replace(MIXTURE, block=replace(MIXTURE.block, experts=ExpertSpec(num_experts=6, top_k=2, ffn=96)))
    error = refusal({"ep": 4}, spec=three)
    assert "6 experts" in error.what
    assert error.fix == "use ep of 1 or 2"


def test_replicas_that_train_alone_cannot_balance_a_correction_bias() -> None:
    experts = PRESETS["tiny-moe"].block.experts
    assert experts is not None
    for rate in (0.0, 0.001):
        router = replace(experts.router, correction=True, correction_rate=rate)
        block = replace(PRESETS["tiny-moe"].block, experts=replace(experts, router=router))
        spec = replace(PRESETS["tiny-moe"], block=block)
        if rate:
            assert refusal({}, spec=spec, comm={"local_steps": 5}).code == "P102"
        else:
            check({}, spec=spec, comm={"local_steps": 5})


def test_degrees_of_an_unknown_model_are_left_to_the_worker() -> None:
    check({"tp": 4}, spec=None)
    check({"ep": 2}, spec=None)


@pytest.mark.parametrize(
    ("schedule", "stages", "what"),
    [
        ("1f1b", (1, 1, 1, 1), "1f1b with pp 2 does not allow 4 stages"),
        ("gpipe", (4,), "gpipe with pp 2 does not allow 1 stages"),
        ("zero-bubble", (2, 2), "does not allow 2 stages"),
        ("interleaved", (2, 2), "does not allow 2 stages"),
        ("interleaved", (2, 1, 1), "does not allow 3 stages"),
        ("1f1b", (3, 2), "stages of 3, 2 layers do not add up to the 4 of tiny"),
        ("1f1b", (4, 0), "stages of 4, 0 layers do not add up to the 4 of tiny"),
    ],
)
def test_pinned_stages_must_match_the_schedule_and_the_layers(
    schedule: str, stages: tuple[int, ...], what: str
) -> None:
    error = refusal({"pp": 2}, pipeline={"schedule": schedule, "stages": stages})
    assert (error.code, error.where) == ("P011", "plan.pipeline.stages")
    assert what in error.what


def test_stages_without_a_pipeline_are_refused() -> None:
    assert "set mesh.pp to 2" in refusal({}, pipeline={"stages": (2, 2)}).fix


def test_more_stages_than_layers_are_refused() -> None:
    assert refusal({"pp": 8}).fix == "use pp of at most 4"
    assert refusal({"pp": 4}, pipeline={"schedule": "interleaved"}).fix == "use pp of at most 2"
    check({"pp": 2}, pipeline={"schedule": "interleaved", "stages": (1, 1, 1, 1)})
    check({"pp": 2}, pipeline={"schedule": "zero-bubble", "stages": (1, 1, 1, 1)})


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
def test_a_pipeline_needs_at_least_as_many_micro_batches_as_ranks(schedule: str) -> None:
    check({"pp": 2}, grad_accum=2, pipeline={"schedule": schedule})
    error = refusal({"pp": 2}, grad_accum=1, micro_batch=4, pipeline={"schedule": schedule})
    assert (error.code, error.where) == ("P012", "plan.grad_accum")
    assert error.fix == "set plan.micro_batch to 1 or 2 and leave plan.grad_accum out"


def test_the_error_suggests_a_batch_that_fills_the_pipeline() -> None:
    assert refusal({"pp": 4}, grad_accum=3).fix.startswith("set train.global_batch to 8 or a multiple of it")


def test_interleaved_rounds_must_be_equal() -> None:
    deep, rounds = replace(TINY, layers=8), {"schedule": "interleaved"}
    check({"pp": 4}, spec=deep, grad_accum=10, pipeline=rounds)  # two rounds of five, as in torch
    error = refusal({"pp": 4}, spec=deep, grad_accum=13, pipeline=rounds)
    assert "not a multiple of its 3 rounds" in error.what
    check({"pp": 4}, spec=deep, grad_accum=13)


def test_only_its_code_says_whether_a_hugging_face_model_has_stages_and_experts_to_spread() -> None:
    model, recipe = ModelSection(family="hf", path="somewhere"), Recipe()
    check({"pp": 2}, model=model, spec=None)
    no = {axis: UserError("M069", "no", where=axis, fix="none") for axis in ("pp", "ep")}
    facts = HfFacts(without_pp=no["pp"], without_ep=no["ep"], num_layers=4, has_fp8_layers=True)
    for axis in ("pp", "ep"):
        plan = Plan.model_validate({"mesh": {"dp_replicate": 2 if axis == "ep" else 1, axis: 2}, "grad_accum": 8})
        with pytest.raises(UserError) as error:
            check_hf_facts(plan, recipe, facts)
        assert error.value is no[axis]
    check_hf_facts(Plan.model_validate({"mesh": {"pp": 4}, "grad_accum": 8}), recipe, HfFacts(num_layers=4))
    with pytest.raises(UserError, match="P011"):
        check_hf_facts(Plan.model_validate({"mesh": {"pp": 8}, "grad_accum": 8}), recipe, HfFacts(num_layers=4))
    experts = HfFacts(num_experts=8, tp_sizes={"num_attention_heads": 8})
    check_hf_facts(Plan.model_validate({"mesh": {"dp_shard": 2, "ep": 2, "tp": 4}}), recipe, experts)
    with pytest.raises(UserError, match=r"P010: ep 4 x tp 4 does not divide the 8 experts"):
        check_hf_facts(Plan.model_validate({"mesh": {"dp_shard": 4, "ep": 4, "tp": 4}}), recipe, experts)


@pytest.mark.parametrize("extra", [{"compile": True}, {"recompute": "full"}, {"recompute": "selective"}])
def test_a_split_backward_is_neither_compiled_nor_recomputed(extra: dict[str, Any]) -> None:
    assert refusal({"pp": 2}, pipeline={"schedule": "zero-bubble"}, **extra).code == "P018"
    check({"pp": 2}, pipeline={"schedule": "interleaved"}, **extra)
