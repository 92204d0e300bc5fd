"""Loads trained weights to generate with: those of a run, of one of its checkpoints, of a folder, of an adapter."""

from pathlib import Path

import torch

from trimaran.checkpoint.convert.convert import MODEL_PREFIX, read_full_tensor
from trimaran.checkpoint.load_state import DiskSource
from trimaran.checkpoint.verify_checkpoint import refuse_damaged_weights
from trimaran.core import ModelSection, Recipe, UserError
from trimaran.core.traits import DEVICE_TRAITS
from trimaran.data import TokenShards
from trimaran.data.text.tokenizer import Tokenizer, has_tokenizer, load_tokenizer
from trimaran.models import model_folder
from trimaran.models.resolve import recipe_image_rules
from trimaran.nets import Network
from trimaran.parallel.precision import DTYPES
from trimaran.serve.adapted_network import adapted_section, has_adapter, load_adapted_weights
from trimaran.serve.settings import TrainedWeights
from trimaran.serve.trained_model import (
    ModelTexts,
    TrainedModel,
    compute_in_bf16,
    end_ids_of,
    image_rules_of,
    section_of_folder,
    stored_dtype,
)
from trimaran.train.generation.generate import (
    TOKENIZER,
    first_device,
    load_trained,
    open_saved_tokenizer,
    unfilled_network,
)


def open_trained(weights: TrainedWeights, dtype: str, *, cache: Path | None) -> TrainedModel:
    """Return the model of these weights on this machine's first device.

    `dtype` auto computes as the run did, or as the folder's config says, on a GPU; and in fp32 on a CPU.
    """
    device = first_device()
    network, computed = open_network(weights, device, dtype, cache=cache)
    texts = open_texts(weights)
    return TrainedModel(
        network=network,
        tokenizer=texts.tokenizer,
        device=device,
        dtype=computed,
        stop_ids=texts.stop_ids,
        rules=texts.rules,
        template=texts.template,
    )


def open_network(
    weights: TrainedWeights, device: torch.device, dtype: str, *, cache: Path | None
) -> tuple[Network, torch.dtype]:
    """Return the network of these weights on `device`, with an adapter merged, and the dtype that it computes in."""
    recipe = weights.run.read_recipe() if weights.run else None
    section = section_of(weights, recipe)
    if has_adapter(weights, recipe):
        network = load_adapted_weights(weights, recipe, section, device, cache=cache)
    elif weights.step is None:
        network = load_trained(section, weights.path, device)
    else:
        network = unfilled_network(section, device)
        load_checkpoint(network, weights.path)
    network.module.eval().requires_grad_(False)
    if dtype == "auto":
        dtype = usual_dtype(weights, section) if DEVICE_TRAITS[device.type].prefers_16_bits else "fp32"
    if dtype == "bf16":
        compute_in_bf16(network.module)
    return network, DTYPES[dtype]


def open_texts(weights: TrainedWeights) -> ModelTexts:
    """Return the tokenizer, the template and the image rules of the model with these weights."""
    recipe = weights.run.read_recipe() if weights.run else None
    section, tokenizer = section_of(weights, recipe), tokenizer_of(weights, recipe)
    rules = image_rules_of(section) if recipe is None else recipe_image_rules(recipe.model_copy(
        update={"model": section}))  # fmt: skip
    if recipe is not None:
        template = recipe.data.samples.template
    else:  # the model's own, if it has one
        content = getattr(tokenizer, "content", None)
        template = "model" if content is not None and content.templates else "auto"
    return ModelTexts(
        tokenizer=tokenizer,
        stop_ids=frozenset([tokenizer.end_id, *end_ids_of(_config_folder(weights, section))]),
        rules=rules,
        template=template,
    )


def section_of(weights: TrainedWeights, recipe: Recipe | None) -> ModelSection:
    """Return the model section of the weights. A saved folder describes itself: its origin may be gone."""
    if has_adapter(weights, recipe):
        return adapted_section(weights, recipe)
    if recipe is None:
        return section_of_folder(weights.path)
    if weights.step is not None:
        return recipe.model
    if recipe.model.kind.is_plugin:  # its folder does not describe it to anybody else
        return recipe.model.model_copy(update={"path": str(weights.path)})
    return ModelSection(
        family=recipe.model.family, path=str(weights.path), trust_remote_code=recipe.model.trust_remote_code
    )


def load_checkpoint(network: Network, path: Path) -> None:
    """Copy the weights of a checkpoint into a network in place: its memory, and graphs that use it, stay valid.

    A damaged checkpoint is refused before the first weight is copied.
    """
    refuse_damaged_weights(path)
    source = DiskSource(path)
    with torch.no_grad():
        for name, parameter in network.module.named_parameters():
            if MODEL_PREFIX + name not in source.index:
                raise UserError("K025", f"the checkpoint does not have the weight {name}", where=str(path),
                                fix="generate with the recipe of the run that wrote it")  # fmt: skip
            parameter.copy_(read_full_tensor(source, MODEL_PREFIX + name))
        for name, buffer in network.module.named_buffers():
            if MODEL_PREFIX + name in source.index:
                buffer.copy_(read_full_tensor(source, MODEL_PREFIX + name))


def usual_dtype(weights: TrainedWeights, section: ModelSection) -> str:
    """Return the dtype in which a run computed, or in which a folder's weights are stored."""
    if weights.run is None:
        return stored_dtype(_config_folder(weights, section) or weights.path)
    return "fp32" if weights.run.read_plan().precision == "fp32" else "bf16"


def _config_folder(weights: TrainedWeights, section: ModelSection) -> Path | None:
    """Return the folder whose configs say how a text ends; None if the model has none, because it was never saved."""
    if weights.step is None and (weights.path / "config.json").is_file():
        return weights.path
    return model_folder(section.path) if section.path else None


def tokenizer_of(weights: TrainedWeights, recipe: Recipe | None) -> Tokenizer:
    """Return the tokenizer beside the weights, or that of the run's data."""
    folder = weights.run.model if weights.run else weights.path
    if (folder / TOKENIZER).is_file():
        return open_saved_tokenizer(folder)
    if recipe is None:
        if has_tokenizer(folder):
            return load_tokenizer(str(folder))
        raise UserError("T011", "the folder holds no tokenizer", where=str(folder),
                        fix="copy the model's tokenizer files into it")  # fmt: skip
    if recipe.data.source == "shards" and recipe.data.path:
        return TokenShards.open(Path(recipe.data.path)).tokenizer
    return load_tokenizer(recipe.data.tokenizer)
