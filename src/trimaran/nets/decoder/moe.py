"""Feed-forward blocks: SwiGLU, or a mixture of experts (MoE) with its top-k router."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimaran.models import PLAIN_UNIT, ExpertSpec, ExpertUnit
from trimaran.nets.decoder.attention_context import Context
from trimaran.nets.decoder.joint_projections import join_weights, joint_swiglu
from trimaran.nets.decoder.scattered_rows import gather_rows, scatter_rows, sorted_places
from trimaran.nets.local_shards import local_for_compute

# Statistics after the number of choices of each expert: dropped choices, and the squared logsumexp summed over tokens.
NUM_EXTRA_STATS = 2
MIN_SUM = 1e-20  # of the scores that sum to one after a division: the sigmoids of one token may all be 0
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
# Private in torch: `torch.compiler.disable` would import the compiler, also for a network without experts.
_uncompiled_grouped_mm = torch._disable_dynamo(F.grouped_mm)


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts of this rank's tokens. A dropped choice has weight 0 and the expert number `num_experts`."""

    weights: Tensor  # [B, T, top_k]: the weight of each choice in the output
    choices: Tensor  # [B, T, top_k]: expert numbers; num_experts means dropped
    counts: Tensor  # [num_experts]: choices that are not dropped
    loss: Tensor  # balance and z-loss, summed over the tokens
    stats: Tensor  # see `NUM_EXTRA_STATS`


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
        # Each expert takes the earliest tokens of each sequence.
        full = context.gather(choices)
        numbers = torch.zeros(*full.shape[:2], experts.num_experts, dtype=torch.int32, device=full.device)
        limit = capacity_of(experts, full.shape[1])
        fits = context.shard(numbers.scatter_(-1, full, 1).cumsum(1) <= limit)  # [B, T, num_experts]
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
        by_group = ranked.unflatten(-1, (router.groups, -1))
        best = by_group.topk(router.group_top).values.sum(-1).topk(router.top_groups).indices
        kept = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter_(-1, best, True)
        ranked = ranked.masked_fill(~kept.unsqueeze(-1).expand_as(by_group).flatten(-2), -math.inf)
    choices = ranked.topk(experts.top_k).indices
    weights = scores.gather(-1, choices)
    if experts.normalize_top_k:
        weights = weights / (weights.sum(-1, keepdim=True) + MIN_SUM)
    return choices, weights if router.scale == 1 else weights * router.scale, scores


def capacity_of(experts: ExpertSpec, seq_len: int) -> int:
    """Return the maximum number of tokens of a sequence for each expert."""
    # Rounded first, because 1.1 * 10 is slightly more than 11.
    return math.ceil(round(experts.capacity * seq_len * experts.top_k / experts.num_experts, 6))


class FeedForward(nn.Module):
    """A gated feed-forward: SwiGLU, or with another activation."""

    def __init__(self, hidden: int, width: int, activation: str = "silu") -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)
        self.joint = False

    @property
    def projections(self) -> tuple[nn.Linear, ...]:
        """The projections that may be one matmul, see `join_projections`."""
        return (self.gate_proj, self.up_proj) if self.activation == "silu" else ()

    def join_projections(self) -> None:
        """Compute `projections` as one matmul from now on. Their parameters become rows of one tensor."""
        join_weights(self.projections)
        self.joint = True

    def forward(self, x: Tensor) -> Tensor:
        if self.joint:
            return joint_swiglu(x, self.gate_proj, self.up_proj, self.down_proj)
        return self.down_proj(ACTIVATIONS[self.activation](self.gate_proj(x)) * self.up_proj(x))


