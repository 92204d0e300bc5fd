"""Top-k routing: the experts of each token, tokens dropped by the capacity, and the router's losses."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trimaran.models import ExpertSpec
from trimaran.models.layer_variations import RouterSpec
from trimaran.nets.decoder.attention_context import Context


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts of this rank's tokens. A dropped choice has weight 0 and the expert number `num_experts`."""

    weights: Tensor  # [B, T, top_k]: the weight of each choice in the output
    choices: Tensor  # [B, T, top_k]: expert numbers; num_experts means dropped
    counts: Tensor  # [num_experts]: choices that are not dropped
    loss: Tensor  # balance and z-loss, summed over the tokens
    stats: Tensor  # see `NUM_EXTRA_STATS`


# Statistics after the number of choices of each expert: dropped choices, and the squared logsumexp summed over tokens.
NUM_EXTRA_STATS = 2
MIN_SUM = 1e-20  # of the scores that sum to one after a division: the sigmoids of one token may all be 0


def route(
    logits: Tensor, experts: ExpertSpec, context: Context, *, limited: bool, correction: Tensor | None = None
) -> Routing:
    """Return the routing for `logits` [B, T, num_experts]. The capacity applies only if `limited`.

    `correction` [num_experts] is added to the scores when experts are chosen, but not to their weights.
    The result does not depend on the plan: the balance loss covers full sequences, even if this rank holds a part.
    """
    choices, weights, scores = choose_experts(logits, experts, correction)
    probabilities = scores if experts.router.scoring == "softmax" else scores / (scores.sum(-1, keepdim=True) + MIN_SUM)
    chosen = torch.zeros_like(scores).scatter_(-1, choices, 1.0)
    loads = context.all_reduce(chosen.sum(1))  # [B, num_experts]
    fractions = loads / loads.sum(-1, keepdim=True)
    squares = logits.logsumexp(-1).square()
    loss = experts.balance * experts.num_experts * (fractions * probabilities.sum(1)).sum()
    if experts.z_loss:
        loss = loss + experts.z_loss * squares.sum()
    requested = counts = chosen.sum((0, 1))
    if limited and experts.capacity:
        fits = within_capacity(choices, experts, context)
        counts, kept = (chosen * fits).sum((0, 1)), fits.gather(-1, choices)
        weights, choices = weights * kept, choices.masked_fill(~kept, experts.num_experts)
    dropped = (requested - counts).sum()
    stats = torch.cat([requested, dropped.reshape(1), squares.detach().sum().reshape(1)])
    return Routing(weights, choices, counts.int(), loss, stats)


def choose_experts(
    logits: Tensor, experts: ExpertSpec, correction: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each token's experts and their weights, both [..., top_k], and the scores of all, [..., num_experts]."""
    router = experts.router
    scores = logits.softmax(-1) if router.scoring == "softmax" else logits.sigmoid()
    ranked = scores.detach() if correction is None else scores.detach() + correction
    if router.groups > router.top_groups:
        ranked = ranked.masked_fill(~in_best_groups(ranked, router), -math.inf)
    choices = ranked.topk(experts.top_k).indices
    weights = scores.gather(-1, choices)
    if experts.normalize_top_k:
        weights = weights / (weights.sum(-1, keepdim=True) + MIN_SUM)
    return choices, weights if router.scale == 1 else weights * router.scale, scores


def in_best_groups(scores: Tensor, router: RouterSpec) -> Tensor:
    """Return which experts are in one of the token's best groups, in the shape of `scores` [..., num_experts]."""
    by_group = scores.unflatten(-1, (router.groups, -1))
    best = by_group.topk(router.group_top).values.sum(-1).topk(router.top_groups).indices
    kept = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter_(-1, best, True)
    return kept.unsqueeze(-1).expand_as(by_group).flatten(-2)


def within_capacity(choices: Tensor, experts: ExpertSpec, context: Context) -> Tensor:
    """Return which experts have capacity left for a token that chooses them, [B, T, num_experts].

    Each expert takes the earliest tokens of each sequence. `choices` [B, T, top_k] are those of this rank's positions.
    """
    full = context.gather(choices)
    limit = capacity_of(experts, full.shape[1])
    chosen = torch.zeros(*full.shape[:2], experts.num_experts, dtype=torch.int32, device=full.device)
    return context.shard(chosen.scatter_(-1, full, 1).cumsum(1) <= limit)


def capacity_of(experts: ExpertSpec, seq_len: int) -> int:
    """Return the maximum number of tokens of a sequence for each expert."""
    # Rounded first, because 1.1 * 10 is slightly more than 11.
    return math.ceil(round(experts.capacity * seq_len * experts.top_k / experts.num_experts, 6))
