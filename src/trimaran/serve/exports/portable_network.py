"""A network as a plain module from token ids to logits, for graphs that other programs run."""

import copy

import torch
from torch import Tensor, nn

from trimaran.nets import Network
from trimaran.nets.decoder.moe import MoeLayer
from trimaran.nets.decoder.moe_router import choose_experts


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
        self.register_buffer("correction_bias", layer.correction_bias)

    def forward(self, x: Tensor) -> Tensor:
        mixture = self._mixture(x).unsqueeze(-1)
        experts, given = self.experts, x.unsqueeze(-2)
        if self.spec.router.weights_input:
            given, mixture = given * mixture, (mixture > 0).to(x.dtype)
            gate, up = (torch.einsum("bteh,efh->btef", given, each) for each in (experts.gate_proj, experts.up_proj))
        else:
            gate, up = (torch.einsum("bth,efh->btef", x, each) for each in (experts.gate_proj, experts.up_proj))
        if self.spec.unit.bias:
            gate, up = gate + experts.gate_proj_bias, up + experts.up_proj_bias
        inner = experts.gated(gate, up) * mixture
        out = torch.einsum("btef,ehf->bth", inner, experts.down_proj)
        if self.spec.unit.bias:
            out = out + mixture.squeeze(-1) @ experts.down_proj_bias
        if self.shared_expert is None:
            return out
        shared = self.shared_expert(x)
        return out + (shared if self.shared_expert_gate is None else self.shared_expert_gate(x).sigmoid() * shared)

    def _mixture(self, x: Tensor) -> Tensor:
        """Return the weight of every expert for each token, 0 for those that were not chosen."""
        choices, weights = choose_experts(self.gate(x), self.spec, self.correction_bias)[:2]
        return torch.zeros(*weights.shape[:-1], self.spec.num_experts, dtype=x.dtype).scatter(-1, choices, weights)


def portable_module(network: Network) -> LogitsModule:
    """Return a copy of the network as a module that a graph can be made of. The network itself is not changed."""
    copied = copy.deepcopy(network)
    for part in list(copied.module.modules()):
        for name, child in list(part.named_children()):
            if isinstance(child, MoeLayer):
                setattr(part, name, DenseMoeLayer(child))
    return LogitsModule(copied).eval().requires_grad_(False)
