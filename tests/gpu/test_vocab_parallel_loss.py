"""The kernels of a loss whose vocabulary is split: parts of the columns together give the loss of all of them."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytestmark = pytest.mark.gpu

IGNORED = -100


def losses_of_parts(parts: list[Tensor], firsts: list[int], labels: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of each row and the gradient of the logits, with sums over parts in place of collectives."""
    from trimaran.parallel import row_gradients, row_sums  # noqa: PLC0415  needs Triton

    valid = labels != IGNORED
    local = [torch.where(valid, labels - first, -1) for first in firsts]
    sums = [row_sums(part, each) for part, each in zip(parts, local, strict=True)]
    highest = torch.stack([each[0] for each in sums]).amax(0)
    total = torch.stack([each[1] * (each[0] - highest).exp() for each in sums]).sum(0)
    chosen = torch.stack([each[2] for each in sums]).sum(0)
    log_sums = highest + total.log()
    gradients = [row_gradients(part, each, log_sums, factors * valid) for part, each in zip(parts, local, strict=True)]
    return (log_sums - chosen) * valid, torch.cat(gradients, -1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("split", [[32064, 32064], [5, 5, 2, 0], [9000]])
def test_parts_of_the_vocabulary_give_the_loss_of_the_whole(dtype: torch.dtype, split: list[int]) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    rows, vocab = 70, sum(split)
    logits = (5 * torch.randn(rows, vocab, device="cuda", generator=generator)).to(dtype)
    labels = torch.randint(vocab, (rows,), device="cuda", generator=generator)
    labels[::7] = IGNORED
    factors = torch.rand(rows, device="cuda", generator=generator)
    wide = logits.double().requires_grad_()
    expected = F.cross_entropy(wide, labels, ignore_index=IGNORED, reduction="none")
    (expected * factors).sum().backward()
    firsts = [sum(split[:number]) for number in range(len(split))]
    losses, gradient = losses_of_parts(list(logits.split(split, -1)), firsts, labels, factors)
    assert wide.grad is not None
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}[dtype]
    torch.testing.assert_close(gradient.double(), wide.grad, rtol=tolerance, atol=1e-6)


def test_a_part_whose_logits_are_all_masked_adds_nothing() -> None:
    logits = torch.randn(4, 64, device="cuda")
    logits[:, 32:] = -torch.inf
    labels = torch.arange(4, device="cuda")
    losses, gradient = losses_of_parts(list(logits.split(32, -1)), [0, 32], labels, torch.ones(4, device="cuda"))
    torch.testing.assert_close(losses, F.cross_entropy(logits, labels, reduction="none"))
    assert not gradient[:, 32:].any()
