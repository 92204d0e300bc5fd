"""Reads an adapter that PEFT or a run has written, and the modules that were trained in full beside it."""

import math
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trimaran.core import AdapterSection, UserError
from trimaran.core.regular_files import check_regular_file
from trimaran.models import read_json
from trimaran.models.vlm_config import disk_form
from trimaran.nets.adapters.attach import AdapterLayout, adapter_layout
from trimaran.nets.adapters.lora_linear import LoraLinear, adapter_scaling, is_adapter_parameter
from trimaran.nets.adapters.peft_format import DOWN, MAGNITUDE, PEFT_CONFIG, PEFT_WEIGHTS, PREFIX, SUFFIXES, UP, WEIGHT
from trimaran.nets.hf_weights import damaged, first_few
from trimaran.nets.local_shards import is_on_meta, local_part, local_slices
from trimaran.nets.network import Network
from trimaran.nets.vlm.vlm_names import DiskTensor, canonical, to_memory
from trimaran.nets.vlm.vlm_network import VlmNetwork

MAX_CONFIG_BYTES = 10_000_000
PICKLED_WEIGHTS = "adapter_model.bin"


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
        opened = _open_folder(folder, network, stack)
        _refuse_other_settings(opened, section)
        _refuse_other_tensors(opened, network, layout, section)
        if is_on_meta(network.module):
            return
        try:
            for name, layer in layers.items():
                before = sum(
                    each.name == stored[name].name and each.part < stored[name].part for each in stored.values()
                )
                _fill_layer(layer, stored[name], before, opened, section)
            for name, parameter in trained.items():
                _fill_parameter(parameter, network.hf_parameter(name), opened)
        except SafetensorError as error:
            raise damaged(folder, error) from None


def _open_folder(folder: Path, network: Network, stack: ExitStack) -> PeftFolder:
    if not (folder / PEFT_CONFIG).is_file() or not (folder / PEFT_WEIGHTS).is_file():
        pickled = f"; {PICKLED_WEIGHTS} is a pickle, which is not read" if (folder / PICKLED_WEIGHTS).exists() else ""
        raise UserError("K051", f"this is not a PEFT adapter: {PEFT_CONFIG} or {PEFT_WEIGHTS} is missing{pickled}",
                        where=str(folder), fix="name a folder that `save_pretrained` of PEFT, `trimaran export` or a "
                        "run with an adapter has written")  # fmt: skip
    config = read_json(folder / PEFT_CONFIG, limit_bytes=MAX_CONFIG_BYTES)
    try:
        check_regular_file(folder / PEFT_WEIGHTS, follow_links=True)  # in a Hugging Face cache every file is a link
        file = stack.enter_context(safe_open(folder / PEFT_WEIGHTS, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise damaged(folder / PEFT_WEIGHTS, error) from None
    return PeftFolder(folder, config, {_current_name(name, network): name for name in file.keys()}, file)  # noqa: SIM118 - not a dict


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


def _refuse_other_settings(opened: PeftFolder, section: AdapterSection) -> None:
    config = opened.config
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none" or config.get("fan_in_fan_out"):
        kind = f"peft_type={config.get('peft_type')}, bias={config.get('bias', 'none')}"
        raise UserError("K051", f"only adapters with peft_type=LORA and bias=none are read, and this one has {kind}",
                        where=str(opened.path / PEFT_CONFIG), fix="use another adapter")  # fmt: skip
    wanted = {
        "kind": (section.kind, "dora" if config.get("use_dora") else "lora"),
        "rank": (section.rank, config.get("r")),
        "alpha": (section.alpha, config.get("lora_alpha")),
        "rank_stabilised": (section.rank_stabilised, bool(config.get("use_rslora"))),
    }
    for field, (here, there) in wanted.items():
        if here != there:
            raise UserError("K052", f"the adapter in {opened.path} has {field} {there}, and the recipe {here}",
                            where=f"model.adapter.{field}", fix=f"set model.adapter.{field} to {there}")  # fmt: skip


def _refuse_other_tensors(opened: PeftFolder, network: Network, layout: AdapterLayout, section: AdapterSection) -> None:
    """Raise unless the folder has the adapters of all targets and all modules that are trained in full, and no more."""
    suffixes = SUFFIXES if section.kind == "dora" else SUFFIXES[:-1]
    targets = {network.hf_parameter(name + WEIGHT).name.removesuffix(WEIGHT) for name in layout.targets}
    expected = {PREFIX + name + suffix for name in targets for suffix in suffixes}
    expected |= {PREFIX + network.hf_parameter(name).name for name in layout.trained}
    lists = {"missing": sorted(expected - opened.names.keys()), "unexpected": sorted(opened.names.keys() - expected)}
    if problems := [f"{what}: {first_few(names)}" for what, names in lists.items() if names]:
        raise UserError("K052", f"the adapter in {opened.path} is not the one of this recipe; {'; '.join(problems)}",
                        where="model.adapter.path", fix="set model.adapter.targets, towers and train as in its "
                        f"{PEFT_CONFIG}")  # fmt: skip


def _fill_layer(
    layer: LoraLinear, stored: DiskTensor, before: int, opened: PeftFolder, section: AdapterSection
) -> None:
    """Fill an adapter; `before` parts of the same joint projection with an adapter come before this one."""
    module = stored.name.removesuffix(WEIGHT)
    down, up = (opened.tensor(PREFIX + module + suffix) for suffix in (DOWN, UP))
    if not math.isclose(opened.scaling(module, len(down)), adapter_scaling(section), rel_tol=1e-6):
        raise _other_shape(opened, module, f"the scaling {opened.scaling(module, len(down)):g}")
    rows = stored.rows(layer.out_features)
    down, up = _own_part(down, up[rows], before, section.rank)
    if down.shape != layer.lora_A.shape or up.shape != layer.lora_B.shape:
        raise _other_shape(opened, module, f"the shapes {[*down.shape]} and {[*up.shape]}")
    _fill(layer.lora_A, down)
    _fill(layer.lora_B, up)
    if layer.lora_magnitude is not None:
        _fill(layer.lora_magnitude, opened.tensor(PREFIX + module + MAGNITUDE).flatten()[rows])


def _own_part(down: Tensor, up: Tensor, before: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return the adapter of one part of a joint projection, given the rows of this part.

    An adapter of the recipe's rank is shared by all parts, and each gets a copy. One that was written for the parts has
    their ranks in sum, and all but one block of the rows is zero.
    """
    own = slice(before * rank, (before + 1) * rank)
    others = torch.cat([up[:, : own.start], up[:, own.stop :]], dim=1)
    return (down, up) if len(down) == rank or others.any() else (down[own], up[:, own])


def _fill_parameter(parameter: Tensor, stored: DiskTensor, opened: PeftFolder) -> None:
    value = opened.tensor(PREFIX + stored.name)
    if stored.parts > 1:
        value = stored.taken_from(value)
    if value.numel() != parameter.numel():
        raise _other_shape(opened, stored.name, f"the shape {[*value.shape]}")
    _fill(parameter, value.view(parameter.shape))


def _fill(parameter: Tensor, value: Tensor) -> None:
    local = local_part(parameter)
    if local.numel():
        local.copy_(value[local_slices(parameter)])


def _other_shape(opened: PeftFolder, name: str, what: str) -> UserError:
    return UserError("K052", f"the adapter in {opened.path} has {name} with {what}, which does not fit the recipe",
                     where="model.adapter.path", fix=f"compare model.adapter with its {PEFT_CONFIG}")  # fmt: skip
