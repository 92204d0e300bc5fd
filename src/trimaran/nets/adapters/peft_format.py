"""An adapter in PEFT's format: the names of its tensors, and adapter_config.json.

A projection that is joint in transformers' model but three layers in ours (queries, keys and values of Qwen2-VL's
vision tower) gets one adapter in PEFT: the ranks add up, and `lora_B` is block-diagonal.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimaran.core import AdapterSection, UserError
from trimaran.nets.adapters.attach import adapter_layout
from trimaran.nets.adapters.lora_linear import LoraLinear, is_adapter_parameter
from trimaran.nets.decoder.moe import ExpertWeights
from trimaran.nets.network import Network
from trimaran.nets.vlm.vlm_names import DiskTensor
from trimaran.nets.whole_tensors import ReadTensor, full_tensor

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
DOWN, UP, MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
SUFFIXES = (DOWN, UP, MAGNITUDE)
WEIGHT = ".weight"
WITH_UNUSED_LAYERS = "model.vision_tower."  # of LLaVA: it does not use the last ones, and our network has none of them


@dataclass(frozen=True, slots=True)
class LoraPart:
    """The adapter of one of our layers, unsharded: `lora_A`, `lora_B`, and `lora_magnitude` of DoRA.

    It is part number `part` of the module of transformers' model.
    """

    part: int
    down: Tensor
    up: Tensor
    magnitude: Tensor | None


def peft_tensors(network: Network, read: ReadTensor = full_tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the adapter and the modules that are trained in full, unsharded, on the CPU, under PEFT's names.

    Every rank must take every item. `read` is as in `Network.disk_tensors`. `refuse_inexpressible` has checked that
    PEFT has a form for all of it.
    """
    layers = [(name, each) for name, each in network.module.named_modules() if isinstance(each, LoraLinear)]
    num_parts = Counter(network.hf_parameter(name + WEIGHT).name for name, _ in layers)
    waiting: dict[str, list[LoraPart]] = {}
    for name, layer in layers:
        stored = network.hf_parameter(name + WEIGHT)
        magnitude = None if layer.lora_magnitude is None else read(layer.lora_magnitude)
        parts = waiting.setdefault(stored.name, [])
        parts.append(LoraPart(stored.part, read(layer.lora_A), read(layer.lora_B), magnitude))
        if len(parts) == num_parts[stored.name]:
            module = PREFIX + stored.name.removesuffix(WEIGHT)
            yield from ((module + suffix, each) for suffix, each in _joined(waiting.pop(stored.name), stored))
    yield from _trained_tensors(network, read)


