"""Loads adapters beside a rank's part of a base: each rank holds the slices that belong to its slices of the layers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.distributed.tensor import DTensor

from trimaran.core import AdapterSection
from trimaran.nets import Network
from trimaran.nets.adapters.adapter_bank import AdapterBank, refuse_shared_parts
from trimaran.nets.adapters.attach import AdapterLayout, adapter_layout
from trimaran.nets.adapters.lora_linear import LoraLinear, add_adapter
from trimaran.nets.adapters.peft_read import load_peft_adapter
from trimaran.parallel.axes.tp import shard_adapter, take_adapter
from trimaran.serve.adapted_network import described_adapter
from trimaran.serve.engine.model_runner import output_head


@dataclass(frozen=True, slots=True, eq=False)
class DescribedAdapter:
    """An adapter of a PEFT folder, and what it changes in the whole network."""

    name: str
    folder: Path
    section: AdapterSection
    layout: AdapterLayout
    whole: Network | None  # of a pipeline stage


def describe_adapters(whole: Network, folders: Mapping[str, Path], *, is_staged: bool) -> list[DescribedAdapter]:
    """Return what the adapters change in a whole network, before it is sharded. Raises UserError if one does not fit.

    `is_staged`: ranks have stages of it.
    """
    found = []
    for name, folder in folders.items():
        section = described_adapter(whole, folder)
        layout = adapter_layout(whole, section)
        language, head = [*whole.towers.values()][-1], output_head(whole)
        outside = [path for path in sorted(layout.targets)
                   if not path.startswith(language) and whole.module.get_submodule(path) is not head]  # fmt: skip
        refuse_shared_parts(name, sorted(layout.trained), outside)
        found.append(DescribedAdapter(name, folder, section, layout, whole if is_staged else None))
    return found


def load_adapters(
    network: Network, described: Sequence[DescribedAdapter], agreed: Callable[[Callable[[], bool]], bool]
) -> AdapterBank:
    """Return the adapters, loaded beside this rank's part, whose weights are still DTensors. Every rank must call it.

    `agreed` raises on every rank if one raises.
    """
    bank = AdapterBank(network, output_head(network))
    for each in described:
        agreed(lambda adapter=each: _attach_and_fill(network, adapter))
        bank.take(each.name)
    network.module.requires_grad_(False)
    return bank


def _attach_and_fill(network: Network, adapter: DescribedAdapter) -> bool:
    for path, layer in list(network.module.named_modules()):
        if path in adapter.layout.targets and isinstance(layer, nn.Linear):  # else it is in another stage
            _attach(layer, adapter.section)
    load_peft_adapter(network, adapter.folder, adapter.section, adapter.whole)
    network.module.requires_grad_(False)
    return True


def _attach(layer: nn.Linear, section: AdapterSection) -> None:
    """Add unfilled parameters of an adapter to a linear layer, sharded to fit its weight."""
    kind = type(layer)
    add_adapter(layer, section)
    assert isinstance(layer, LoraLinear)
    layer.base_class = kind
    if isinstance(layer.weight, DTensor):
        shard_adapter(layer, layer.weight.device_mesh, take_adapter(layer))
