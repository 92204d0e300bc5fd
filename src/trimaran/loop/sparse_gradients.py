"""Sparse gradients, of embeddings with `sparse=True`: their norm, and clipping by it."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trimaran.parallel import gradient_norm


def sparse_parameters(model: nn.Module) -> frozenset[int]:
    """Return the ids of the parameters that get sparse gradients."""
    layers = (each for each in model.modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.sparse)
    return frozenset(id(each.weight) for each in layers)


@torch.no_grad()
def norm_with_sparse(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the norm over all gradients, of which sparse ones are equal on all ranks."""
    sparse = _sparse(parameters)
    if not sparse:
        return gradient_norm(parameters)
    squares = [each.coalesce().values().double().square().sum() for each in sparse]
    dense = [each for each in parameters if each.grad is None or not each.grad.is_sparse]
    if dense:
        squares.append(gradient_norm(dense).double().square())
    return torch.stack(squares).sum().sqrt().float()


@torch.no_grad()
def clip_with_sparse(parameters: Sequence[nn.Parameter], most: float, norm: Tensor) -> None:
    """Scale all gradients so that their norm is at most `most`, like `torch.nn.utils.clip_grads_with_norm_`."""
    sparse = _sparse(parameters)
    dense = [each for each in parameters if each.grad is None or not each.grad.is_sparse] if sparse else parameters
    torch.nn.utils.clip_grads_with_norm_(dense, most, norm)
    factor = (most / (norm + 1e-6)).clamp(max=1.0)  # torch's
    for each in sparse:
        each.mul_(factor)


def _sparse(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [each.grad for each in parameters if each.grad is not None and each.grad.is_sparse]
