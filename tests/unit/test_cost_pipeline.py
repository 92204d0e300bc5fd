"""What each rank of a pipeline has, worked by hand."""

from dataclasses import replace
from typing import Any

import pytest

from trimaran.core import Plan
from trimaran.cost.memory import logits, owned_parameters, peak_terms
from trimaran.cost.pipeline import distinct_parts, parts_of
from trimaran.models import PRESETS

TINY, MIXTURE = PRESETS["tiny"], PRESETS["tiny-moe"]
ENDS = TINY.vocab * TINY.hidden


def pipeline(schedule: str, *, pp: int, count: int, **fields: Any) -> Plan:
    return Plan.model_validate(
        {"mesh": {"pp": pp}, "pipeline": {"schedule": schedule}, "grad_accum": count} | fields
    )  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
def test_one_rank_has_all_parameters(tied: bool) -> None:
    for spec in (replace(TINY, tied=tied), replace(MIXTURE, tied=tied), PRESETS["qwen2.5-0.5b"]):
        (part,) = parts_of(spec, Plan(), seq_len=64)
        assert part.parameters == spec.num_parameters
        assert part.layer == spec.layer_parameters


@pytest.mark.parametrize(("tied", "copies"), [(True, 1), (False, 0)])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble"])
def test_stages_have_every_parameter_once_but_a_tied_embedding_twice(schedule: str, tied: bool, copies: int) -> None:
    spec = replace(TINY, tied=tied)
    parts = parts_of(spec, pipeline(schedule, pp=2, count=4), seq_len=64)
    assert sum(part.layers for part in parts) == 4
    assert sum(part.parameters for part in parts) == spec.num_parameters + copies * ENDS
    assert [part.has_head for part in parts] == ([True, False] if schedule == "zero-bubble" else [False, True])


def test_slices_and_experts_divide_what_they_split() -> None:
    plan = Plan.model_validate({"mesh": {"tp": 2, "ep": 4, "dp_shard": 8}, "sharding": "parameters"})
    (part,) = parts_of(MIXTURE, plan, seq_len=64)
    assert part.experts == 4 * 3 * 128 * 96 * 8 // 8
    assert owned_parameters(plan, part) == part.dense // 8 + part.experts // 2
    (alone,) = parts_of(MIXTURE, Plan(), seq_len=64)
    assert part.dense < alone.dense < 2 * part.dense  # norms and routers are whole


@pytest.mark.parametrize(
    ("schedule", "count", "flying"),
    [
        ("gpipe", 8, [8, 8, 8, 8]),
        ("1f1b", 8, [4, 3, 2, 1]),
        ("1f1b", 4, [4, 3, 2, 1]),
        ("interleaved", 8, [5.5, 4.5, 3.5, 2.5]),  # 11, 9, 7 and 5 stages of two a rank
        ("interleaved", 7, [7, 6, 5, 4]),  # one round of seven
        ("zero-bubble", 8, [4, 4, 4, 4]),
    ],
)
def test_as_many_micro_batches_are_in_flight_as_the_schedule_starts(
    schedule: str, count: int, flying: list[float]
) -> None:
    deep = replace(TINY, layers=8)
    assert [part.flying for part in parts_of(deep, pipeline(schedule, pp=4, count=count), seq_len=64)] == flying


def test_gpipe_has_the_logits_of_all_micro_batches_waiting() -> None:
    gpipe, steady = pipeline("gpipe", pp=2, count=4), pipeline("1f1b", pp=2, count=4)
    first, last = parts_of(TINY, gpipe, seq_len=64)
    assert logits(TINY, gpipe, first, seq_len=64) == 0
    assert logits(TINY, steady, last, seq_len=64) == 12 * 64 * 320
    assert logits(TINY, gpipe, last, seq_len=64) == (12 + 3 * 8) * 64 * 320


def test_ranks_that_are_alike_are_looked_at_once() -> None:
    deep = replace(TINY, layers=8, vocab=16)
    parts = distinct_parts(deep, pipeline("1f1b", pp=8, count=8), seq_len=64)
    assert [(part.flying, part.has_head) for part in parts] == [(8, False), (7, False), (1, True)]


def test_the_peak_is_that_of_the_fullest_rank() -> None:
    plan = pipeline("1f1b", pp=4, count=8, micro_batch=8)
    early = peak_terms(TINY, plan, kind="cuda", seq_len=256)
    late = peak_terms(replace(TINY, vocab=32_000), plan, kind="cuda", seq_len=256)
    assert "logits" not in early  # the first rank, which has four micro-batches in flight
    assert "logits" in late  # the last one, which has the vocabulary
