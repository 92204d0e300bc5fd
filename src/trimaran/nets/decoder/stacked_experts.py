"""The stacked experts of a Hugging Face mixture: how they are called, and with a rank's own of them."""

from collections.abc import Callable
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from trimaran.core import UserError
from trimaran.nets.decoder.scattered_rows import gather_rows, scatter_rows, sorted_places
from trimaran.nets.local_shards import with_local_parameters

SPREAD_ATTRIBUTE = "trimaran_spread_experts"  # of experts that are spread over ranks
# Set by transformers on every module of stacked experts that is called with rows, choices and weights.
INTERFACE = ("num_experts", "has_gate", "has_bias", "is_transposed", "_is_expert_parallel")
HfDispatch = Callable[[Any, Tensor, Tensor], Tensor]


def stacked_experts(module: nn.Module) -> list[nn.Module]:
    """Return the modules of stacked experts in a transformers model."""
    return [each for each in module.modules() if all(hasattr(each, name) for name in INTERFACE)]


def is_spread(module: nn.Module) -> bool:
    """Return whether the module holds this rank's part of experts that are spread over ranks."""
    return getattr(module, SPREAD_ATTRIBUTE, False)


def spreadable_experts(module: nn.Module) -> list[nn.Module]:
    """Return the modules of stacked experts. Raises UserError if there are none, or if they cannot be spread."""
    found: list[Any] = stacked_experts(module)
    if not found:
        raise _no_experts(module, "has no stacked experts in the form that transformers 5 gives them")
    for each in found:
        odd = [name for name, part in each.named_parameters() if "." in name or part.shape[0] != each.num_experts]
        if odd:
            raise _no_experts(module, f"has experts with {odd[0]}, which is not stacked by expert")
    return found


def count_experts(module: nn.Module) -> int:
    """Return the number of experts of each layer with stacked experts; if layers differ, what divides all of them."""
    counts: list[Any] = [each.num_experts for each in spreadable_experts(module)]
    return gcd(*counts)


def spread(experts: Any, dispatch: HfDispatch, degree: int, split: Callable[[nn.Module], None] | None = None) -> None:
    """Let experts, of which this rank holds a part, send rows with `dispatch` to the ranks of the experts they chose.

    The model's own code computes the experts of a rank, as if each row had chosen one expert with weight 1. If several
    ranks have the same rows, `split` lets each compute some of these experts.
    """
    num_experts = experts.num_experts
    here = experts.num_experts = num_experts // degree
    if split is not None:
        split(experts)
    own = experts.forward

    def compute(rows: Tensor, ends: Tensor) -> Tensor:
        numbers = torch.arange(len(rows), device=rows.device)
        chosen = torch.searchsorted(ends, numbers, right=True).clamp(max=here - 1)
        with with_local_parameters(experts):
            return own(rows, chosen.unsqueeze(1), rows.new_ones(len(rows), 1))

    @torch.compiler.disable  # the sizes depend on the data
    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *others: Any) -> Tensor:
        assert not others, "experts take rows, choices and weights"
        flat, choices = hidden_states.flatten(0, -2), top_k_index.flatten(0, -2)
        places = sorted_places(choices.flatten()).view(choices.shape)
        counts = torch.bincount(choices.flatten(), minlength=num_experts)
        rows = dispatch(compute, scatter_rows(flat, places), counts)
        out = gather_rows(rows, places, top_k_weights.flatten(0, -2).to(rows.dtype))
        return out.to(hidden_states.dtype).view(hidden_states.shape)

    experts.forward = forward
    setattr(experts, SPREAD_ATTRIBUTE, True)


def _no_experts(module: nn.Module, reason: str) -> UserError:
    return UserError("M070", f"{type(module).__name__} {reason}", where="plan.mesh.ep",
                     fix="set ep to 1 and shard the parameters instead: plan.mesh.dp_shard")  # fmt: skip
