"""Builds the AdamW for the parameters of this rank."""

from collections.abc import Iterable, Mapping
from inspect import unwrap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from trimaran.core import Plan, TrainSection
from trimaran.core.recipe import TowerOptimizer
from trimaran.nets.local_shards import local_part
from trimaran.nets.shard_types import is_dtensor
from trimaran.nets.tower_names import refuse_unknown_tower, tower_of
from trimaran.parallel.optimizer.eager_optimizer import EagerOptimizer
from trimaran.parallel.optimizer.split_weights import NO_SPLIT_WEIGHTS, SplitWeights

LR_FACTOR = "lr_factor"  # key of a group: its learning rate divided by the schedule's
ONE_TOWER = {"all": ""}
DEFAULT_SETTINGS = TowerOptimizer()


class ShardAdamW(EagerOptimizer, AdamW):
    """torch's AdamW, whose kernel gets this rank's shards in place of DTensors. States stay DTensors.

    The update is element-wise, so it is the same. DTensor would search for a strategy in the first two steps, which
    takes a fifth of a second on each rank, longer than the steps of a small model.
    """

    step = torch.no_grad()(unwrap(AdamW.step))

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:  # pyrefly: ignore[bad-override]
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [local_part(each) if is_dtensor(each) else each for each in tensors]
        return has_complex


def build_optimizer(
    modules: Iterable[nn.Module],
    train: TrainSection,
    plan: Plan,
    towers: Mapping[str, str] = ONE_TOWER,
    split: SplitWeights = NO_SPLIT_WEIGHTS,
) -> Optimizer:
    """Return an AdamW for all trained parameters of the modules: a network, or this rank's stages of one.

    Each group has the names of its parameters, in order, as `param_names`. `towers` has each tower's prefix of those
    names. `split` are the weights that are stored as two halves. fp32 weights with fp32 states on a CPU use torch's
    fused AdamW on this rank's shards; everything else uses `LowMemoryAdamW`. A rank whose stages are all frozen gets
    one empty group.
    """
    names = {each: name for module in modules for name, each in module.named_parameters() if each.requires_grad}
    return optimizer_of(names, train, plan, towers, split)


def optimizer_of(
    names: Mapping[nn.Parameter, str],
    train: TrainSection,
    plan: Plan,
    towers: Mapping[str, str] = ONE_TOWER,
    split: SplitWeights = NO_SPLIT_WEIGHTS,
) -> Optimizer:
    """Return the optimizer of `build_optimizer` for these parameters and their names."""
    constants = train.optimizer
    groups = named_groups(names, train, towers)
    defaults = {
        "lr": train.lr,
        "betas": (constants.beta1, constants.beta2),
        "eps": constants.eps,
        "weight_decay": constants.weight_decay,
    }
    disk = Path(plan.disk.path) if plan.offloads_to_disk else None
    states, on_host = constants.states, plan.offload == "optimizer" and disk is None
    use_ours = states != "fp32" or on_host or disk or split.lower_halves or all(_is_fp32_on_gpu(each) for each in names)
    if not groups or not use_ours:
        return ShardAdamW(groups or [{"params": []}], fused=True, **defaults)
    from trimaran.parallel.optimizer.adamw import LowMemoryAdamW  # noqa: PLC0415  fp32 states on a CPU do not need it

    return LowMemoryAdamW(
        groups,
        defaults=defaults,
        states=states,
        seed=train.seed,
        on_host=on_host,
        split=split,
        disk=disk,
    )


def _is_fp32_on_gpu(parameter: nn.Parameter) -> bool:
    """Return whether our kernel is faster than torch's: it clips in the same pass over the gradient."""
    return parameter.is_cuda and parameter.dtype == torch.float32


def named_groups(
    names: Mapping[nn.Parameter, str], train: TrainSection, towers: Mapping[str, str] = ONE_TOWER
) -> list[dict[str, Any]]:
    """Return the `decay_groups` of named parameters, one set per mesh: torch's fused kernel cannot mix meshes."""
    by_mesh: dict[object, dict[nn.Parameter, str]] = {}
    for each, name in names.items():
        by_mesh.setdefault(each.device_mesh if is_dtensor(each) else None, {})[each] = name
    groups = [group for on_mesh in by_mesh.values() for group in decay_groups(on_mesh, train, towers)]
    return [group | {"params": [(names[each], each) for each in group["params"]]} for group in groups]


def decay_groups(
    names: Mapping[nn.Parameter, str], train: TrainSection, towers: Mapping[str, str] = ONE_TOWER
) -> list[dict[str, Any]]:
    """Return parameter groups: matrices have weight decay, vectors (norms, biases) have none.

    Towers with their own settings in the recipe have their own groups, with `lr_factor`: their learning rate divided by
    the schedule's.
    """
    for tower in train.optimizer.towers:
        refuse_unknown_tower(tower, towers, code="P052", where=f"train.optimizer.towers.{tower}")
    by_settings: dict[tuple[bool, float, float], list[nn.Parameter]] = {}
    for each, name in names.items():
        settings = train.optimizer.towers.get(tower_of(name, towers), DEFAULT_SETTINGS)
        decay = train.optimizer.weight_decay if settings.weight_decay is None else settings.weight_decay
        factor = 1.0 if settings.lr is None else settings.lr / train.lr
        is_vector = each.ndim < 2 or name.endswith("_proj_bias")  # the biases of stacked experts are vectors
        by_settings.setdefault((is_vector, factor, 0.0 if is_vector else decay), []).append(each)
    ordered = sorted(by_settings, key=lambda key: key[0])  # matrices first, then in the order of the parameters
    return [{"params": by_settings[key], "weight_decay": key[2], LR_FACTOR: key[1]} for key in ordered]
