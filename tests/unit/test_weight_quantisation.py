"""Quantised weights: what is stored, and what is refused. The matmuls need a GPU: tests/gpu/test_serving.py."""

import pytest
import torch

from trimaran.core import UserError
from trimaran.models import PRESETS
from trimaran.nets import decoder_network
from trimaran.serve import GROUP, Quantisation, quantise, quantised_weight, restored_weight

# Relative errors of normally distributed weights: about a third of a step of e4m3, of 1/127 of a row's largest value,
# and of 1/15 of a group's range.
BOUNDS: dict[Quantisation, float] = {"fp8": 0.03, "int8": 0.012, "int4": 0.12}


def weight(rows: int = 48, groups: int = 3) -> torch.Tensor:
    return (
        torch.randn(rows, groups * GROUP, generator=torch.Generator().manual_seed(0))
        * torch.logspace(-3, 3, rows)[:, None]
    )


@pytest.mark.parametrize("kind", BOUNDS)
def test_a_weight_is_restored_within_the_precision_of_its_kind(kind: Quantisation) -> None:
    exact = weight()
    restored = restored_weight(*quantised_weight(exact, kind))
    errors = (restored - exact).norm(dim=1) / exact.norm(dim=1)
    assert restored.shape == exact.shape
    assert 0 < errors.max() < BOUNDS[kind]  # of every row, though their magnitudes differ


@pytest.mark.parametrize(("kind", "bits"), [("fp8", 8), ("int8", 8), ("int4", 4)])
def test_weights_have_the_bits_that_their_kind_says(kind: Quantisation, bits: int) -> None:
    exact = weight()
    stored, scales, zeros = quantised_weight(exact, kind)
    assert stored.nbytes * 8 == exact.numel() * bits
    assert scales.numel() == (len(exact) if bits == 8 else exact.numel() // GROUP)
    assert (zeros is None) == (bits == 8)


@pytest.mark.parametrize("kind", BOUNDS)
def test_zeros_and_one_sided_weights_are_restored_exactly_or_closely(kind: Quantisation) -> None:
    assert not restored_weight(*quantised_weight(torch.zeros(16, GROUP), kind)).any()
    positive = weight().abs() + 1e-4
    restored = restored_weight(*quantised_weight(positive, kind))
    assert (restored - positive).norm() < BOUNDS[kind] * positive.norm()


@pytest.mark.parametrize("kind", BOUNDS)
def test_a_cpu_is_refused_before_anything_changes(kind: Quantisation) -> None:
    network = decoder_network(PRESETS["tiny"])
    names = list(network.module.state_dict())
    with pytest.raises(UserError, match="E050") as error:
        quantise(network, kind, torch.device("cpu"))
    assert "GPU" in str(error.value)
    assert list(network.module.state_dict()) == names
