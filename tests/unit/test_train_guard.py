"""Which steps the guard refuses, what the run does about it, and which samples are quarantined."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from trimaran.core import FaultsSection, Mesh, UserError
from trimaran.data import Quarantine, read_quarantine
from trimaran.parallel import LossScale, LowMemoryAdamW
from trimaran.train import MEAN_LOSS_STEPS, MIN_GOOD_STEPS, Guard, RefusedStep, StepNumbers

MESH = Mesh(dp_replicate=2, tp=2)


def samples(step: int, data_ranks: Sequence[int]) -> tuple[int, ...]:
    """Return two samples for each data rank at each step, all of them different."""
    return tuple(100 * step + 10 * rank + row for rank in data_ranks for row in range(2))


def read(
    guard: Guard, step: int, loss: float, norm: float = 1.0, *, suspects: tuple[int, ...] = ()
) -> RefusedStep | None:
    refused = bool(guard.refuses(torch.tensor(loss), torch.tensor(norm)))
    numbers = StepNumbers(step=step, loss=loss, grad_norm=norm, refused=refused, suspects=suspects)
    return guard.read(numbers, MESH, samples, scaled=guard.loss_scale is not None)


def warmed_up(loss: float = 2.0, **faults: object) -> Guard:
    guard = Guard(FaultsSection.model_validate(faults))
    for step in range(1, MIN_GOOD_STEPS + 1):
        assert read(guard, step, loss) is None
    return guard


@pytest.mark.parametrize(
    ("loss", "norm", "reason"),
    [
        (math.nan, 1.0, "the loss is nan"),
        (math.inf, math.nan, "the loss is inf"),
        (-math.inf, 1.0, "the loss is -inf"),
        (2.0, math.nan, "the gradient norm is nan"),
        (2.0, math.inf, "the gradient norm is inf"),
        (2.0, 3.4e38, None),
        (200.0, 1.0, "the loss jumped from 2 to 200"),
        (20.1, 1.0, "the loss jumped from 2 to 20.1"),
        (19.9, 1.0, None),
    ],
)
def test_a_step_is_refused_when_a_number_is_nan_or_inf_or_the_loss_jumps(
    loss: float, norm: float, reason: str | None
) -> None:
    refusal = read(warmed_up(), MIN_GOOD_STEPS + 1, loss, norm)
    assert (refusal.reason if refusal else None) == reason


def test_a_jump_needs_earlier_steps_and_a_loss_near_zero_may_multiply() -> None:
    assert read(Guard(), 1, 2.0) is None
    assert read(Guard(), 2, 500.0) is None
    assert read(warmed_up(loss=0.01), MIN_GOOD_STEPS + 1, 0.9) is None
    assert read(warmed_up(loss=0.01), MIN_GOOD_STEPS + 1, 1.1) is not None
    assert read(warmed_up(spike=0), MIN_GOOD_STEPS + 1, 1e9) is None


def test_the_running_mean_ignores_bad_steps_and_forgets_old_ones() -> None:
    guard = warmed_up()
    before = guard.state()
    for loss in (math.nan, math.inf, 500.0):
        read(guard, 50, loss)
    assert {**guard.state(), "in_a_row": 0} == before
    for step in range(20 * MEAN_LOSS_STEPS):
        read(guard, 100 + step, 1.0)
    assert guard.state()["mean"] == pytest.approx(1.0, abs=1e-6)
    assert guard.limit == pytest.approx(10.0, abs=1e-4)


def test_a_guard_is_restored_from_its_state_as_json() -> None:
    guard, other = warmed_up(), Guard()
    read(guard, 50, math.nan)
    other.restore(json.loads(json.dumps(guard.state())))
    assert (other.state(), other.limit) == (guard.state(), guard.limit)


def test_the_samples_of_the_suspect_ranks_are_named_and_those_of_all_ranks_without_a_suspect() -> None:
    guard = Guard()
    one = read(guard, 7, math.nan, suspects=(2,))  # the second of two data ranks, each of two tensor-parallel ranks
    assert one is not None
    assert (one.ranks, one.sample_ids) == ((2,), (610, 611))
    both = read(guard, 8, math.nan, suspects=(0, 2))
    assert both is not None
    assert both.sample_ids == (700, 701, 710, 711)
    unknown = read(guard, 9, 1.0, math.nan)
    assert unknown is not None
    assert (unknown.ranks, unknown.sample_ids) == ((), (800, 801, 810, 811))


def test_a_ranks_own_loss_is_held_to_the_same_limit() -> None:
    guard = warmed_up()
    losses = [20.0 * 8, 20.1 * 8, math.nan, math.inf, 0.0]
    assert [bool(guard.suspects(torch.tensor(loss), 8)) for loss in losses] == [False, True, True, True, False]
    assert not guard.suspects(torch.tensor(0.0), 0)


def test_too_many_bad_steps_in_a_row_end_the_run_and_a_good_step_resets_the_count() -> None:
    guard = warmed_up(max_skips=2)
    bad = [math.nan, math.nan, 2.0, math.nan, math.nan, math.nan]
    refusals = [read(guard, 30 + number, loss) for number, loss in enumerate(bad)]
    assert [each.action if each else None for each in refusals] == ["skip", "skip", None, "skip", "skip", "stop"]


def test_not_finite_stop_ends_the_run_at_the_first_bad_step() -> None:
    refusal = read(warmed_up(not_finite="stop"), 30, math.nan)
    assert refusal is not None
    assert refusal.action == "stop"


def test_a_rewind_quarantines_samples_once_and_never_more_than_allowed(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    faults = FaultsSection(not_finite="rewind", max_quarantined=3)
    guard = Guard(faults, quarantine=Quarantine([5], path=path))
    refusal = read(guard, 7, math.nan, suspects=(2,))
    assert refusal is not None
    assert refusal.action == "rewind"
    guard.rewind(refusal, write=True)
    guard.rewind(refusal, write=False)
    assert guard.quarantine.ids == {5, 610, 611}
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"sample": sample, "reason": "the loss is nan", "step": 7} for sample in (610, 611)
    ]
    again, another = read(guard, 7, math.nan), read(guard, 8, math.nan)
    assert again is not None
    assert another is not None
    assert (again.action, another.action) == ("stop", "stop")  # the same step again; too many samples


def test_an_overflow_while_the_loss_scale_adapts_is_not_reported_but_a_bad_loss_is() -> None:
    guard = Guard(loss_scale=LossScale(initial=8.0))
    assert read(guard, 1, 2.0, math.inf) is None
    assert guard.loss_scale is not None
    assert guard.loss_scale.value == 4.0
    refusal = read(guard, 2, math.nan, math.nan)
    assert refusal is not None
    assert refusal.reason == "the loss is nan"
    assert guard.loss_scale.value == 4.0  # a bad loss does not change the scale
    assert guard.state()["in_a_row"] == 1


def test_a_quarantine_file_with_a_bad_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    assert read_quarantine(path) == ()
    path.write_text('{"sample": 7, "reason": "x"}\n{"sample": 3}\n{"sample": 7}\n')
    assert read_quarantine(path) == (3, 7)
    for line in ("{", "[]", '{"id": 3}', '{"sample": "3"}', '{"sample": -1}', '{"sample": true}', "[" * 100_000):
        path.write_text('{"sample": 3}\n' + line + "\n")
        with pytest.raises(UserError, match="T021"):
            read_quarantine(path)


@pytest.mark.parametrize("states", ["torch", "fp32", "bf16", "8bit"])
@pytest.mark.parametrize("first", [True, False])
def test_a_refused_step_does_not_change_weights_moments_and_counters(states: str, first: bool) -> None:
    torch.manual_seed(0)
    weights = {"wide": nn.Parameter(torch.randn(64, 80)), "short": nn.Parameter(torch.randn(7))}
    groups = [{"params": [*weights.items()]}]
    if states == "torch":
        optimizer = AdamW(groups, lr=0.1, fused=True)
    else:
        defaults = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
        optimizer = LowMemoryAdamW(groups, defaults=defaults, states=states, seed=0, on_host=False)

    def step(gradient: float, found_inf: float) -> list[torch.Tensor]:
        for weight in weights.values():
            weight.grad = torch.full_like(weight, gradient)
        optimizer.found_inf = torch.tensor(found_inf)  # pyrefly: ignore[missing-attribute]
        optimizer.step()
        tensors = [*weights.values(), *(each for state in optimizer.state.values() for each in state.values())]
        return [each.detach().clone() for each in tensors]

    before = [each.detach().clone() for each in weights.values()] if first else step(0.5, 0.0)
    after = step(math.nan, 1.0)
    assert all(map(torch.equal, before, after))
    if first:
        assert not any(each.any() for each in after[len(before) :])
    applied = step(0.5, 0.0)
    assert not torch.equal(applied[0], before[0])
    assert all(each.isfinite().all() for each in applied)
