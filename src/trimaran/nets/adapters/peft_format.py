"""An adapter in PEFT's format: the names of its tensors, and adapter_config.json.

A projection that is joint in transformers' model but three layers in ours (queries, keys and values of Qwen2-VL's
vision tower) gets one adapter in PEFT: the ranks add up, and `lora_B` is block-diagonal.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trimaran.core import AdapterSection, UserError, check_regular_file
from trimaran.models import disk_form, read_json
from trimaran.nets.adapters.attach import AdapterLayout, adapter_layout
from trimaran.nets.adapters.lora_linear import LoraLinear, adapter_scaling, is_adapter_parameter
from trimaran.nets.decoder.moe import ExpertWeights
from trimaran.nets.hf_weights import damaged, first_few
from trimaran.nets.local_shards import ReadTensor, full_tensor, is_on_meta, local_part, local_slices
from trimaran.nets.network import Network
from trimaran.nets.vlm.vlm_names import DiskTensor, canonical, to_memory
from trimaran.nets.vlm.vlm_network import VlmNetwork

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
DOWN, UP, MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
SUFFIXES = (DOWN, UP, MAGNITUDE)
WEIGHT = ".weight"
WITH_UNUSED_LAYERS = "model.vision_tower."  # of LLaVA: it does not use the last ones, and our network has none of them
MAX_CONFIG_BYTES = 10_000_000
PICKLED_WEIGHTS = "adapter_model.bin"


@dataclass(frozen=True, slots=True)
class LoraPart:
    """The unsharded adapter of one of our layers, which is part number `part` of a module of transformers' model."""

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
    # The parameters outside the adapter that are trained; a tied one under all its names.
    incomplete: dict[str, list[Tensor]] = {}
    for name, parameter in network.module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad and not is_adapter_parameter(name):
            stored, value = network.hf_parameter(name), read(parameter)
            values = incomplete.setdefault(stored.name, [])
            values.append(value)
            if len(values) == stored.parts:  # the parts of one tensor come in order: queries, keys, values
                whole = stored.joined(incomplete.pop(stored.name)) if stored.parts > 1 else value
                yield PREFIX + stored.name, whole.view(stored.shape) if stored.shape else whole.clone()


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
    return UserError("K050.adapter-cannot-saved", where=f"model.adapter.{field}", text=what)


def peft_config(section: AdapterSection, tensors: Mapping[str, Tensor], modules: Iterable[str]) -> dict[str, Any]:
    """Return adapter_config.json without the base; `modules` are all modules with parameters of transformers' model."""
    downs = [name for name in tensors if name.endswith(DOWN)]
    ranks = {name.removeprefix(PREFIX).removesuffix(DOWN): len(tensors[name]) for name in downs}
    others = {name: rank for name, rank in ranks.items() if rank != section.rank}
    factors = {name: rank / section.rank for name, rank in others.items()}  # alphas have the recipe's scaling
    scales = {name: math.sqrt(each) if section.rank_stabilised else each for name, each in factors.items()}
    alphas = {name: _number(section.alpha * each) for name, each in scales.items()}
    owners = {name.removeprefix(PREFIX).rpartition(".")[0] for name in tensors if not name.endswith(SUFFIXES)}
    # The last parts of the targets' names if they match no other module, else the full names.
    last = {name.rpartition(".")[2] for name in ranks}
    clash = any(name.rpartition(".")[2] in last for name in {*modules} - ranks.keys())
    clash |= any(name.startswith(WITH_UNUSED_LAYERS) for name in ranks) or any(each.isdigit() for each in last)
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
        "target_modules": sorted(ranks if clash else last),
        # The modules with the parameters outside the adapter; of one inside another only the outer one.
        "modules_to_save": sorted(each for each in owners if not each.startswith(tuple(f"{o}." for o in owners)))
        or None,
        "rank_pattern": others,
        "alpha_pattern": alphas,
        "layers_to_transform": None,
        "layers_pattern": None,
    }


