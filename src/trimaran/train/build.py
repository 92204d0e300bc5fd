"""Networks: built for training as a plan says, or read back to be used."""

from pathlib import Path

import torch

from trimaran.core import ModelSection, Plan, Recipe, UserError
from trimaran.models import model_folder, spec_of, weight_files
from trimaran.nets import Network, decoder_network, initialise, load_hf_weights
from trimaran.parallel import apply_plan, build_mesh
from trimaran.train.place import Place


def build_network(recipe: Recipe, plan: Plan, place: Place) -> Network:
    """Return the recipe's network, split as the plan says, with the weights that every plan starts from.

    The decoder is built without memory, split, and filled in shard by shard: no rank ever holds more than its part.
    A Hugging Face model is read whole by every rank before it is split.
    """
    mesh = build_mesh(plan.mesh, device_type=place.device.type)
    if recipe.model.family == "hf":
        network = _hf_network(recipe.model, recipe.model.path, recipe.train.seed)
        _refuse_long(network, recipe.data.seq_len)
        apply_plan(network, plan, mesh)
        network.module.to(place.device)
        return network
    spec = spec_of(recipe.model)
    assert spec is not None, "only a foreign Hugging Face architecture has no spec"
    with torch.device("meta"):
        network = decoder_network(spec)
    apply_plan(network, plan, mesh)
    network.module.to_empty(device=place.device)
    if recipe.model.path and weight_files(model_folder(recipe.model.path)):
        load_hf_weights(network.module, model_folder(recipe.model.path))
    else:
        initialise(network.module, seed=recipe.train.seed, spec=spec)
    return network


def load_trained(section: ModelSection, folder: Path) -> Network:
    """Return the network whose weights a run left in `folder`, whole, on this machine's first device."""
    if section.family == "hf":
        network = _hf_network(section, str(folder), 0)
    else:
        trained = ModelSection(family="decoder", path=str(folder))
        spec = spec_of(trained)
        assert spec is not None, "our own decoder always has a spec"
        network = decoder_network(spec)
        load_hf_weights(network.module, folder)
    network.module.to("cuda" if torch.cuda.is_available() else "cpu")
    return network


def _refuse_long(network: Network, seq_len: int) -> None:
    """Raise when the sequences are longer than a Hugging Face model without a spec has positions for."""
    if seq_len > network.longest:
        raise UserError("P005", f"seq_len is {seq_len:,}, and the model is made for at most {network.longest:,}",
                        where="data.seq_len", fix=f"set data.seq_len to {network.longest} or less")  # fmt: skip


def _hf_network(section: ModelSection, path: str | None, seed: int) -> Network:
    from trimaran.nets.hf import hf_network, load_hf_model  # noqa: PLC0415  transformers takes seconds to import

    assert path is not None, "a section without a path has no spec to plan with"
    module = load_hf_model(Path(path), trust_remote_code=section.trust_remote_code, seed=seed)
    return hf_network(module, spec_of(section))
