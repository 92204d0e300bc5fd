"""Graphs from token ids to logits: ONNX and archives of torch.export."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trimaran.core import UserError
from trimaran.nets import MoeLayer, Network, VlmNetwork, choose_experts
from trimaran.serve.exports.compare_logits import Logits, quiet_packages, require_package

PROGRAM, ONNX = "model.pt2", "model.onnx"
EXAMPLE_SHAPE = (2, 8)  # neither dimension may be 1: torch.export would make it a constant


class LogitsModule(nn.Module):
    """Maps `input_ids` [B, T] to the logits [B, T, vocab] of a network."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.module = network.module
        self._network = network

    def forward(self, input_ids: Tensor) -> Tensor:
        return self._network.forward({"tokens": input_ids})[0]


class DenseMoeLayer(nn.Module):
    """A MoE layer of plain operators: each expert takes each token, for `num_experts / top_k` times the FLOPs."""

    def __init__(self, layer: MoeLayer) -> None:
        super().__init__()
        self.spec, self.gate, self.experts = layer.spec, layer.gate, layer.experts
        self.shared_expert, self.shared_expert_gate = layer.shared_expert, layer.shared_expert_gate
        self.register_buffer("correction_bias", layer.correction_bias)

    def forward(self, x: Tensor) -> Tensor:
        choices, weights = choose_experts(self.gate(x), self.spec, self.correction_bias)[:2]
        mixture = (
            torch.zeros(*weights.shape[:-1], self.spec.num_experts, dtype=x.dtype)
            .scatter(-1, choices, weights)
            .unsqueeze(-1)
        )
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


def portable_module(network: Network) -> LogitsModule:
    """Return a copy of the network as a module that a graph can be made of. The network itself is not changed."""
    copied = copy.deepcopy(network)
    for part in list(copied.module.modules()):
        for name, child in list(part.named_children()):
            if isinstance(child, MoeLayer):
                setattr(part, name, DenseMoeLayer(child))
    return LogitsModule(copied).eval().requires_grad_(False)


def graph_module(network: Network, where: str) -> LogitsModule:
    """Return the module to make a graph of. Raises UserError for a model that takes more than token ids."""
    if isinstance(network, VlmNetwork) or "vision_config" in network.disk_config():
        raise UserError("K070.graph-token-ids", where=where)
    return portable_module(network).cpu()


def trace(module: LogitsModule, *, max_seq_len: int, where: str) -> Any:
    """Return the `ExportedProgram` of a module, with any batch size and any length up to `max_seq_len`."""
    batch, length = torch.export.Dim("batch", min=1), torch.export.Dim("sequence", min=1, max=min(max_seq_len, 2**31))
    tokens = torch.zeros(EXAMPLE_SHAPE, dtype=torch.int64)
    try:
        with torch.no_grad(), quiet_packages():
            return torch.export.export(
                module, (tokens,), dynamic_shapes={"input_ids": {0: batch, 1: length}}, strict=False
            )
    except Exception as error:  # torch.export has no common class for what it cannot trace
        raise _not_traced(error, where) from error


def _not_traced(error: Exception, where: str) -> Exception:
    reason = error.__cause__ or error
    first_line = next(iter(str(reason).strip().splitlines()), type(reason).__name__)
    return UserError("K070.torch-cannot-make", where=where, first_line=first_line[:300])


def write_program(module: LogitsModule, file: Path, *, max_seq_len: int) -> None:
    program = trace(module, max_seq_len=max_seq_len, where="--to torch-export")
    with quiet_packages():
        torch.export.save(program, file)


def read_program(file: Path) -> Logits:
    with quiet_packages():
        loaded = torch.export.load(file).module()

    @torch.no_grad()
    def logits(tokens: Tensor) -> Tensor:
        return loaded(tokens).float()

    return logits


def write_onnx(module: LogitsModule, file: Path, *, max_seq_len: int) -> None:
    for package in ("onnx", "onnxscript"):
        require_package(package, where="--to onnx")
    program = trace(module, max_seq_len=max_seq_len, where="--to onnx")
    try:
        with quiet_packages():
            onnx_program = torch.onnx.export(
                program, input_names=["input_ids"], output_names=["logits"], dynamo=True, verbose=False
            )
            assert onnx_program is not None
            onnx_program.save(file, external_data=True)
    except Exception as error:
        raise _not_traced(error, "--to onnx") from error


def read_onnx(file: Path) -> Logits:
    runtime = require_package("onnxruntime", where="--to onnx")
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # its warnings are about its own optimisations
    session = runtime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

    def logits(tokens: Tensor) -> Tensor:
        return torch.from_numpy(session.run(["logits"], {"input_ids": tokens.numpy()})[0]).float()

    return logits
