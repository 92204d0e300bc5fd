"""A network as a plain module from token ids to logits, for graphs that other programs run."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimaran.nets import Network
from trimaran.nets.moe import MoeLayer


class LogitsModule(nn.Module):
    """Maps `input_ids` [B, T] to the logits [B, T, vocab] of a network."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.module = network.module
        self._network = network

    def forward(self, input_ids: Tensor) -> Tensor:
        return self._network.forward({"tokens": input_ids})[0]


class DenseMoeLayer(nn.Module):
    """A MoE layer without custom operators: every expert processes every token, and the router's weights select.

    The result is the same, for `num_experts / top_k` times the FLOPs.
    """

    def __init__(self, layer: MoeLayer) -> None:
        super().__init__()
        self.spec, self.gate, self.experts = layer.spec, layer.gate, layer.experts
        self.shared_expert, self.shared_expert_gate = layer.shared_expert, layer.shared_expert_gate

    def forward(self, x: Tensor) -> Tensor:
        probabilities = self.gate(x).softmax(-1)
        weights, choices = probabilities.topk(self.spec.top_k)
        if self.spec.normalize_top_k:
            weights = weights / weights.sum(-1, keepdim=True)
        mixture = torch.zeros_like(probabilities).scatter(-1, choices, weights)
        gate = torch.einsum("bth,efh->btef", x, self.experts.gate_proj)
        up = torch.einsum("bth,efh->btef", x, self.experts.up_proj)
        inner = F.silu(gate) * up * mixture.unsqueeze(-1)
        out = torch.einsum("btef,ehf->bth", inner, self.experts.down_proj)
        if self.shared_expert is None:
            return out
        shared = self.shared_expert(x)
        return out + (shared if self.shared_expert_gate is None else self.shared_expert_gate(x).sigmoid() * shared)


def portable_module(network: Network) -> LogitsModule:
    """Return a copy of the network as a module that a graph can be made of. The network itself is not changed."""
    copied = copy.deepcopy(network)
    for part in list(copied.module.modules()):
        for name, child in list(part.named_children()):
            if isinstance(child, MoeLayer):
                setattr(part, name, DenseMoeLayer(child))
    return LogitsModule(copied).eval().requires_grad_(False)
