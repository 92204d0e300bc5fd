"""Attaches an adapter to a network: freezes everything, and turns the targeted linear layers into `LoraLinear`s."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from trimaran.core import AdapterSection, UserError, did_you_mean
from trimaran.models import ALL_LINEAR, is_named, last_parts, listed, refuse_large_rank, refuse_unknown_targets
from trimaran.nets.adapters.lora_linear import LoraLinear, add_adapter
from trimaran.nets.network import Network, output_head, refuse_unknown_tower, tower_of


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """Names in a whole network: layers that get an adapter, and parameters trained in full, under all names of each."""

    targets: frozenset[str]
    trained: frozenset[str]


def attach_adapter(network: Network, section: AdapterSection, whole: Network | None = None) -> None:
    """Freeze the network but for what the section trains, in place, and add the adapter's parameters, unfilled.

    Parameter names do not change. Runs before the plan is applied. A pipeline stage needs the `whole` network, on the
    meta device, because a target may be in another stage only.
    """
    layout = adapter_layout(network if whole is None else whole, section)
    for name, parameter in network.module.named_parameters(remove_duplicate=False):
        parameter.requires_grad_(parameter.requires_grad and name in layout.trained)
    for name, module in list(network.module.named_modules()):
        if name in layout.targets:
            assert isinstance(module, nn.Linear)
            add_adapter(module, section)


def adapter_layout(network: Network, section: AdapterSection) -> AdapterLayout:
    """Return what the adapter changes in a whole network. Raises if the section does not fit it."""
    for tower in section.towers:
        refuse_unknown_tower(tower, network.towers, code="M012", where="model.adapter.towers")
    adapted = section.towers or ([*network.towers][-1],)
    modules = {name: each for name, each in network.module.named_modules() if name}
    wanted: set[int] = set()
    for pattern in section.train:  # modules that are trained in full; a pattern may also be the name of a tower
        matching = [each for name, each in modules.items() if is_named(name, pattern)]
        if pattern in network.towers:
            prefix = network.towers[pattern].removesuffix(".")
            matching = [each for name, each in modules.items() if tower_of(name, network.towers) == pattern]
            matching = [modules[prefix]] if prefix in modules else matching
        parameters = {id(each) for module in matching for each in module.parameters()}
        if not parameters:
            known = [*network.towers, *last_parts(modules)]
            raise UserError(
                "M051.no-module",
                where="model.adapter.train",
                pattern=pattern,
                guess=did_you_mean(pattern, known),
                modules=listed(last_parts(modules)),
            )
        wanted |= parameters
    names = network.module.named_parameters(remove_duplicate=False)
    trained = frozenset(name for name, each in names if id(each) in wanted and each.requires_grad)
    # Experts are no linear layers, and a gate with one output has no low rank.
    not_called = network.uncalled_linears()
    plain = {name: part for name, part in network.module.named_modules() if type(part) is nn.Linear}
    linears = {
        name: each
        for name, each in plain.items()
        if each.out_features > 1 and each not in not_called
        if tower_of(name, network.towers) in adapted and f"{name}.weight" not in trained
    }
    targets = _matching(network, section, linears)
    sizes = {name: (linears[name].in_features, linears[name].out_features) for name in targets}
    refuse_large_rank(sizes, section.rank)
    return AdapterLayout(targets=targets, trained=trained)


def linears_to_pack(network: Network, section: AdapterSection) -> Iterable[nn.Linear]:
    """Yield the layers that a 4-bit base packs, after `attach_adapter`: those inside the blocks of adapted towers."""
    adapted = section.towers or ([*network.towers][-1],)
    blocks, not_called = {part for block in network.blocks for part in block.modules()}, network.uncalled_linears()
    for name, part in network.module.named_modules():
        is_called = type(part) in (nn.Linear, LoraLinear) and part not in not_called
        if is_called and part in blocks and tower_of(name, network.towers) in adapted:
            assert isinstance(part, nn.Linear)
            yield part


def _matching(network: Network, section: AdapterSection, linears: dict[str, nn.Linear]) -> frozenset[str]:
    """Return the names of the targets; `all-linear` are all but the head, as in PEFT."""
    head = output_head(network)
    if section.targets == ALL_LINEAR:
        found = frozenset(name for name, each in linears.items() if each is not head)
        if not found:
            raise UserError("M054.no-layer-towers", where="model.adapter.targets")
        return found
    refuse_unknown_targets(section.targets, linears)
    found = frozenset(name for name in linears for pattern in section.targets if is_named(name, pattern))
    owned = [id(each) for _, each in network.module.named_parameters(remove_duplicate=False)]
    if any(linears[name] is head and owned.count(id(linears[name].weight)) > 1 for name in found):
        raise UserError("M053.head-tied-embedding", where="model.adapter.targets")
    return found
