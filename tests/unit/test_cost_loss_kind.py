"""Memory and time of a fused or chunked loss, and time of the optimizer update."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.test_cost_peak_memory import PAGE, memory, plan_of
from trimaran.cost import STATE_BYTES, TRIMARAN_LAUNCHES, Job, chunk_rows, find_stack, predict, step_time_of
from trimaran.machine import parse_cluster
from trimaran.models import PRESETS, outline_of
from trimaran.train import chunk_rows as trained_rows


def test_a_fused_loss_holds_one_buffer_of_logits_and_the_gradients_of_the_head() -> None:
    wide = outline_of(replace(PAGE, vocab=2_000))
    plan = plan_of(precision="bf16", micro_batch=64)  # 4096 tokens
    logits, fused = (
        memory(plan.model_copy(update={"loss": each}), wide, seq_len=64).terms for each in ("logits", "fused")
    )
    assert logits["logits"] == 12 * 4096 * 2_000
    assert fused["logits"] == 2 * 4096 * 2_000
    assert fused["gradients"] == 2 * 2_000 * 4 + 2 * 4096 * 4
    assert fused["activations"] == logits["activations"]
    tied = memory(
        plan.model_copy(update={"loss": "fused"}), outline_of(replace(PAGE, vocab=2_000, tied=True)), seq_len=64
    )
    assert tied.terms["casts"] == 2 * 2_000 * 4


def test_a_chunked_loss_holds_some_rows_at_a_time_and_accumulates_in_fp32() -> None:
    wide = outline_of(replace(PAGE, vocab=128_000))
    plan = plan_of(precision="bf16", micro_batch=64, loss="chunked")
    terms = memory(plan, wide, seq_len=64).terms
    assert terms["logits"] == 2 * 1024 * 128_000
    assert terms["gradients"] == 4 * 128_000 * 4 + 2 * 4096 * 4
    few = memory(plan.model_copy(update={"micro_batch": 16}), wide, seq_len=64).terms  # one chunk
    assert few["gradients"] == 2 * 128_000 * 4 + 2 * 1024 * 4


@pytest.mark.parametrize(("vocab", "width"), [(128_256, 2), (32_000, 2), (256, 4), (262_144, 4)])
def test_chunks_match_those_of_the_trainer(vocab: int, width: int) -> None:
    assert chunk_rows(10**9, vocab, width) == trained_rows(vocab, width)


def test_other_stacks_and_split_models_ignore_the_plans_loss() -> None:
    bf16 = {"precision": "bf16", "micro_batch": 8}
    for stack, fields in (("megatron", {}), ("trimaran", {"mesh": {"tp": 2}}), ("trimaran", {"mesh": {"pp": 2}})):
        memories = [
            memory(plan_of(**bf16, **fields, loss=loss), outline_of(PAGE), seq_len=64, stack=stack)
            for loss in ("logits", "fused", "chunked")
        ]
        assert memories[0] == memories[1] == memories[2]


def terms_of(
    preset: str = "llama-3.2-1b", states: str = "fp32", stack: str = "trimaran", **fields: Any
) -> dict[str, float]:
    job = Job(
        outline=outline_of(PRESETS[preset]), seq_len=4096, stack=find_stack(stack), state_bytes=STATE_BYTES[states]
    )
    plan = plan_of(**{"precision": "bf16", "micro_batch": 4, "compile": True} | fields)
    return dict(step_time_of(job, parse_cluster("H200"), plan).terms)


def test_a_fused_loss_computes_gradients_in_forward_and_is_faster_than_logits() -> None:
    logits, fused, chunked = (terms_of(loss=each) for each in ("logits", "fused", "chunked"))
    assert fused["forward"] > logits["forward"]
    assert fused["backward"] < logits["backward"]
    totals = [sum(each.values()) for each in (fused, chunked, logits)]
    assert totals == sorted(totals)
    # 30 bytes less per logit: cast to fp32, log-softmax and its gradient as separate operators.
    saved = 30 * 4 * 4096 * 128_256 / 4.08e12
    assert totals[2] - totals[0] == pytest.approx(saved, rel=0.05)


def test_only_our_trainer_without_tp_and_pp_is_timed_as_fused() -> None:
    cases: list[dict[str, Any]] = [{"stack": "torchtitan"}, {"mesh": {"tp": 2}}]
    for fields in cases:
        assert terms_of(loss="fused", **fields) == terms_of(loss="logits", **fields)


def test_an_update_moves_its_bytes_at_memory_bandwidth() -> None:
    parameters, speed = PRESETS["llama-3.2-1b"].num_parameters, 0.82 * 4.8e12
    gaps = TRIMARAN_LAUNCHES.step * 1e-6
    for states, moments in (("fp32", 16), ("bf16", 8), ("8bit", 40)):  # 8-bit moments are compute-bound
        moved = 10 + 3.4 + moments  # a split weight and its 16-bit gradient, with the gradient norm
        assert terms_of(states=states)["optimizer"] == pytest.approx(moved * parameters / speed + gaps, rel=1e-5)
    whole = terms_of(precision="fp16")["optimizer"]
    assert whole == pytest.approx((12 + 3.4 + 6.4 + 16) * parameters / speed + gaps, rel=1e-5)
    torchs = terms_of(stack="torchtitan")["optimizer"]
    assert torchs == pytest.approx(40 * parameters / (0.72 * 4.8e12))


def test_split_weights_are_not_cast() -> None:
    # With selective recompute no projections are joined, which would be another difference.
    cluster = parse_cluster("H200")
    plan = plan_of(precision="bf16", micro_batch=4, compile=True, recompute="selective")
    other = plan.model_copy(update={"offload": "optimizer"})  # the same work with fp32 weights
    spec = PRESETS["llama-3.1-8b"]
    halves, whole = (
        predict(Job(outline=outline_of(spec), seq_len=4096), cluster, each).time["backward"] for each in (plan, other)
    )
    assert whole - halves == pytest.approx(6 * spec.num_parameters / 4.08e12, rel=0.01)
