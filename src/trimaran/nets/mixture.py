"""Feed-forward blocks: one for all tokens, or experts among which a router chooses."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimaran.models import Experts as ExpertsSpec


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """All experts of a layer, stacked along the first dimension."""

    def __init__(self, num_experts: int, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Parameter(torch.empty(num_experts, width, hidden))
        self.up_proj = nn.Parameter(torch.empty(num_experts, width, hidden))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden, width))

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Return each row through its expert; the rows of expert e end before row `ends[e]`.

        One product covers all experts, so those without rows get a gradient of zeros and never none at all.
        """
        device = rows.device.type
        # The grouped product is not on autocast's list.
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else rows.dtype
        rows, gate, up, down = (each.to(dtype) for each in (rows, self.gate_proj, self.up_proj, self.down_proj))
        inner = F.silu(_grouped(rows, gate, ends)) * _grouped(rows, up, ends)
        return _grouped(inner, down, ends)


class Mixture(nn.Module):
    """A router, its experts, and perhaps one expert that every token passes. No token is ever dropped."""

    def __init__(self, experts: ExpertsSpec, hidden: int) -> None:
        super().__init__()
        self.spec = experts
        self.gate = nn.Linear(hidden, experts.num_experts, bias=False)
        self.experts = Experts(experts.num_experts, hidden, experts.ffn)
        self.shared_expert = FeedForward(hidden, experts.shared_ffn) if experts.shared_ffn else None
        self.shared_expert_gate = nn.Linear(hidden, 1, bias=False) if experts.shared_gate else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mixture's output for `x` [B, T, hidden] and its balance loss, summed over the sequences."""
        probabilities = self._probabilities(x)
        weights, choices = probabilities.topk(self.spec.top_k)
        if self.spec.normalize_top_k:
            weights = weights / weights.sum(-1, keepdim=True)
        # [B, experts]: how many tokens of each sequence chose each expert
        loads = torch.zeros_like(probabilities).scatter_(-1, choices, 1.0).sum(1)
        out = self._routed(x, weights, choices, loads.int().sum(0).cumsum(0))
        if self.shared_expert is not None:
            out = out + self._shared(x)
        shares = loads / (x.shape[1] * self.spec.top_k)
        coefficient = self.spec.balance * x.shape[1] * self.spec.num_experts
        return out, coefficient * (shares * probabilities.mean(1)).sum()

    def _probabilities(self, x: Tensor) -> Tensor:
        # In fp32, since two experts that score almost alike must not change places with the precision of the plan.
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.gate.weight.float()).softmax(-1)

    def _routed(self, x: Tensor, weights: Tensor, choices: Tensor, ends: Tensor) -> Tensor:
        order = choices.flatten().argsort(stable=True)
        rows = self.experts(x.flatten(0, 1)[order // self.spec.top_k], ends.int())
        rows = rows[order.argsort()].view(*choices.shape, -1)
        return (rows * weights.unsqueeze(-1).to(rows.dtype)).sum(-2)

    def _shared(self, x: Tensor) -> Tensor:
        assert self.shared_expert is not None
        out = self.shared_expert(x)
        return out if self.shared_expert_gate is None else self.shared_expert_gate(x).sigmoid() * out


def _grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    # Compiled graphs hold this product in bf16 alone; for other dtypes they break around it.
    product = F.grouped_mm if rows.dtype == torch.bfloat16 else _grouped_outside_graphs
    return product(rows, weights.transpose(1, 2), offs=ends)


_grouped_outside_graphs = torch.compiler.disable(F.grouped_mm)
