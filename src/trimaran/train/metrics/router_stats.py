"""Router statistics of mixture-of-experts layers, for the metrics of a step."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from trimaran.models import ExpertSpec, ModelSpec
from trimaran.nets import NUM_EXTRA_STATS, Decoder, MoeLayer, Network


def copy_to_host_async(tensor: Tensor) -> Callable[[], Tensor]:
    """Start a copy of the tensor to the CPU; return a function that waits for the copy and returns it."""
    copy = tensor.to("cpu", non_blocking=True)
    copied = torch.cuda.Event() if tensor.is_cuda else None
    if copied is not None:
        copied.record()

    def read() -> Tensor:
        if copied is not None:
            copied.synchronize()
        return copy

    return read


def routing_counts(networks: Sequence[Network], device: torch.device) -> Tensor | None:
    """Return this rank's counts since the last call, layer by layer, flat; None without our own MoE layers.

    Sum them over all ranks for `router_details`: layers of other stages are zero rows on this rank. Only training is
    counted. If tp or recompute repeats counts, it does so for the whole layer: the ratios stay the same.
    """
    spec = _moe_spec(networks)
    if spec is None:
        return None
    columns = _experts(spec).num_experts + NUM_EXTRA_STATS
    table = torch.zeros(spec.num_blocks, columns, dtype=torch.float64, device=device)
    for layer, moe_layer in _moe_layers(networks):
        table[layer] = moe_layer.take_routing_stats()
    return table.flatten()


def router_details(counts: Tensor | None, networks: Sequence[Network]) -> Callable[[], dict[str, Any]]:
    """Return a function that returns the metrics of `routing_counts`, summed over all ranks. Call it one step later."""
    spec = _moe_spec(networks)
    if spec is None or counts is None:
        return dict
    copy = copy_to_host_async(counts)
    layers = [number for number in range(spec.num_blocks) if spec.layer(number).experts is not None]
    experts = _experts(spec)

    def read() -> dict[str, Any]:  # one row per layer, before the capacity drops any
        table = copy().view(spec.num_blocks, -1)[layers]
        loads = table[:, :-NUM_EXTRA_STATS]
        choices = loads.sum(1).clamp(min=1)
        dropped, squares = table[:, -NUM_EXTRA_STATS:].unbind(1)
        fractions = loads / choices[:, None]
        max_entropy = math.log(experts.num_experts)
        entropy = -torch.special.xlogy(fractions, fractions).sum(1)
        metrics = {
            "imbalance": fractions.amax(1) * experts.num_experts,
            "idle": (loads == 0).double().mean(1),
            "dropped": dropped / choices,
            "z": squares * experts.top_k / choices,
            "entropy": entropy / max_entropy if max_entropy else torch.ones_like(choices),
        }
        return {"router": {name: each.mean().item() for name, each in metrics.items()}}

    return read


def balance_routers(networks: Sequence[Network], counts: Tensor | None, refused: Tensor) -> None:
    """Update the correction biases of trained routers from `routing_counts` of the global batch, once for each step.

    A refused step changes nothing. Every rank has the same counts, so the ranks that hold a layer stay equal.
    """
    spec = _moe_spec(networks)
    if spec is None or counts is None or not _experts(spec).router.correction_rate:
        return
    table, applied = counts.view(spec.num_blocks, -1)[:, :-NUM_EXTRA_STATS], 1.0 - refused
    for layer, moe_layer in _moe_layers(networks):
        if moe_layer.correction_bias is not None and moe_layer.gate.weight.requires_grad:
            moe_layer.update_correction(table[layer], applied)


def _moe_spec(networks: Sequence[Network]) -> ModelSpec | None:
    """Return the shape of a decoder with MoE layers; None for any other network."""
    module = networks[0].module
    return module.spec if isinstance(module, Decoder) and module.spec.block.experts is not None else None


def _experts(spec: ModelSpec) -> ExpertSpec:
    assert spec.block.experts is not None
    return spec.block.experts


def _moe_layers(networks: Sequence[Network]) -> Iterator[tuple[int, MoeLayer]]:
    """Yield this rank's MoE layers, each with its layer number."""
    for network in networks:
        for number, layer in network.module.get_submodule("layers").named_children():
            for moe_layer in layer.children():
                if isinstance(moe_layer, MoeLayer):
                    yield int(number), moe_layer
