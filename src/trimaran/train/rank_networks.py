"""Builds the networks of a rank, sharded by the plan and with their weights."""

import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from trimaran.core import Plan, Recipe
from trimaran.models import Spec, model_folder, spec_of, stage_ranges, stages_of_rank, weight_files
from trimaran.nets import Network, initialise, is_fsdp_module, is_on_meta, network_of, to_empty
from trimaran.parallel import RankMesh, apply_plan, freeze_towers, override_precision
from trimaran.train.process.rank_setup import RankInfo

log = logging.getLogger(__name__)

# Networks of stages, and the function that gives each its weights on a device.
Stages = list[tuple[Network, Callable[[torch.device], None]]]


class Attachment:
    """Attaches nothing. `packs`: frozen weights are packed shard by shard, so that another plan has other bytes."""

    needs_whole = packs = False

    def check(self, plan: Plan) -> None:
        """Raise UserError if the plan cannot train what is attached."""

    def attach(self, network: Network, whole: Network | None) -> None:
        """Attach to a stage; `whole` is the network of all stages without weights, if `needs_whole`."""

    def pack(self, network: Network, plan: Plan) -> None:
        """Store the weights that are not trained as the plan says."""

    def fill(self, network: Network, whole: Network | None) -> None:
        """Give what is attached its first values. The weights of the network must be loaded."""


def attachment_of(recipe: Recipe) -> Attachment:
    if recipe.model.adapter is None:
        return Attachment()
    from trimaran.train.features.adapter import Adapter  # noqa: PLC0415  few runs train one

    return Adapter(recipe.model, seed=recipe.train.seed)


def refuse_unsavable(recipe: Recipe, networks: tuple[Network, ...]) -> None:
    """Raise now, not after training, if the trained model cannot be saved."""
    if recipe.train.save and recipe.model.adapter is None:
        networks[0].disk_config()


def build_networks(
    recipe: Recipe,
    plan: Plan,
    rank_info: RankInfo,
    ranks: RankMesh,
    report_progress: Callable[[], None] = lambda: None,
) -> tuple[Network, ...]:
    """Return this rank's stages, sharded by the plan. Without a pipeline there is one stage.

    Every plan starts from the same weights. A network is sharded on the meta device and initialised shard by shard: no
    rank ever holds more than its shard. `report_progress` is called after each tensor read.
    """
    if plan.offloads_to_disk and not ranks.without_device:
        from trimaran.runs.disk_folder import check_disk_folder  # noqa: PLC0415  few plans offload to a disk

        check_disk_folder(plan.disk.path, any_filesystem=plan.disk.any_filesystem)
    stages = shard_networks(recipe, plan, ranks, report_progress)
    for _, fill in stages:
        fill(_init_device(plan, rank_info))
    return tuple(network for network, _ in stages)


def build_empty_networks(recipe: Recipe, plan: Plan, rank_info: RankInfo, ranks: RankMesh) -> tuple[Network, ...]:
    """Return what `build_networks` does, with memory for the weights, not their values.

    A frozen base in 4 bits gets its values: they are packed by shard, so another plan has other bytes.
    """
    device, networks = _init_device(plan, rank_info), []
    for network, fill in shard_networks(recipe, plan, ranks):
        if attachment_of(recipe).packs:
            fill(device)
        elif recipe.model.kind.is_hf:
            from trimaran.nets.hf.hf_build import materialise  # noqa: PLC0415  transformers takes seconds to import

            materialise(network.module, device)
        else:
            to_empty(network.module, device)
        networks.append(network)
    return tuple(networks)