def _joined(parts: Sequence[LoraPart], stored: DiskTensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of one module of PEFT, by suffix; `parts` are some or all of the parts of it."""
    by_part, total, first = {each.part: each for each in parts}, stored.parts, parts[0].up
    sizes = stored.shares or (len(first),) * total
    empty = [first.new_empty(size, 0) for size in sizes]  # adds rows of zeros for a part without an adapter
    ups = [by_part[number].up if number in by_part else empty[number] for number in range(total)]
    yield DOWN, torch.cat([by_part[number].down for number in sorted(by_part)])
    yield UP, ups[0].clone() if total == 1 else torch.block_diag(*ups)
    if parts[0].magnitude is not None:
        magnitudes = (by_part[number].magnitude for number in sorted(by_part))
        yield MAGNITUDE, torch.cat([each for each in magnitudes if each is not None])


def _trained_tensors(network: Network, read: ReadTensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters outside the adapter that are trained; a tied one under all its names."""
    waiting: dict[str, list[Tensor]] = {}
    for name, parameter in network.module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad and not is_adapter_parameter(name):
            stored, value = network.hf_parameter(name), read(parameter)
            values = waiting.setdefault(stored.name, [])
            values.append(value)
            if len(values) == stored.parts:  # the parts of one tensor come in order: queries, keys, values
                whole = stored.joined(waiting.pop(stored.name)) if stored.parts > 1 else value
                yield PREFIX + stored.name, whole.view(stored.shape) if stored.shape else whole.clone()


def refuse_inexpressible(network: Network, section: AdapterSection) -> None:
    """Raise UserError if PEFT has no form for the adapter of a whole network, which is not yet attached."""
    layout = adapter_layout(network, section)
    trained = Counter(network.hf_parameter(name).name for name in layout.trained)
    for name in sorted(layout.trained):
        stored = network.hf_parameter(name)
        if isinstance(network.module.get_submodule(name.rpartition(".")[0]), ExpertWeights):
            raise _inexpressible(f"{name} holds the weights of all experts in one tensor", "train")
        if stored.parts > 1 and trained[stored.name] < stored.parts:
            raise _inexpressible(f"{name} is a part of {stored.name}, whose other parts are not trained", "train")
    targets = Counter(network.hf_parameter(name + WEIGHT).name for name in layout.targets)
    for name in sorted(layout.targets):
        stored = network.hf_parameter(name + WEIGHT)
        if stored.groups > 1:
            raise _inexpressible(f"{name} alternates with other parts in {stored.name}", "targets")
        if section.kind == "dora" and targets[stored.name] < stored.parts:
            raise _inexpressible(f"{name} is a part of {stored.name}, whose other parts have no adapter", "targets")


def _inexpressible(what: str, field: str) -> UserError:
    return UserError("K050", f"this adapter cannot be saved in PEFT's format: {what}", where=f"model.adapter.{field}",
                     fix="name the other parts too, or leave this one out")  # fmt: skip


def peft_config(section: AdapterSection, tensors: Mapping[str, Tensor], modules: Iterable[str]) -> dict[str, Any]:
    """Return adapter_config.json for these tensors, without the base.

    `modules` are all modules with parameters of transformers' model.
    """
    ranks = {_module_of(name): len(each) for name, each in tensors.items() if name.endswith(DOWN)}
    others = {name: rank for name, rank in ranks.items() if rank != section.rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "auto_mapping": None,
        "base_model_name_or_path": None,
        "revision": None,
        "inference_mode": True,
        "r": section.rank,
        "lora_alpha": _number(section.alpha),
        "lora_dropout": section.dropout,
        "use_rslora": section.rank_stabilised,
        "use_dora": section.kind == "dora",
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "target_modules": _shortest_names(ranks, modules),
        "modules_to_save": _saved_modules(tensors) or None,
        "rank_pattern": others,
        "alpha_pattern": {name: _joint_alpha(section, rank) for name, rank in others.items()},
        "layers_to_transform": None,
        "layers_pattern": None,
    }


def hf_modules(network: Network) -> set[str]:
    """Return the names of the modules of transformers' model that have parameters; `network` must be a whole one."""
    names = (name for name, _ in network.module.named_parameters(remove_duplicate=False))
    return {network.hf_parameter(each).name.rpartition(".")[0] for each in names if not is_adapter_parameter(each)}


def _joint_alpha(section: AdapterSection, rank: int) -> float:
    """Return the alpha with which an adapter of this rank has the recipe's scaling."""
    factor = rank / section.rank
    return _number(section.alpha * (math.sqrt(factor) if section.rank_stabilised else factor))


def _number(value: float) -> float:
    return int(value) if float(value).is_integer() else value


def _module_of(name: str) -> str:
    return name.removeprefix(PREFIX).removesuffix(DOWN)


def _shortest_names(targets: Iterable[str], modules: Iterable[str]) -> list[str]:
    """Return the last parts of the targets' names if they match no other module, else the full names."""
    chosen = {*targets}
    last = {name.rpartition(".")[2] for name in chosen}
    clash = any(name.rpartition(".")[2] in last for name in {*modules} - chosen)
    clash |= any(name.startswith(WITH_UNUSED_LAYERS) for name in chosen)
    return sorted(chosen if clash or any(each.isdigit() for each in last) else last)


def _saved_modules(tensors: Iterable[str]) -> list[str]:
    """Return the modules that hold the parameters outside the adapter; of one inside another only the outer one."""
    owners = {name.removeprefix(PREFIX).rpartition(".")[0] for name in tensors if not name.endswith(SUFFIXES)}
    return sorted(name for name in owners if not any(name.startswith(f"{each}.") for each in owners))