def hf_modules(network: Network) -> set[str]:
    """Return the names of the modules of transformers' model that have parameters; `network` must be a whole one."""
    names = (name for name, _ in network.module.named_parameters(remove_duplicate=False))
    return {network.hf_parameter(each).name.rpartition(".")[0] for each in names if not is_adapter_parameter(each)}


def _number(value: float) -> float:
    return int(value) if float(value).is_integer() else value


@dataclass(frozen=True, slots=True)
class PeftFolder:
    """An open PEFT folder: its config, its tensors by the names that `peft_tensors` gives them, and their file."""

    path: Path
    config: Mapping[str, Any]
    names: Mapping[str, str]
    file: Any

    def tensor(self, name: str) -> Tensor:
        return self.file.get_tensor(self.names[name])

    def scaling(self, module: str, rank: int) -> float:
        """Return the factor of the output of this module's adapter."""
        pattern = self.config.get("alpha_pattern") or {}
        matching = (alpha for key, alpha in pattern.items() if re.match(rf"(.*\.)?({key})$", module))
        alpha = next(matching, self.config.get("lora_alpha", 8))
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)


def load_peft_adapter(network: Network, folder: Path, section: AdapterSection, whole: Network | None = None) -> None:
    """Fill the adapter and the modules that are trained in full, in place, from a PEFT folder; each rank its shards.

    Raises UserError if the folder does not hold exactly the adapter that `section` describes; a network on the meta
    device is only checked. A pipeline stage needs the `whole` network, on the meta device and without an adapter, as
    in `attach_adapter`.
    """
    layers = {name: each for name, each in network.module.named_modules() if isinstance(each, LoraLinear)}
    trained = {name: each for name, each in network.module.named_parameters(remove_duplicate=False)
               if each.requires_grad and not is_adapter_parameter(name)}  # fmt: skip
    layout = adapter_layout(whole, section) if whole else AdapterLayout(frozenset(layers), frozenset(trained))
    stored = {name: network.hf_parameter(name + WEIGHT) for name in layers}
    with ExitStack() as stack, torch.no_grad():
        if not (folder / PEFT_CONFIG).is_file() or not (folder / PEFT_WEIGHTS).is_file():
            is_pickled = (folder / PICKLED_WEIGHTS).exists()
            pickled = f"; {PICKLED_WEIGHTS} is a pickle, which is not read" if is_pickled else ""
            raise UserError(
                "K051.not-peft-adapter",
                where=str(folder),
                peft_config=PEFT_CONFIG,
                peft_weights=PEFT_WEIGHTS,
                pickled=pickled,
            )
        config = read_json(folder / PEFT_CONFIG, limit_bytes=MAX_CONFIG_BYTES)
        try:
            check_regular_file(folder / PEFT_WEIGHTS, follow_links=True)  # in a Hugging Face cache every file is a link
            file = stack.enter_context(safe_open(folder / PEFT_WEIGHTS, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise damaged(folder / PEFT_WEIGHTS, error) from None
        opened = PeftFolder(folder, config, {_current_name(name, network): name for name in file.keys()}, file)  # noqa: SIM118 - not a dict
        _refuse_other_adapter(opened, network, layout, section)
        if is_on_meta(network.module):
            return
        try:
            for name, layer in layers.items():
                before = sum(
                    each.name == stored[name].name and each.part < stored[name].part for each in stored.values()
                )
                _fill_layer(layer, stored[name], before, opened, section)
            for name, parameter in trained.items():
                disk = network.hf_parameter(name)
                value = opened.tensor(PREFIX + disk.name)
                value = disk.taken_from(value) if disk.parts > 1 else value
                if value.numel() != parameter.numel():
                    raise _other_shape(opened, disk.name, f"the shape {[*value.shape]}")
                _fill(parameter, value.view(parameter.shape))
        except SafetensorError as error:
            raise damaged(folder, error) from None


def _current_name(name: str, network: Network) -> str:
    """Return the name that `peft_tensors` gives a tensor: without PEFT's wrappers, in today's names."""
    name = name.replace(".modules_to_save.", ".").replace(".default.", ".")
    if not isinstance(network, VlmNetwork):
        return name
    suffix = next((each for each in SUFFIXES if name.endswith(each)), "")
    stored = name.removeprefix(PREFIX).removesuffix(suffix) + (WEIGHT if suffix else "")
    form = disk_form(network.spec)
    stored = to_memory(canonical(stored, form), form)
    return PREFIX + (stored.removesuffix(WEIGHT) + suffix if suffix else stored)


def _refuse_other_adapter(opened: PeftFolder, network: Network, layout: AdapterLayout, section: AdapterSection) -> None:
    """Raise unless the folder has these settings, the adapters of all targets and all trained modules, and no more."""
    config = opened.config
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none" or config.get("fan_in_fan_out"):
        kind = f"peft_type={config.get('peft_type')}, bias={config.get('bias', 'none')}"
        raise UserError("K051.adapters-with-peft", where=str(opened.path / PEFT_CONFIG), kind=kind)
    wanted = {
        "kind": (section.kind, "dora" if config.get("use_dora") else "lora"),
        "rank": (section.rank, config.get("r")),
        "alpha": (section.alpha, config.get("lora_alpha")),
        "rank_stabilised": (section.rank_stabilised, bool(config.get("use_rslora"))),
    }
    for field, (here, there) in wanted.items():
        if here != there:
            raise UserError(
                "K052.adapter-recipe",
                where=f"model.adapter.{field}",
                opened=opened.path,
                field=field,
                there=there,
                here=here,
            )
    suffixes = SUFFIXES if section.kind == "dora" else SUFFIXES[:-1]
    targets = {network.hf_parameter(name + WEIGHT).name.removesuffix(WEIGHT) for name in layout.targets}
    expected = {PREFIX + name + suffix for name in targets for suffix in suffixes}
    expected |= {PREFIX + network.hf_parameter(name).name for name in layout.trained}
    lists = {"missing": sorted(expected - opened.names.keys()), "unexpected": sorted(opened.names.keys() - expected)}
    if problems := [f"{what}: {first_few(names)}" for what, names in lists.items() if names]:
        raise UserError(
            "K052.adapter-not-recipe",
            where="model.adapter.path",
            opened=opened.path,
            problems="; ".join(problems),
            peft_config=PEFT_CONFIG,
        )


def _fill_layer(
    layer: LoraLinear, stored: DiskTensor, before: int, opened: PeftFolder, section: AdapterSection
) -> None:
    """Fill an adapter; `before` parts of the same joint projection with an adapter come before this one."""
    module = stored.name.removesuffix(WEIGHT)
    down, up = (opened.tensor(PREFIX + module + suffix) for suffix in (DOWN, UP))
    if not math.isclose(opened.scaling(module, len(down)), adapter_scaling(section), rel_tol=1e-6):
        raise _other_shape(opened, module, f"the scaling {opened.scaling(module, len(down)):g}")
    rows = stored.rows(layer.out_features)
    # An adapter of the recipe's rank is shared by all parts, and each gets a copy. One that was written for the parts
    # has their ranks in sum, and all but one block of the rows is zero.
    up, own = up[rows], slice(before * section.rank, (before + 1) * section.rank)
    others = torch.cat([up[:, : own.start], up[:, own.stop :]], dim=1)
    if len(down) != section.rank and not others.any():
        down, up = down[own], up[:, own]
    if down.shape != layer.lora_A.shape or up.shape != layer.lora_B.shape:
        raise _other_shape(opened, module, f"the shapes {[*down.shape]} and {[*up.shape]}")
    _fill(layer.lora_A, down)
    _fill(layer.lora_B, up)
    if layer.lora_magnitude is not None:
        _fill(layer.lora_magnitude, opened.tensor(PREFIX + module + MAGNITUDE).flatten()[rows])


def _fill(parameter: Tensor, value: Tensor) -> None:
    local = local_part(parameter)
    if local.numel():
        local.copy_(value[local_slices(parameter)])


def _other_shape(opened: PeftFolder, name: str, what: str) -> UserError:
    return UserError(
        "K052.adapter-with",
        where="model.adapter.path",
        opened=opened.path,
        name=name,
        text=what,
        peft_config=PEFT_CONFIG,
    )
