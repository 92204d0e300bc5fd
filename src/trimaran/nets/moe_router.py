"""What a router decides from its scores: which experts each token passes, what is dropped, and what that costs."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trimaran.models import ExpertSpec
from trimaran.nets.attention_context import Context


@dataclass(frozen=True, slots=True)
class Routing:
    """Where this rank's tokens go. A choice that is dropped weighs nothing and is sorted behind the last expert."""

    weights: Tensor  # [B, T, top_k]: what each choice adds to the output
    choices: Tensor  # [B, T, top_k]: experts; num_experts is no expert
    counts: Tensor  # [num_experts]: the choices that are kept
    loss: Tensor  # balance and z-loss, summed over the tokens
    census: Tensor  # see `CENSUS`


CENSUS = 2  # columns behind the choices of each expert: choices dropped, squared logsumexp summed over the tokens


def route(logits: Tensor, experts: ExpertSpec, context: Context, *, limited: bool) -> Routing:
    """Return where `logits` [B, T, num_experts] send each token. `limited` says whether the capacity holds.

    Nothing here depends on the plan: the balance is that of each whole sequence, though this rank may hold a part.
    """
    probabilities = logits.softmax(-1)
    weights, choices = probabilities.topk(experts.top_k)
    if experts.normalize_top_k:
        weights = weights / weights.sum(-1, keepdim=True)
    chosen = torch.zeros_like(probabilities).scatter_(-1, choices, 1.0)
    loads = context.total(chosen.sum(1))  # [B, num_experts]
    shares = loads / loads.sum(-1, keepdim=True)
    squares = logits.logsumexp(-1).square()
    loss = experts.balance * experts.num_experts * (shares * probabilities.sum(1)).sum()
    if experts.z_loss:
        loss = loss + experts.z_loss * squares.sum()
    asked = counts = chosen.sum((0, 1))
    if limited and experts.capacity:
        room = within_capacity(choices, experts, context)
        counts, kept = (chosen * room).sum((0, 1)), room.gather(-1, choices)
        weights, choices = weights * kept, choices.masked_fill(~kept, experts.num_experts)
    dropped = (asked - counts).sum()
    census = torch.cat([asked, dropped.reshape(1), squares.detach().sum().reshape(1)])
    return Routing(weights, choices, counts.int(), loss, census)


def within_capacity(choices: Tensor, experts: ExpertSpec, context: Context) -> Tensor:
    """Return which experts have room for a token that chooses them, [B, T, num_experts].

    Each takes the earliest tokens of each sequence, of which `choices` [B, T, top_k] are this rank's.
    """
    whole = context.whole(choices)
    limit = capacity_of(experts, whole.shape[1])
    chosen = torch.zeros(*whole.shape[:2], experts.num_experts, dtype=torch.int32, device=whole.device)
    return context.mine(chosen.scatter_(-1, whole, 1).cumsum(1) <= limit)


def capacity_of(experts: ExpertSpec, seq_len: int) -> int:
    """Return how many tokens of a sequence an expert takes."""
    # Rounded first, since 1.1 * 10 is a little more than 11.
    return math.ceil(round(experts.capacity * seq_len * experts.top_k / experts.num_experts, 6))
