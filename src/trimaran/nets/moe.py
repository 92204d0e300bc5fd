"""Feed-forward blocks: one for all tokens, or experts among which a router chooses."""

from collections.abc import Callable
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimaran.models import ExpertSpec
from trimaran.nets.attention_context import Context
from trimaran.nets.joint_projections import gated
from trimaran.nets.local_shards import computing_part
from trimaran.nets.moe_router import CENSUS, Routing, route


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)
        self.joint = False

    @property
    def projections(self) -> tuple[nn.Linear, ...]:
        """What may be one product. It is, where `joint` says that the weights lie as `nets.joint` wants them."""
        return (self.gate_proj, self.up_proj)

    def forward(self, x: Tensor) -> Tensor:
        if self.joint:
            return gated(x, self.gate_proj, self.up_proj, self.down_proj)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class ExpertWeights(nn.Module):
    """All experts of a layer, stacked along the first dimension; or, split, those of this rank or a slice of each."""

    def __init__(self, num_experts: int, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Parameter(torch.empty(num_experts, width, hidden))
        self.up_proj = nn.Parameter(torch.empty(num_experts, width, hidden))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden, width))

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Return each row through its expert; the rows of expert e, of those that are here, end before row `ends[e]`.

        One product covers all experts, so those without rows get a gradient of zeros and never none at all. It wants
        at least one row, and leaves what was in memory in those behind the last end.
        """
        rows = as_autocast(rows)
        weights = (computing_part(each) for each in (self.gate_proj, self.up_proj, self.down_proj))
        gate, up, down = (each.to(rows.dtype) for each in weights)
        inner = F.silu(_grouped(rows, gate, ends)) * _grouped(rows, up, ends)
        return _grouped(inner, down, ends)


def as_autocast(rows: Tensor) -> Tensor:
    """Return `rows` in the dtype of autocast, on whose list the grouped product is not."""
    device = rows.device.type
    return rows.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else rows


# Rows sorted by expert and how many each expert gets, in; their results, in the same order, out. There may be rows
# behind those of the last expert: nobody looks at their results, which need only be numbers.
Dispatch = Callable[[ExpertWeights, Tensor, Tensor], Tensor]


def at_home(experts: ExpertWeights, rows: Tensor, counts: Tensor) -> Tensor:
    """Return `rows` through experts that are all on this rank. The last one takes what nobody looks at."""
    ends = counts.cumsum(0, dtype=torch.int32)
    ends[-1:].fill_(len(rows))  # to assign would make the host wait
    return experts(rows, ends)


class MoeLayer(nn.Module):
    """A router, its experts, and perhaps one expert that every token passes.

    `parallel/axes/ep.py` splits it and sets `dispatch` and `tp`, `Decoder.use_context` sets `context`. With `tp` above
    1 every rank has a slice of each expert: what it returns, loss and gradients of `x` included, is its summand.
    """

    def __init__(self, experts: ExpertSpec, hidden: int) -> None:
        super().__init__()
        self.spec = experts
        self.gate = nn.Linear(hidden, experts.num_experts, bias=False)
        self.experts = ExpertWeights(experts.num_experts, hidden, experts.ffn)
        self.shared_expert = FeedForward(hidden, experts.shared_ffn) if experts.shared_ffn else None
        self.shared_expert_gate = nn.Linear(hidden, 1, bias=False) if experts.shared_gate else None
        self.context, self.tp = Context(), 1
        self.dispatch: Dispatch = at_home
        self._start_tally()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mixture's output for `x` [B, T, hidden] and its balance and z-loss, summed over the sequences.

        The capacity holds in training only.
        """
        routing = route(self._logits(x), self.spec, self.context, limited=self.training)
        if self.training and torch.is_grad_enabled():
            self.tally = self.tally.to(x.device).add_(routing.census)  # weights may live on the host, and it with them
        out = self._routed(x, routing)
        if self.shared_expert is not None:
            out = out + self._shared(x)
        return out, routing.loss / self.tp

    def take_tally(self) -> Tensor:
        """Return the census of all tokens since it was last taken, a tensor on the device, and start another."""
        taken = self.tally.clone()
        self.tally.zero_()
        return taken

    def _logits(self, x: Tensor) -> Tensor:
        # In fp32, since two experts that score almost alike must not change places with the precision of the plan.
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), computing_part(self.gate.weight).float())

    def _routed(self, x: Tensor, routing: Routing) -> Tensor:
        order = routing.choices.flatten().argsort(stable=True)
        rows = self.dispatch(self.experts, x.flatten(0, 1)[order // self.spec.top_k], routing.counts)
        rows = rows[order.argsort()].view(*routing.choices.shape, -1)
        return (rows * routing.weights.unsqueeze(-1).to(rows.dtype)).sum(-2)

    def _shared(self, x: Tensor) -> Tensor:
        assert self.shared_expert is not None
        out = self.shared_expert(x)
        return out if self.shared_expert_gate is None else self.shared_expert_gate(x).sigmoid() * out

    def _start_tally(self) -> None:
        # Not a buffer: those are copied from rank 0 to the others, and are part of a checkpoint.
        columns = self.spec.num_experts + CENSUS
        self.tally = torch.zeros(columns, dtype=torch.float64, device=self.gate.weight.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._start_tally()  # where the weights are now
        return self


def _grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    # Compiled graphs hold this product in bf16 alone; for other dtypes they break around it.
    product = F.grouped_mm if rows.dtype == torch.bfloat16 else _grouped_outside_graphs
    return product(rows, weights.transpose(1, 2), offs=ends)


_grouped_outside_graphs = torch.compiler.disable(F.grouped_mm)
