"""The autograd graph of a loss tells a sum from a mean, and says nothing where it cannot know."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trimaran.core import UserError
from trimaran.loop import accumulation_divisor, check_divisor, check_reduction, reduction_of

LABELS, ZEROS = torch.arange(8) % 5, torch.zeros(8, 5)


def outputs() -> Tensor:
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(0)).requires_grad_() * 1.0


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    "loss",
    [
        lambda out, how: F.cross_entropy(out, LABELS, reduction=how),
        lambda out, how: F.cross_entropy(out.T[None], LABELS[None], reduction=how, ignore_index=1),
        lambda out, how: F.mse_loss(out, ZEROS, reduction=how),
        lambda out, how: F.l1_loss(out, ZEROS, reduction=how),
        lambda out, how: F.smooth_l1_loss(out, ZEROS, reduction=how),
        lambda out, how: F.binary_cross_entropy(out.sigmoid(), ZEROS, reduction=how),
        lambda out, how: F.binary_cross_entropy_with_logits(out, ZEROS, reduction=how),
        lambda out, how: F.triplet_margin_loss(out, out + 1, out - 1, reduction=how),
        lambda out, how: F.cross_entropy(out, LABELS, reduction=how).float().squeeze().mean(),
        lambda out, how: F.mse_loss(out, ZEROS, reduction=how) + F.l1_loss(out, ZEROS, reduction=how),
        lambda out, how: getattr(out.square(), how)(),
        lambda out, how: -getattr(out.square(), how)(),
        lambda out, how: getattr(out.square().mean(dim=1), how)(),
    ],
)
def test_the_graph_shows_the_reduction(loss: Any, reduction: str) -> None:
    assert reduction_of(loss(outputs(), reduction)) == reduction


@pytest.mark.parametrize(
    "loss",
    [
        lambda out: F.cross_entropy(out, LABELS) * 8,  # a sum, written as a mean times its count
        lambda out: F.cross_entropy(out, LABELS, reduction="sum") / 8,  # a mean, written as a sum by its count
        lambda out: F.cross_entropy(out, LABELS, reduction="sum") * 0.125,
        lambda out: (out.square() * (ZEROS + 1)).sum() / (ZEROS + 1).sum(),
        lambda out: out.square().sum() + out.square().mean(),
        lambda out: out.norm(),
    ],
)
def test_what_may_be_either_is_unknown(loss: Any) -> None:
    found = loss(outputs())
    assert reduction_of(found) is None
    with pytest.warns(UserWarning, match="does not show whether it is a sum or a mean"):
        check_reduction(found, claimed=None, count=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_reduction(found, claimed="sum", count=8)
        check_reduction(found, claimed="mean", count=8)


def test_a_mean_that_is_divided_by_accumulation_steps_is_still_a_mean() -> None:
    assert reduction_of(F.cross_entropy(outputs(), LABELS) / 4) == "mean"
    assert reduction_of(0.5 * F.cross_entropy(outputs(), LABELS)) == "mean"
    assert reduction_of(torch.ones((), requires_grad=True)) is None


def test_a_mean_is_refused_as_a_sum_and_a_sum_as_a_mean_with_the_line_to_change() -> None:
    model = nn.Linear(5, 5)
    mean = F.cross_entropy(model(ZEROS), LABELS)
    with pytest.raises(UserError) as caught:
        check_reduction(mean, claimed=None, count=8)
    assert (caught.value.code, "8 times too small" in caught.value.what) == ("P044", True)
    assert caught.value.where.startswith(__file__)
    assert caught.value.where.endswith("check_reduction(mean, claimed=None, count=8)")
    assert 'add reduction="mean"' in caught.value.fix
    check_reduction(mean, claimed="mean", count=8)
    check_reduction(mean, claimed=None, count=1)  # the mean of one is its sum
    with pytest.raises(UserError, match="too large"):
        check_reduction(model(ZEROS).sum(), claimed="mean", count=8)


def test_a_masked_mean_is_one_of_the_ones_in_its_mask() -> None:
    losses, mask = outputs().square().mean(1), torch.tensor([1, 1, 1, 0, 1, 0, 1, 0])
    masked = (losses * mask).sum() / mask.sum().clamp(min=1)
    with pytest.raises(UserError, match="a mean over 5 elements, but backward was told that it is the mean of 8"):
        check_divisor(masked, count=8, reads_device=True)
    for loss, count in (
        (masked, 5),
        (losses.sum() / 8, 8),
        (0.5 * losses.sum() / 8, 8),
        (outputs().square().sum() / 40, 8),  # of five elements for each sample
        (losses.sum() / 8 + nn.Parameter(ZEROS).square().sum() / 7, 8),
    ):
        check_divisor(loss, count=count, reads_device=True)


def test_a_factor_of_a_half_is_no_accumulation() -> None:
    mean = F.mse_loss(outputs(), ZEROS)
    assert [accumulation_divisor(each) for each in (mean / 2, mean / 4, mean * 0.25)] == [2, 4, 4]
    assert [accumulation_divisor(each) for each in (0.5 * mean, mean / 1.5, mean)] == [1, 1, 1]