def shard_networks(
    recipe: Recipe, plan: Plan, ranks: RankMesh, report_progress: Callable[[], None] = lambda: None
) -> Stages:
    """Return this rank's stages, sharded on the meta device, each with a function that gives it weights on a device.

    On the meta device that function only checks that weights on disk fit.
    """
    attachment, spec = attachment_of(recipe), None
    whole: Network | None = None
    read_weights: Callable[[nn.Module, torch.device], None] | None = None
    match recipe.model.kind.built_by:
        case "transformers":
            from trimaran.train.foreign_networks import open_hf_stages  # noqa: PLC0415  other families do not need it

            networks, whole, read_weights = open_hf_stages(recipe, plan, ranks, report_progress)
        case "plugin":
            from trimaran.train.foreign_networks import open_family_network  # noqa: PLC0415  few runs have such a model

            networks = (open_family_network(recipe),)
        case "trimaran":
            spec = spec_of(recipe.model)
            assert spec is not None, "our own networks always have a spec"
            if recipe.train.precision:
                from trimaran.models import module_names, refuse_unmatched  # noqa: PLC0415  few recipes override it

                refuse_unmatched(recipe.train.precision, module_names(spec))
            ranges = stage_ranges(spec, plan, seq_len=recipe.data.seq_len)
            with torch.device("meta"):
                whole = network_of(spec) if attachment.needs_whole else None
                here = stages_of_rank(plan.pipeline.schedule, plan.mesh.pp, ranks.rank("pp"), len(ranges))
                networks = tuple(network_of(spec, ranges[stage]) for stage in here)

    def fill(network: Network, device: torch.device) -> None:
        if read_weights is not None:
            read_weights(network.module, device)
        else:
            to_empty(network.module, device)
            fill_base(network, recipe, spec, report_progress)
        if not recipe.model.kind.is_plugin:  # of a plug-in's network all weights are filled by now
            attachment.fill(network, whole)

    for network in networks:
        attachment.check(plan)
        freeze_towers(network, recipe.model.freeze)
        attachment.attach(network, whole)
        override_precision(network, recipe.train.precision, ranks.device)
        attachment.pack(network, plan)
        apply_plan(network, plan, ranks)
    return [(network, partial(fill, network)) for network in networks]


def fill_base(network: Network, recipe: Recipe, spec: Spec | None, report_progress: Callable[[], None]) -> None:
    """Give a stage of our own network its weights: those on disk, or random ones. An adapter is not filled."""
    if recipe.model.path and weight_files(folder := model_folder(recipe.model.path)):
        from trimaran.nets.hf_weights import absent_layers  # noqa: PLC0415  few runs start from weights

        if (absent := absent_layers(network.module, folder)) and not is_on_meta(network.module):
            log.warning("%s has no weights of %s, which start from random ones", folder, ", ".join(absent))
            initialise(network.module, seed=recipe.train.seed, spec=spec, within=absent)
        network.load(folder, report_progress)
    elif not is_on_meta(network.module):
        initialise(network.module, seed=recipe.train.seed, spec=spec)


def reload_base(networks: tuple[Network, ...], recipe: Recipe, plan: Plan, rank_info: RankInfo) -> None:
    """Read the base of an adapter again, in place: a weight in memory may be wrong, and checkpoints have none of it."""
    for module in (each for network in networks for each in network.module.modules()):
        if is_fsdp_module(module):
            module.reshard()
    if recipe.model.kind.is_hf:
        from trimaran.train.foreign_networks import open_hf_network  # noqa: PLC0415  other families do not need it

        again, fill = open_hf_network(recipe.model, recipe.train.seed)
        if not all(each.is_meta for each in again.module.parameters()):
            raise RuntimeError("a frozen weight in memory is wrong, and this model cannot be read again in place")
        for network in networks:
            fill(network.module, _init_device(plan, rank_info))
        return
    spec = spec_of(recipe.model)
    assert spec is not None, "only a foreign Hugging Face architecture has no spec"
    for network in networks:
        fill_base(network, recipe, spec, lambda: None)


def _init_device(plan: Plan, rank_info: RankInfo) -> torch.device:
    """Return the device of the initial weights: the CPU if they are offloaded or if DeepSpeed takes them unsharded."""
    if rank_info.device.type == "meta":
        return rank_info.device
    on_host = plan.engine_traits.shards_weights_itself or plan.offload == "parameters"
    return torch.device("cpu") if on_host else rank_info.device
