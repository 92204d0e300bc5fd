"""Loads a base with a trained adapter: that of a run, of one of its checkpoints, or of a PEFT folder."""

from pathlib import Path

import torch

from trimaran.checkpoint.convert.convert import MODEL_PREFIX, read_full_tensor
from trimaran.checkpoint.disk_source import DiskSource
from trimaran.checkpoint.verify_checkpoint import refuse_damaged_weights
from trimaran.core import AdapterSection, ModelSection, Recipe, UserError
from trimaran.nets import Network
from trimaran.nets.adapters.lora_linear import adapter_parameters
from trimaran.nets.adapters.peft_format import PEFT_CONFIG
from trimaran.serve.adapted_network import base_of_peft, fill_from_peft, load_adapted, refuse_other_base, saved_base
from trimaran.serve.trained_model import section_of_folder
from trimaran.serve.weights_location import TrainedWeights


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
