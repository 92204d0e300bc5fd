"""Between plans that tie, the one of least risk is chosen, and the others are named."""

import io
from dataclasses import replace
from functools import cache

import pytest
from rich.console import Console

from trimaran.app import CostTerms, PlanReport, PlanRequest, as_dict, read_plan_request, show_report
from trimaran.planner import (
    OFFLOAD_RATIO,
    TIE_RATIO,
    PlanAnswer,
    PlanEvaluator,
    Question,
    Space,
    best_plans,
    find_plans,
    search,
)


def request(preset: str, cluster: str, *settings: str, seq_len: int = 4096, batch: int = 64) -> PlanRequest:
    shortcuts = {"cluster": cluster, "data.seq_len": seq_len, "train.global_batch": batch}
    return read_plan_request(preset, shortcuts, settings)


def one_plan(question: Question) -> Question:
    return replace(question, max_plans=1)


@cache
def large_request(preset: str) -> PlanRequest:
    """Return the request of the outside review: 64 H100, 512 sequences of 8,192 tokens."""
    return request(preset, "8x8xH100", seq_len=8192, batch=512)


@cache
def large_answer(preset: str) -> PlanAnswer:
    return search(large_request(preset).question)


def shown(asked: PlanRequest, answer: PlanAnswer) -> str:
    console = Console(file=io.StringIO(), width=200)
    show_report(PlanReport(request=asked, answer=answer, terms=CostTerms()), console, top=8)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def seconds_of(answer: PlanAnswer) -> float:
    prediction = answer.ranked[0].prediction
    assert prediction is not None
    return prediction.step_seconds


@pytest.mark.slow
def test_70b_on_64_h100_pins_no_host_memory_and_names_the_offloading_plans_that_tie() -> None:
    answer = large_answer("llama-3.1-70b")
    best = answer.ranked[0]
    assert best.offload == "none"
    assert best.prediction is not None
    assert best.prediction.host_bytes == 0
    pinning = [tie for tie in answer.ties if tie.plan.offload != "none"]
    assert pinning
    for tie in pinning:
        assert tie.plan.prediction is not None
        assert tie.plan.prediction.step_seconds < seconds_of(answer) < OFFLOAD_RATIO * tie.plan.prediction.step_seconds
        assert "faster, but pins" in tie.why
        assert "of host memory a node" in tie.why


def test_a_235b_mixture_on_64_h100_is_split_and_not_offloaded() -> None:
    found = best_plans(replace(large_request("qwen3-235b-a22b").question, max_plans=2))
    best = found.ranked[0]
    assert best.plan.offload == "none"
    assert best.plan.mesh.tp * best.plan.mesh.pp * best.plan.mesh.ep > 1
    assert found.faster
    assert all(each.plan.offload != "none" and each.seconds < best.seconds for each in found.faster)


def test_offload_is_chosen_where_nothing_else_fits() -> None:
    question = one_plan(request("llama-3.1-70b", "8xH100", seq_len=2048).question)
    space = Space(question)
    assert not find_plans(space.without_offload(), PlanEvaluator(space)).by_mesh
    assert search(question).ranked[0].offload != "none"


def test_a_pinned_offload_is_kept() -> None:
    question = one_plan(request("llama-3.1-8b", "2xH100", "plan.offload=optimizer").question)
    assert search(question).ranked[0].offload == "optimizer"


def test_ties_are_within_the_error_bar_and_shown_as_text_and_as_json() -> None:
    asked, answer = large_request("llama-3.1-70b"), large_answer("llama-3.1-70b")
    for tie in answer.ties:
        assert tie.plan.prediction is not None
        ratio = seconds_of(answer) / tie.plan.prediction.step_seconds
        assert 1 / TIE_RATIO <= ratio <= (TIE_RATIO if tie.plan.offload == "none" else OFFLOAD_RATIO)
    text = shown(asked, answer)
    assert "ties, which the error bar does not tell from the chosen plan" in text
    assert answer.ties[0].why in text
    assert "the best 8 plans" in text
    found = as_dict(PlanReport(request=asked, answer=answer, terms=CostTerms()), top=8)
    assert [tie["why"] for tie in found["ties"]] == [tie.why for tie in answer.ties]
    first = answer.ties[0].plan.prediction
    assert first is not None
    assert found["ties"][0]["prediction"]["step_seconds"] == pytest.approx(first.step_seconds)


def test_the_title_says_how_the_table_is_sorted() -> None:
    asked = request("llama-3.1-8b", "8xH100")
    answer = search(replace(asked.question, goal="memory", max_plans=4))
    assert "plans, least memory first" in shown(asked, answer)
    assert answer.ties == ()
