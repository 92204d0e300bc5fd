"""Which cut of a pipeline follows from which measured stage times."""

from dataclasses import replace
from itertools import accumulate, combinations, pairwise

import pytest

from trimaran.core import Mesh, Pipeline, Plan
from trimaran.models import PRESETS, VLM_PRESETS, ImageLimits, Outline, outline_of, vlm_outline
from trimaran.planner import MeasuredStages, balanced_cut, present_cut

SEQ_LEN = 128


def outline_with(layers: int) -> Outline:
    return outline_of(replace(PRESETS["tiny"], layers=layers))


def plan_of(pp: int, *, schedule: str = "1f1b", micro_batches: int = 8) -> Plan:
    return Plan(mesh=Mesh(pp=pp), grad_accum=micro_batches, pipeline=Pipeline.model_validate({"schedule": schedule}))


def measure(cut: tuple[int, ...], layers: list[float], places: tuple[float, ...] = ()) -> MeasuredStages:
    """Return what a pipeline with these seconds of each layer measures under a cut; `places` slow its stages down."""
    parts = pairwise(accumulate(cut, initial=0))
    seconds = [sum(layers[start:stop]) for start, stop in parts]
    factors = places or (1.0,) * len(cut)
    return MeasuredStages(layers=cut, seconds=tuple(a * b for a, b in zip(seconds, factors, strict=True)))


def all_cuts(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    ends = combinations(range(1, num_layers), num_stages - 1)
    return [tuple(stop - start for start, stop in pairwise((0, *each, num_layers))) for each in ends]


@pytest.mark.parametrize("head", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("cut", [(1, 5), (5, 1), (2, 4)])
def test_equal_layers_are_shared_out_with_the_head(cut: tuple[int, ...], head: float) -> None:
    layers = [0.010] * 6
    layers[-1] += 0.010 * head
    plan = plan_of(2)
    best = balanced_cut(measure(cut, layers), plan, outline_with(6), seq_len=SEQ_LEN)
    assert best is not None
    shortest = min(all_cuts(6, 2), key=lambda each: max(measure(each, layers).seconds))
    assert max(measure(best.layers, layers).seconds) <= 1.1 * max(measure(shortest, layers).seconds)
    assert best.step_seconds <= present_cut(measure(cut, layers), plan).step_seconds


def test_one_layer_against_five_becomes_even_and_saves_what_the_schedule_says() -> None:
    layers, plan = [0.010] * 6, plan_of(2, micro_batches=8)
    measured = measure((1, 5), layers)
    best = balanced_cut(measured, plan, outline_with(6), seq_len=SEQ_LEN)
    assert best is not None
    assert best.layers == (3, 3)
    assert present_cut(measured, plan).step_seconds == pytest.approx(8 * 0.050 + 0.010)
    assert best.step_seconds == pytest.approx(8 * 0.030 + 0.030, rel=0.15)


def test_a_first_stage_with_a_dear_embedding_still_gets_more_layers() -> None:
    """As measured on two CPU ranks: one layer takes 55 ms with the embedding, three take 112 ms."""
    measured = MeasuredStages(layers=(1, 3), seconds=(0.055, 0.112))
    plan = plan_of(2)
    best = balanced_cut(measured, plan, outline_with(4), seq_len=SEQ_LEN)
    assert best is not None
    assert best.layers == (2, 2)
    assert best.step_seconds < 0.9 * present_cut(measured, plan).step_seconds


def test_a_slow_device_gets_fewer_layers() -> None:
    measured = measure((4, 4, 4), [0.010] * 12, places=(2.0, 1.0, 1.0))
    best = balanced_cut(measured, plan_of(3), outline_with(12), seq_len=SEQ_LEN)
    assert best is not None
    assert best.layers[0] < 4
    assert max(best.seconds) < 0.08
    assert sum(best.layers) == 12


def test_layers_of_a_tower_that_are_dearer_than_predicted_are_spread() -> None:
    outline = vlm_outline(VLM_PRESETS["tiny"], ImageLimits())
    vision = sum(count for tower in outline.towers[:-1] for _, count in tower.runs)
    layers = [0.030] * vision + [0.010] * (outline.layers - vision)
    plan = plan_of(2)
    cuts = all_cuts(outline.layers, 2)
    for cut in cuts:
        best = balanced_cut(measure(cut, layers), plan, outline, seq_len=SEQ_LEN)
        assert best is not None
        now, then = (max(measure(each, layers).seconds) for each in (cut, best.layers))
        assert then <= now + 1e-9, f"{cut} -> {best.layers} must not be worse"
        again = balanced_cut(measure(best.layers, layers), plan, outline, seq_len=SEQ_LEN)
        assert again is not None
        assert max(measure(again.layers, layers).seconds) <= then + 1e-9, "measured again, it does not get worse"


def test_stages_of_a_rank_count_together() -> None:
    plan = plan_of(2, schedule="interleaved", micro_batches=4)
    measured = measure((1, 1, 1, 1), [0.010, 0.020, 0.010, 0.020])
    assert present_cut(measured, plan).step_seconds == pytest.approx(4 * 0.040 + 0.020 / 2)


def test_a_balanced_pipeline_stays_and_another_model_has_no_cut() -> None:
    measured = measure((3, 3), [0.010] * 6)
    best = balanced_cut(measured, plan_of(2), outline_with(6), seq_len=SEQ_LEN)
    assert best is not None
    assert best.layers == (3, 3)
    assert best.seconds == pytest.approx(measured.seconds)
    assert balanced_cut(measured, plan_of(2), outline_with(8), seq_len=SEQ_LEN) is None
    idle = MeasuredStages(layers=(3, 3), seconds=(0.0, 0.1))
    assert balanced_cut(idle, plan_of(2), outline_with(6), seq_len=SEQ_LEN) is None
