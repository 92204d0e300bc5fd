"""Windows on a GPU: the varlen kernel computes what a mask does, also in packed rows, forward and backward."""

import pytest
import torch
from torch import Tensor

from trimaran.nets import AttentionOptions, Segments, attend, causal_window, masked_attention

pytestmark = pytest.mark.gpu


def gradients_of(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(out.float().square().sum(), inputs))


@pytest.mark.parametrize("lengths", [(64,), (20, 44)])
def test_a_window_is_that_of_a_mask(lengths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    inputs = [
        torch.randn(1, heads, 64, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)
    ]
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].cuda()
    segments, options = Segments.of_documents(documents, lengths), AttentionOptions(window=9)
    assert segments.has_kernel(inputs[0], inputs[2])
    positions = torch.arange(64, device="cuda")
    mask = causal_window(positions, positions, 9) & segments.mask(causal=True)
    expected = masked_attention(inputs[0], inputs[1], inputs[2], mask, options)
    found = attend(inputs[0], inputs[1], inputs[2], segments, options)
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
    pairs = zip(gradients_of(found, inputs), gradients_of(expected, inputs), strict=True)
    assert all(((ours - theirs).norm() / theirs.norm()) < 2e-2 for ours, theirs in pairs)
