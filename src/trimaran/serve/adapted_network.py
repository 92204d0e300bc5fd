"""Weights with an adapter: which base they have, and merging the adapter into it."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from trimaran.checkpoint.convert.convert import MODEL_PREFIX, read_full_tensor
from trimaran.checkpoint.load_state import DiskSource
from trimaran.checkpoint.verify_checkpoint import refuse_damaged_weights
from trimaran.core import AdapterSection, ModelSection, Recipe, UserError
from trimaran.core.regular_files import read_regular_text
from trimaran.models import model_folder, read_json, spec_of, weight_files
from trimaran.models.weight_files import BASE_DIGEST, base_difference, changed_base, compute_base_digest
from trimaran.nets import Network, initialise
from trimaran.nets.adapters.attach import attach_adapter
from trimaran.nets.adapters.lora_linear import adapter_parameters, merge_in_place
from trimaran.nets.adapters.peft_format import (
    DOWN,
    MAX_CONFIG_BYTES,
    PEFT_CONFIG,
    PEFT_WEIGHTS,
    PREFIX,
    SUFFIXES,
    WEIGHT,
    load_peft_adapter,
)
from trimaran.nets.hf_weights import damaged
from trimaran.serve.settings import TrainedWeights
from trimaran.serve.trained_model import section_of_folder
from trimaran.train.generation.generate import unfilled_network

FillAdapter = Callable[[Network, AdapterSection], None]


def load_adapted(
    section: ModelSection, device: torch.device, fill: FillAdapter, *, seed: int = 0, adapter: Path | None = None
) -> Network:
    """Return the unsharded network of `section` on `device` with its adapter merged.

    `fill` gives the adapter its values. A section that does not describe its adapter takes the description from the
    PEFT folder `adapter`. `seed` is that of a base without weight files.
    """
    network = unfilled_network(section, device)
    if not section.kind.is_hf:
        spec = spec_of(section)
        assert spec is not None, "our own networks always have a spec"
        if section.path and weight_files(model_folder(section.path)):
            network.load(model_folder(section.path))
        else:
            initialise(network.module, seed=seed, spec=spec)
    described = section.adapter
    if described is None:
        assert adapter is not None, "an adapter is described by the recipe or by its folder"
        described = described_adapter(network, adapter)
    attach_adapter(network, described.model_copy(update={"base": "auto"}))
    fill(network, described)
    merge_in_place(network.module)
    return network


def fill_from_peft(folder: Path) -> FillAdapter:
    """Return a function that fills an adapter from a PEFT folder."""
    return lambda network, section: load_peft_adapter(network, folder, section)


def described_adapter(network: Network, folder: Path) -> AdapterSection:
    """Return the section that describes the adapter in a PEFT folder, for this network."""
    config = read_json(folder / PEFT_CONFIG, limit_bytes=MAX_CONFIG_BYTES)
    try:
        with safe_open(folder / PEFT_WEIGHTS, framework="pt") as file:
            names = {name.removeprefix(PREFIX) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError) as error:
        raise damaged(folder / PEFT_WEIGHTS, error) from None
    adapted = {name.removesuffix(DOWN) for name in names if name.endswith(DOWN)}
    trained = {name for name in names if not name.endswith(SUFFIXES)}
    linears = (name for name, part in network.module.named_modules() if isinstance(part, nn.Linear))
    parameters = (name for name, _ in network.module.named_parameters(remove_duplicate=False))
    return AdapterSection(
        kind="dora" if config.get("use_dora") else "lora",
        rank=config.get("r", 8),
        alpha=config.get("lora_alpha", 8),
        rank_stabilised=bool(config.get("use_rslora")),
        targets=tuple(
            name for name in linears if network.hf_parameter(name + WEIGHT).name.removesuffix(WEIGHT) in adapted
        ),
        towers=tuple(network.towers),
        train=tuple(
            dict.fromkeys(name.rpartition(".")[0] for name in parameters if network.hf_parameter(name).name in trained)
        ),
    )


def base_of_peft(folder: Path) -> Path:
    """Return the folder of the base that a PEFT folder names."""
    named = read_json(folder / PEFT_CONFIG, limit_bytes=MAX_CONFIG_BYTES).get("base_model_name_or_path")
    if not named or not (Path(named) / "config.json").is_file():
        raise UserError("K051", f"the base of this adapter is not a folder here: {named}",
                        where=str(folder / PEFT_CONFIG),
                        fix="set base_model_name_or_path to the folder of the base model")  # fmt: skip
    return Path(named)


def refuse_other_base(
    section: ModelSection,
    saved: Mapping[str, Any],
    *,
    seed: int,
    cache: Path | None,
    report_progress: Callable[[float], None] = lambda fraction: None,
) -> None:
    """Raise UserError if the base of `section` is not the one with the digest `saved`. An empty one is not compared."""
    if saved:
        now = compute_base_digest(section, seed, cache, report_progress)
        if difference := base_difference(saved, now.as_dict()):
            raise changed_base(f"model.path ({section.path})", difference)


def saved_base(folder: Path) -> dict[str, Any]:
    """Return the digest of the base that is saved beside an adapter; empty if PEFT has written it."""
    file = folder / BASE_DIGEST
    try:
        found = json.loads(read_regular_text(file)) if file.exists() else {}
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict):
        raise UserError("K051", "the digest of the base cannot be read", where=str(file),
                        fix="export the adapter again, or remove the file to skip the comparison")  # fmt: skip
    return found


def has_adapter(weights: TrainedWeights, recipe: Recipe | None) -> bool:
    """Return whether the weights are those of an adapter, beside a base elsewhere."""
    return recipe.model.adapter is not None if recipe is not None else (weights.path / PEFT_CONFIG).is_file()


def adapted_section(weights: TrainedWeights, recipe: Recipe | None) -> ModelSection:
    """Return the model section of the base. It describes the adapter only if a run has trained it."""
    return recipe.model if recipe is not None else section_of_folder(base_of_peft(weights.path))


def load_adapted_weights(
    weights: TrainedWeights, recipe: Recipe | None, section: ModelSection, device: torch.device, *, cache: Path | None
) -> Network:
    """Return the network with the adapter merged. Raises UserError if it was trained on another base.

    Digests of bases are kept in `cache`.
    """
    seed = recipe.train.seed if recipe else 0
    if weights.step is None:
        refuse_other_base(section, saved_base(weights.path), seed=seed, cache=cache)
        return load_adapted(section, device, fill_from_peft(weights.path), seed=seed, adapter=weights.path)
    refuse_damaged_weights(weights.path)
    source = DiskSource(weights.path)
    refuse_other_base(section, source.progress.get("base") or {}, seed=seed, cache=cache)

    def fill(network: Network, adapter: AdapterSection) -> None:
        with torch.no_grad():
            for name, parameter in adapter_parameters(network.module):
                if MODEL_PREFIX + name not in source.index:
                    raise UserError("K025", f"the checkpoint does not have the weight {name}", where=str(weights.path),
                                    fix="generate with the recipe of the run that wrote it")  # fmt: skip
                parameter.copy_(read_full_tensor(source, MODEL_PREFIX + name))

    return load_adapted(section, device, fill, seed=seed)
