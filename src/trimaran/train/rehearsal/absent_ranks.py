"""What a rank that runs alone knows about the ranks that are not there.

Most of what a rank gets from others is numbers to compute with, and any will do (`rehearsal_group.py`). Three things
decide what the rank computes, so they must be right: which stages of the pipeline are trained, how many tokens the
batch has, and that all ranks that share a batch loaded the same one.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from trimaran.core import Plan, Recipe
from trimaran.models import spec_of
from trimaran.models.stages import stage_ranges
from trimaran.nets import Network, network_of
from trimaran.nets.adapters.attach import attach_adapter
from trimaran.parallel import RankMesh
from trimaran.parallel.axes.pp import StageFacts, facts_of_all_stages
from trimaran.parallel.tower_plan import freeze_towers
from trimaran.train.build_hf import hf_stage_ranges, open_hf_network
from trimaran.train.steppers import pipeline_stepper, step_totals


@contextmanager
def without_other_ranks(recipe: Recipe, plan: Plan, ranks: RankMesh) -> Iterator[None]:
    """Answer for the other ranks inside the block, where the trainer would ask them."""
    with ExitStack() as stack:
        ranks.__dict__["counts_samples"] = True  # the tokens of a batch are counted, whichever rank counts them
        stack.enter_context(_replaced(step_totals, "num_sharing", lambda _: 1))  # nobody to compare the batch with
        if plan.mesh.pp > 1:
            facts = stage_facts_of(recipe, plan)
            stack.enter_context(_replaced(pipeline_stepper, "gather_stage_facts", lambda *_: facts))
        yield


def stage_facts_of(recipe: Recipe, plan: Plan) -> StageFacts:
    """Return the facts about all stages of the plan, from networks on the meta device."""
    whole, networks = _all_stages(recipe, plan)
    for network in networks:
        freeze_towers(network, recipe.model.freeze)
        if recipe.model.adapter is not None:
            attach_adapter(network, recipe.model.adapter, whole)
    return facts_of_all_stages(networks)


def _all_stages(recipe: Recipe, plan: Plan) -> tuple[Network | None, list[Network]]:
    """Return the networks of all stages on the meta device, and the whole one, which their adapters need."""
    spec = spec_of(recipe.model)
    if spec is None:
        from trimaran.nets.hf.hf_stages import cut_stage, pipeline_layers  # noqa: PLC0415  it imports transformers

        model, _ = open_hf_network(recipe.model, recipe.train.seed, without_weights=True)
        layers = pipeline_layers(model)
        return model, [cut_stage(model, layers, part) for part in hf_stage_ranges(recipe, plan, layers.count)]
    with torch.device("meta"):
        whole = network_of(spec) if recipe.model.adapter else None
        return whole, [network_of(spec, each) for each in stage_ranges(spec, plan, seq_len=recipe.data.seq_len)]


@contextmanager
def _replaced(module: object, name: str, value: object) -> Iterator[None]:
    """Give a module's function another meaning inside the block."""
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)
