"""Feed-forward blocks: SwiGLU, or a mixture of experts (MoE)."""

from collections.abc import Callable
from functools import partial
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimaran.models import ExpertSpec
from trimaran.nets.attention_context import Context
from trimaran.nets.joint_projections import joint_swiglu
from trimaran.nets.local_shards import local_for_compute
from trimaran.nets.moe_router import NUM_EXTRA_STATS, Routing, route
from trimaran.nets.scattered_rows import gather_rows, scatter_rows, sorted_places

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


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
        """The projections that may be one matmul; they are if `joint` is set (see `nets/joint_projections.py`)."""
        return (self.gate_proj, self.up_proj) if self.activation == "silu" else ()

    def forward(self, x: Tensor) -> Tensor:
        if self.joint:
            return joint_swiglu(x, self.gate_proj, self.up_proj, self.down_proj)
        return self.down_proj(ACTIVATIONS[self.activation](self.gate_proj(x)) * self.up_proj(x))


class ExpertWeights(nn.Module):
    """The experts of a layer, stacked along the first dimension; sharded: this rank's experts, or a slice of each."""

    def __init__(self, num_experts: int, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Parameter(torch.empty(num_experts, width, hidden))
        self.up_proj = nn.Parameter(torch.empty(num_experts, width, hidden))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden, width))

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Return the expert outputs of `rows`, sorted by local expert; the rows of expert e end before row `ends[e]`.

        One grouped matmul covers all experts, so experts without rows get a zero gradient instead of none. It needs at
        least one row. Outputs after the last end are uninitialised memory.
        """
        rows = as_autocast(rows)
        weights = (local_for_compute(each) for each in (self.gate_proj, self.up_proj, self.down_proj))
        gate, up, down = (each.to(rows.dtype) for each in weights)
        inner = F.silu(_grouped(rows, gate, ends)) * _grouped(rows, up, ends)
        return _grouped(inner, down, ends)


def as_autocast(rows: Tensor) -> Tensor:
    """Return `rows` in the autocast dtype; autocast itself does not cover the grouped matmul."""
    device = rows.device.type
    return rows.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else rows


# Takes the experts, rows sorted by expert, and the number of rows of each expert; returns the outputs in that order.
# There may be rows after those of the last expert: their outputs are not used, but must not be NaN or Inf.
ExpertDispatch = Callable[[ExpertWeights, Tensor, Tensor], Tensor]


def run_local_experts(experts: ExpertWeights, rows: Tensor, counts: Tensor) -> Tensor:
    """Return the outputs of `rows` if all experts are on this rank. The last one also processes the unused rows."""
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
        self.gate = nn.Linear(hidden, experts.num_experts, bias=False)
        self.experts = ExpertWeights(experts.num_experts, hidden, experts.ffn)
        self.shared_expert = FeedForward(hidden, experts.shared_ffn) if experts.shared_ffn else None
        self.shared_expert_gate = nn.Linear(hidden, 1, bias=False) if experts.shared_gate else None
        self.context, self.tp = Context(), 1
        self.dispatch: ExpertDispatch = run_local_experts
        self._reset_routing_stats()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output for `x` [B, T, hidden], and the balance and z-loss, summed over the sequences.

        The capacity applies in training only.
        """
        routing = route(self._logits(x), self.spec, self.context, limited=self.training)
        if self.training and torch.is_grad_enabled():
            # With offloaded weights it is on the host.
            self.routing_stats = self.routing_stats.to(x.device).add_(routing.stats)
        out = self._routed(x, routing)
        if self.shared_expert is not None:
            out = out + self._shared(x)
        return out, routing.loss / self.tp

    def take_routing_stats(self) -> Tensor:
        """Return the statistics of all tokens since the last call, a tensor on the device, and reset them."""
        taken = self.routing_stats.clone()
        self.routing_stats.zero_()
        return taken

    def _logits(self, x: Tensor) -> Tensor:
        # In fp32: the plan's precision must not change which of two experts with almost equal scores is chosen.
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), local_for_compute(self.gate.weight).float())

    def _routed(self, x: Tensor, routing: Routing) -> Tensor:
        places = sorted_places(routing.choices.flatten()).view(-1, self.spec.top_k)
        rows = self.dispatch(self.experts, scatter_rows(x.flatten(0, 1), places), routing.counts)
        weights = routing.weights.flatten(0, 1).to(rows.dtype)
        return gather_rows(rows, places, weights).unflatten(0, x.shape[:2])

    def _shared(self, x: Tensor) -> Tensor:
        assert self.shared_expert is not None
        out = self.shared_expert(x)
        return out if self.shared_expert_gate is None else self.shared_expert_gate(x).sigmoid() * out

    def _reset_routing_stats(self) -> None:
        # Not a buffer: buffers are broadcast from rank 0 and saved in checkpoints.
        columns = self.spec.num_experts + NUM_EXTRA_STATS
        self.routing_stats = torch.zeros(columns, dtype=torch.float64, device=self.gate.weight.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._reset_routing_stats()  # on the new device
        return self


def _grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    # torch.compile supports the grouped matmul in bf16 only; other dtypes need a graph break.
    grouped_mm = F.grouped_mm if rows.dtype == torch.bfloat16 else _uncompiled_grouped_mm
    return grouped_mm(rows, weights.transpose(1, 2), offs=ends)


_uncompiled_grouped_mm = torch.compiler.disable(F.grouped_mm)
