"""Weights as two halves: which are, what becomes of their gradients, how they are read and written whole."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self
from weakref import ref

import torch
from torch import Tensor, nn

from trimaran.core import Plan
from trimaran.nets import Network
from trimaran.nets.moe import ExpertWeights, MoeLayer
from trimaran.nets.vision import Stem
from trimaran.optim.join_projections import join_projections
from trimaran.optim.split_bf16 import join, split
from trimaran.parallel.precision import own_dtype

# What autocast computes in 16 bits, so that nothing else reads the weight. An embedding is not among them: its rows are
# taken as they are, and the many gradients of one row are better summed in fp32.
PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, ExpertWeights)
# Whose matrix is more than a product's: a router computes in fp32, and a stem sums the frames of its patches first.
EXACT: tuple[tuple[type[nn.Module], str], ...] = ((MoeLayer, "gate"), (Stem, "patch_embed"))
AT_ONCE = 2**24  # values that are joined or split together: bounds the memory that it takes besides the weights


def split_weights(networks: Sequence[Network], plan: Plan) -> dict[nn.Parameter, Tensor]:
    """Return the lower half, int16, of each matrix that became a bf16 parameter here, its own upper half.

    Comes when the weights have their first values, and before anything computes with them. None, where the plan keeps
    weights whole. With more than one micro-batch a step the gradients are summed in fp32, as `main_grad`. What wants a
    weight whole finds the way at the parameter: `gather_whole`, see `nets.hf_weights.whole`.
    """
    lows: dict[nn.Parameter, Tensor] = {}
    matrices = [each for network in networks for each in _matrices(network)] if plan.splits_weights else []
    homes = join_projections(networks, plan, set(matrices))
    for parameter in matrices:
        upper, lower = split(parameter.detach())
        parameter.data = homes[parameter].copy_(upper) if parameter in homes else upper
        # By a weak name, since a parameter that held itself would outlive its network.
        _hang(parameter, low=lower, gather_whole=partial(_whole, ref(parameter)))
        if plan.grad_accum > 1:
            parameter.register_post_accumulate_grad_hook(_sum_in_fp32)
        lows[parameter] = lower
    return lows


def split_weights_of(parameter: Tensor) -> "SplitWeights | None":
    """Return both halves of a parameter that `split_weights` has split; None of any other."""
    lower = getattr(parameter, "low", None)
    return None if lower is None else SplitWeights(parameter.detach(), lower)


def _whole(parameter: ref[nn.Parameter]) -> Tensor:
    held = parameter()
    assert held is not None, "whoever asks has it"
    halves = split_weights_of(held)
    assert halves is not None
    return halves.whole()


@dataclass(frozen=True, slots=True)
class SplitWeights:
    """An fp32 tensor in two halves, which it shares with who else has them; see `checkpoint.pieces.Composed`."""

    upper: Tensor
    lower: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.upper.shape

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def ndim(self) -> int:
        return self.upper.ndim

    @property
    def nbytes(self) -> int:
        return self.numel() * self.element_size()

    @property
    def is_cuda(self) -> bool:
        return self.upper.is_cuda

    def numel(self) -> int:
        return self.upper.numel()

    def element_size(self) -> int:
        return torch.float32.itemsize

    def __getitem__(self, window: Any, /) -> Self:
        return type(self)(self.upper[window], self.lower[window])

    @torch.no_grad()
    def copy_(self, values: Tensor) -> None:
        for upper, lower, part in _in_parts(self.upper, self.lower, values):
            halves = split(part.to(upper.device, torch.float32))
            upper.copy_(halves[0])
            lower.copy_(halves[1])

    @torch.no_grad()
    def copy_to(self, target: Tensor, *, non_blocking: bool) -> None:
        for upper, lower, part in _in_parts(self.upper, self.lower, target):
            part.copy_(join(upper, lower), non_blocking=non_blocking)

    def whole(self) -> Tensor:
        """Return the fp32 values on the CPU."""
        values = torch.empty(self.shape, dtype=self.dtype)
        self.copy_to(values, non_blocking=False)
        return values


def _in_parts(*alike: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same places of tensors of one shape, some at a time; whole rows where they are not in one piece."""
    if all(each.is_contiguous() for each in alike):
        return zip(*(each.view(-1).split(AT_ONCE) for each in alike), strict=True)
    rows = max(1, AT_ONCE * len(alike[0]) // max(1, alike[0].numel()))
    return zip(*(each.split(rows) for each in alike), strict=True)


def _matrices(network: Network) -> Iterator[nn.Parameter]:
    """Yield what is kept in halves: matrices that are trained, and that nothing but products of 16 bits reads.

    What the recipe gave an arithmetic of its own may compute in fp32. A matrix that two modules share is an embedding
    as well.
    """
    owners: dict[int, int] = {}
    for module in network.module.modules():
        for each in module.parameters(recurse=False):
            owners[id(each)] = owners.get(id(each), 0) + 1
    exact = {getattr(each, name) for each in network.module.modules() for kind, name in EXACT if isinstance(each, kind)}
    for module in network.module.modules():
        if isinstance(module, PRODUCTS) and own_dtype(module) is None and module not in exact:
            for each in module.parameters(recurse=False):
                if each.ndim >= 2 and each.requires_grad and owners[id(each)] == 1:
                    yield each


def _sum_in_fp32(parameter: Tensor) -> None:
    """Add the gradient of one micro-batch to those before it. It is freed at once, before the next one is made."""
    gradient, sums = parameter.grad, getattr(parameter, "main_grad", None)
    assert gradient is not None
    _hang(parameter, main_grad=gradient.float() if sums is None else sums.add_(gradient))
    parameter.grad = None


def _hang(parameter: Tensor, **things: object) -> None:
    """Leave things at a parameter, for who meets it elsewhere."""
    for name, thing in things.items():
        setattr(parameter, name, thing)
