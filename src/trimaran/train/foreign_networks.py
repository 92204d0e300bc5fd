"""Builds networks that are not ours, without weights: Hugging Face models or stages of one, and a plug-in's family."""

from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trimaran.core import ModelSection, Plan, Recipe, UserError
from trimaran.data import data_kind_of
from trimaran.models import outline_if_known, refuse_seq_len, refuse_unmatched, spec_of, split_outline, stages_of_rank
from trimaran.nets import Network, PluginNetwork
from trimaran.nets.plugin_network import plugin_network
from trimaran.parallel import RankMesh

if TYPE_CHECKING:
    from trimaran.nets.hf.hf import HfNetwork

ReadWeights = Callable[[nn.Module, torch.device], None]


def open_hf_network(
    section: ModelSection,
    seed: int,
    report_progress: Callable[[], None] = lambda: None,
    *,
    without_weights: bool = False,
) -> tuple["HfNetwork", ReadWeights]:
    """Return a model without weights, and a function that loads them once it is sharded; see `open_hf_model`."""
    from trimaran.nets.hf.hf_build import open_hf_model  # noqa: PLC0415  transformers takes seconds to import
    from trimaran.nets.hf.hf_vlm import network_of_hf  # noqa: PLC0415

    assert section.path is not None, "a section without a path has no spec to plan with"
    path = Path(section.path)
    options: dict[str, Any] = {"trust_remote_code": section.trust_remote_code, "seed": seed}
    module, fill = open_hf_model(path, **options, report_progress=report_progress, without_weights=without_weights)
    return network_of_hf(module.train(), spec_of(section)), fill  # what training does is refused now, such as dropout


def open_hf_stages(
    recipe: Recipe, plan: Plan, ranks: RankMesh, report_progress: Callable[[], None] = lambda: None
) -> tuple[tuple[Network, ...], Network | None, ReadWeights]:
    """Return this rank's stages, the whole model if there are several, and a function to load a stage."""
    whole, read_weights = open_hf_network(
        recipe.model, recipe.train.seed, report_progress, without_weights=ranks.without_device
    )
    refuse_seq_len(recipe.data.seq_len, whole.max_seq_len)
    refuse_unmatched(recipe.train.precision, [name for name, _ in whole.module.named_modules() if name])
    if plan.mesh.pp == 1:
        return (whole,), None, read_weights
    from trimaran.nets.hf.hf_stages import cut_stage, pipeline_layers  # noqa: PLC0415

    layers = pipeline_layers(whole)
    ranges = hf_stage_ranges(recipe, plan, layers.count)
    here = stages_of_rank(plan.pipeline.schedule, plan.mesh.pp, ranks.rank("pp"), len(ranges))
    return tuple(cut_stage(whole, layers, ranges[stage]) for stage in here), whole, read_weights


def hf_stage_ranges(recipe: Recipe, plan: Plan, num_layers: int) -> tuple[range, ...]:
    """Return the layers of each stage: as the plan lists them, or split by cost if config.json tells it, or evenly."""
    outline, counts = outline_if_known(recipe.model), plan.pipeline.stages
    if not counts and outline is not None and outline.layers == num_layers >= plan.num_stages:
        counts = split_outline(outline, plan.num_stages, seq_len=recipe.data.seq_len)
    if not counts:
        each, more = divmod(num_layers, plan.num_stages)
        counts = tuple(each + (stage < more) for stage in range(plan.num_stages))
    if sum(counts) != num_layers or min(counts) < 1:
        stages = ", ".join(map(str, counts))
        raise UserError(
            "P011.stages-layers-not-add", where="plan.pipeline.stages", stages=stages, num_layers=num_layers
        )
    return tuple(range(start, stop) for start, stop in pairwise(accumulate(counts, initial=0)))


def open_family_network(recipe: Recipe) -> PluginNetwork:
    """Return the network on the meta device; raise UserError if it does not suit the recipe."""
    with torch.device("meta"):
        network = plugin_network(recipe.model)
    refuse_seq_len(recipe.data.seq_len, network.max_seq_len)
    refuse_unmatched(recipe.train.precision, [name for name, _ in network.module.named_modules() if name])
    separates = recipe.data.isolate_documents or data_kind_of(recipe) != "text"
    if separates and not network.built.takes_documents:
        raise UserError(
            "K080.network-family",
            where="data.isolate_documents" if recipe.data.isolate_documents else "data.source",
            family=recipe.model.family,
        )
    return network