class ExpertWeights(nn.Module):
    """The stacked experts of a layer, or this rank's; with `tp` a slice of each, whose outputs are partial sums."""

    def __init__(self, num_experts: int, hidden: int, width: int, unit: ExpertUnit = PLAIN_UNIT) -> None:
        super().__init__()
        self.unit, self.tp = unit, 1
        self.gate_proj = nn.Parameter(torch.empty(num_experts, width, hidden))
        self.up_proj = nn.Parameter(torch.empty(num_experts, width, hidden))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden, width))
        if unit.bias:
            self.gate_proj_bias = nn.Parameter(torch.empty(num_experts, width))
            self.up_proj_bias = nn.Parameter(torch.empty(num_experts, width))
            self.down_proj_bias = nn.Parameter(torch.empty(num_experts, hidden))

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Return the expert outputs of `rows`, sorted by local expert; the rows of expert e end before row `ends[e]`.

        One grouped matmul covers all experts, so experts without rows get a zero gradient instead of none. It needs at
        least one row. Outputs after the last end are uninitialised memory.
        """
        rows = as_autocast(rows)
        weights = (local_for_compute(each) for each in (self.gate_proj, self.up_proj, self.down_proj))
        gate, up, down = (each.to(rows.dtype) for each in weights)
        if not self.unit.bias:
            return _grouped(self.gated(_grouped(rows, gate, ends), _grouped(rows, up, ends)), down, ends)
        owners = torch.searchsorted(ends, torch.arange(len(rows), device=rows.device), right=True, out_int32=True)
        owners = owners.clamp(max=len(gate) - 1)
        biases = (local_for_compute(each) for each in (self.gate_proj_bias, self.up_proj_bias, self.down_proj_bias))
        of_gate, of_up, of_down = (each.to(rows.dtype).index_select(0, owners) for each in biases)
        inner = self.gated(_grouped(rows, gate, ends) + of_gate, _grouped(rows, up, ends) + of_up)
        return _grouped(inner, down, ends) + of_down / self.tp

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        limit = self.unit.limit
        if not limit:
            return F.silu(gate) * up
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
        return (up + 1) * gate * torch.sigmoid(gate * self.unit.alpha)


def as_autocast(rows: Tensor) -> Tensor:
    """Return `rows` in the autocast dtype; autocast itself does not cover the grouped matmul."""
    device = rows.device.type
    return rows.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else rows


class ExpertDispatch(Protocol):
    """Brings rows to their experts and the results back. Between its two calls the caller may compute something else.

    There may be rows after those of the last expert: their outputs are not used, but must not be NaN or Inf.
    """

    def send(self, experts: ExpertWeights, rows: Tensor, counts: Tensor) -> Any:
        """Start to bring `rows`, sorted by expert, to their experts; `counts` are the rows of each."""
        ...

    def compute(self, experts: ExpertWeights, sent: Any) -> Tensor:
        """Return the outputs of the rows that `send` has sent, in their order."""
        ...


class LocalDispatch:
    """The dispatch if all experts are on this rank. The last expert also processes the unused rows."""

    def send(self, experts: ExpertWeights, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        return rows, counts

    def compute(self, experts: ExpertWeights, sent: tuple[Tensor, Tensor]) -> Tensor:
        rows, counts = sent
        ends = counts.cumsum(0, dtype=torch.int32)
        ends[-1:].fill_(len(rows))  # an assignment would synchronise with the device
        return experts(rows, ends)


class MoeLayer(nn.Module):
    """A router, its experts, and optionally a shared expert that processes every token.

    `parallel/axes/ep.py` shards it and sets `dispatch` and `tp`; `Decoder.use_context` sets `context`. With `tp` above
    1 every rank has a slice of each expert: its output, loss and gradient of `x` are partial sums.
    """

    def __init__(self, experts: ExpertSpec, hidden: int) -> None:
        super().__init__()
        self.spec = experts
        self.gate = nn.Linear(hidden, experts.num_experts, bias=experts.router.bias)
        self.experts = ExpertWeights(experts.num_experts, hidden, experts.ffn, experts.unit)
        self.shared_expert = FeedForward(hidden, experts.shared_ffn) if experts.shared_ffn else None
        self.shared_expert_gate = nn.Linear(hidden, 1, bias=False) if experts.shared_gate else None
        # A buffer: no gradient changes it, and checkpoints hold it.
        self.correction_bias: Tensor | None
        self.register_buffer("correction_bias", torch.zeros(experts.num_experts) if experts.router.correction else None)
        self.context, self.tp = Context(), 1
        self.dispatch: ExpertDispatch = LocalDispatch()
        self._reset_routing_stats()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output for `x` [B, T, hidden], and the summed balance and z-loss. Only training has a capacity."""
        # With offloaded weights it is on the host.
        correction = None if self.correction_bias is None else self.correction_bias.to(x.device)
        routing = route(self._logits(x), self.spec, self.context, limited=self.training, correction=correction)
        if self.training and torch.is_grad_enabled():
            self.routing_stats = self.routing_stats.to(x.device).add_(routing.stats)
        places = sorted_places(routing.choices.flatten()).view(-1, self.spec.top_k)
        sent = self.dispatch.send(self.experts, self._rows(x, routing, places), routing.counts)
        shared = None if self.shared_expert is None else self.shared_expert(x)  # while rows travel
        if shared is not None and self.shared_expert_gate is not None:
            shared = self.shared_expert_gate(x).sigmoid() * shared
        out = self._joined(self.dispatch.compute(self.experts, sent), routing, places).unflatten(0, x.shape[:2])
        return (out if shared is None else out + shared), routing.loss / self.tp

    @torch.no_grad()
    def update_correction(self, loads: Tensor, applied: Tensor) -> None:
        """Move the correction bias towards equal loads, unless `applied` is 0: the step was refused.

        `loads` are the choices of each expert in the global batch, or a multiple of them. Whole numbers in fp64 are
        exact, so that every plan makes the same update.
        """
        assert self.correction_bias is not None
        directions = torch.sign(loads.sum() - loads * len(loads)) * applied
        self.correction_bias.add_(directions.to(self.correction_bias), alpha=self.spec.router.correction_rate)

    def take_routing_stats(self) -> Tensor:
        """Return the statistics of all tokens since the last call, a tensor on the device, and reset them."""
        taken = self.routing_stats.clone()
        self.routing_stats.zero_()
        return taken

    def _logits(self, x: Tensor) -> Tensor:
        # In fp32: the plan's precision must not change which of two experts with almost equal scores is chosen.
        with torch.autocast(x.device.type, enabled=False):
            bias = None if self.gate.bias is None else local_for_compute(self.gate.bias).float()
            return F.linear(x.float(), local_for_compute(self.gate.weight).float(), bias)

    # Rows are temporaries of these two, so that none outlives its use: with ep, only a 16-bit copy travels.

    def _rows(self, x: Tensor, routing: Routing, places: Tensor) -> Tensor:
        """Return the rows of `x` in the order of their experts, one for each choice."""
        rows = scatter_rows(x.flatten(0, 1), places)
        if not self.spec.router.weights_input:
            return rows
        weights = routing.weights.flatten(0, 1)
        factors = weights.new_empty(len(rows), 1).index_copy(0, places.flatten(), weights.view(-1, 1))
        return rows * factors.to(rows.dtype)

    def _joined(self, rows: Tensor, routing: Routing, places: Tensor) -> Tensor:
        """Return the weighted sum of each token's expert outputs."""
        if self.spec.router.weights_input:
            return gather_rows(rows, places)
        return gather_rows(rows, places, routing.weights.flatten(0, 1).to(rows.dtype))

    def _reset_routing_stats(self) -> None:
        # Not a buffer: buffers are broadcast from rank 0 and saved in checkpoints.
        columns = self.spec.num_experts + NUM_EXTRA_STATS
        self.routing_stats = torch.zeros(columns, dtype=torch.float64, device=self.gate.weight.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        was_meta = self.correction_bias is not None and self.correction_bias.is_meta
        super()._apply(fn, recurse)
        if was_meta and self.correction_bias is not None and not self.correction_bias.is_meta:
            self.correction_bias.zero_()  # `to_empty` gives it memory, but no value
        self._reset_routing_stats()  # on the new device
        return self


def _grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    # torch.compile supports the grouped matmul in bf16 only; other dtypes need a graph break.
    breaks = torch.compiler.is_compiling() and rows.dtype != torch.bfloat16
    return (_uncompiled_grouped_mm if breaks else F.grouped_mm)(rows, weights.transpose(1, 2), offs=ends)
