"""Copies of rows sent to places and added up again, against torch's own indexing."""

import pytest
import torch

from trimaran.nets import gather_rows, scatter_rows, sorted_places


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_rows_that_are_sorted_and_restored_equal_indexing_and_so_do_the_gradients(copies: int, weighted: bool) -> None:
    torch.manual_seed(0)
    keys, scale = torch.randint(0, 4, (5 * copies,)), torch.randn(5, 7)
    found = []
    for ours in (True, False):
        rows, weights = (torch.linspace(-1, 2, 5 * each).view(5, each).requires_grad_() for each in (7, copies))
        order = keys.argsort(stable=True)
        if ours:
            places = sorted_places(keys).view(5, copies)
            assert torch.equal(places.flatten()[order], torch.arange(5 * copies))
            out = gather_rows(scatter_rows(rows, places).sin(), places, weights if weighted else None)
        else:
            back = rows[order // copies].sin()[order.argsort()].view(5, copies, 7)
            out = (back * weights.unsqueeze(-1) if weighted else back).sum(1)
        (out * scale).sum().backward()
        found.append([out.detach(), rows.grad, weights.grad if weighted else out.detach()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_the_compiler_is_told_the_truth_about_each_operator() -> None:
    rows, places, weights = torch.randn(6, 4), torch.randperm(6).view(3, 2), torch.randn(3, 2)
    arguments = {
        "scatter_rows": (rows[:3], places),
        "gather_rows": (rows, places, weights),
        "gather_rows_backward": (rows[:3], rows, places, weights),
    }
    for name, given in arguments.items():
        operator = getattr(torch.ops.trimaran, name).default
        torch.library.opcheck(operator, given, test_utils=("test_schema", "test_faketensor"))
