"""Networks: built for training as a plan says, or read back to be used."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from trimaran.core import ModelSection, Plan, Recipe, UserError
from trimaran.models import model_folder, module_names, refuse_unmatched, spec_of, weight_files
from trimaran.models.stages import stage_ranges, stages_of_rank
from trimaran.nets import Network, initialise, network_of
from trimaran.parallel import RankMesh, apply_plan, override_precision
from trimaran.parallel.tower_plan import freeze_towers
from trimaran.train.process.rank_info import RankInfo


def build_networks(recipe: Recipe, plan: Plan, place: RankInfo, ranks: RankMesh) -> tuple[Network, ...]:
    """Return the stages of the recipe's network that are this rank's, split as the plan says; without a pipeline, one.

    They have the weights that every plan starts from. A network is built without memory, split, and filled in shard by
    shard: no rank ever holds more than its part.
    """
    if recipe.model.family == "hf":
        network, fill = _hf_draft(recipe.model, recipe.train.seed)
        _refuse_long(network, recipe.data.seq_len)
        refuse_unmatched(recipe.train.precision, [name for name, _ in network.module.named_modules() if name])
        freeze_towers(network, recipe.model.freeze)
        override_precision(network, recipe.train.precision, place.device)
        apply_plan(network, plan, ranks)
        fill(network.module, _first_device(plan, place))
        return (network,)
    spec = spec_of(recipe.model)
    assert spec is not None, "only a foreign Hugging Face architecture has no spec"
    refuse_unmatched(recipe.train.precision, module_names(spec))
    ranges = stage_ranges(spec, plan, seq_len=recipe.data.seq_len)
    with torch.device("meta"):
        here = stages_of_rank(plan.pipeline.schedule, plan.mesh.pp, ranks.rank("pp"), len(ranges))
        networks = tuple(network_of(spec, ranges[stage]) for stage in here)
    for network in networks:
        freeze_towers(network, recipe.model.freeze)
        override_precision(network, recipe.train.precision, place.device)
        apply_plan(network, plan, ranks)
        network.module.to_empty(device=_first_device(plan, place))
        if recipe.model.path and weight_files(model_folder(recipe.model.path)):
            network.load(model_folder(recipe.model.path))
        else:
            initialise(network.module, seed=recipe.train.seed, spec=spec)
    return networks


def _first_device(plan: Plan, place: RankInfo) -> torch.device:
    """Return where the weights are filled in: where they stay, and for DeepSpeed, which takes them whole, the host."""
    on_host = plan.engine == "deepspeed" or plan.offload == "parameters"
    return torch.device("cpu") if on_host else place.device


def _refuse_long(network: Network, seq_len: int) -> None:
    """Raise when the sequences are longer than a Hugging Face model without a spec has positions for."""
    if seq_len > network.longest:
        raise UserError("P005", f"seq_len is {seq_len:,}, and the model is made for at most {network.longest:,}",
                        where="data.seq_len", fix=f"set data.seq_len to {network.longest} or less")  # fmt: skip


def _hf_draft(section: ModelSection, seed: int) -> tuple[Network, Callable[[nn.Module, torch.device], None]]:
    """Return a Hugging Face model to be split, and what fills it afterwards."""
    from trimaran.nets.hf_build import open_hf_model  # noqa: PLC0415  transformers takes seconds to import
    from trimaran.nets.hf_vlm import network_of_hf  # noqa: PLC0415

    assert section.path is not None, "a section without a path has no spec to plan with"
    path = Path(section.path)
    module, fill = open_hf_model(path, trust_remote_code=section.trust_remote_code, seed=seed)
    return network_of_hf(module, spec_of(section)), fill
