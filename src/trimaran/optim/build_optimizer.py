"""AdamW over the parameters that a plan left on this rank."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from trimaran.core import Plan, TrainSection
from trimaran.core.recipe import TowerOptimizer
from trimaran.optim.adamw import LeanAdamW
from trimaran.parallel.tower_plan import refuse_unknown, tower_of

LR_FACTOR = "lr_factor"  # what a group's learning rate is of the schedule's
WHOLE = {"all": ""}
LIKE_THE_REST = TowerOptimizer()
NO_HALVES: Mapping[nn.Parameter, Tensor] = {}


def build_optimizer(
    modules: Iterable[nn.Module],
    train: TrainSection,
    plan: Plan,
    towers: Mapping[str, str] = WHOLE,
    lows: Mapping[nn.Parameter, Tensor] = NO_HALVES,
) -> Optimizer:
    """Return an AdamW for all that is trained in the modules: a network, or this rank's stages of one.

    Each group has the names of its parameters, in order, as `param_names`. `towers` has the prefix of those names for
    each tower. `lows` has the lower halves of the parameters that are upper ones. On a CPU, whole weights with fp32
    states are torch's own fused AdamW's; all others are `LeanAdamW`'s. A rank whose stages are all frozen has one empty
    group.
    """
    constants = train.optimizer
    names = {each: name for module in modules for name, each in module.named_parameters() if each.requires_grad}
    groups = named_groups(names, train, towers)
    defaults = {
        "lr": train.lr,
        "betas": (constants.beta1, constants.beta2),
        "eps": constants.eps,
        "weight_decay": constants.weight_decay,
    }
    on_host = plan.offload == "optimizer"
    ours = constants.states != "fp32" or on_host or lows or all(_gains(each) for each in names)
    if not groups or not ours:
        return AdamW(groups or [{"params": []}], fused=True, **defaults)
    return LeanAdamW(groups, defaults=defaults, states=constants.states, seed=train.seed, on_host=on_host, lows=lows)


def _gains(parameter: nn.Parameter) -> bool:
    """Return whether our kernel moves it faster than torch's: one pass over the gradient, with the clipping in it."""
    return parameter.device.type == "cuda" and parameter.dtype == torch.float32


def named_groups(
    names: Mapping[nn.Parameter, str], train: TrainSection, towers: Mapping[str, str] = WHOLE
) -> list[dict[str, Any]]:
    """Return `decay_groups` of named parameters, those of each mesh apart: torch's fused kernel takes no mixture."""
    by_mesh: dict[object, dict[nn.Parameter, str]] = {}
    for each, name in names.items():
        by_mesh.setdefault(each.device_mesh if isinstance(each, DTensor) else None, {})[each] = name
    groups = [group for alike in by_mesh.values() for group in decay_groups(alike, train, towers)]
    return [group | {"params": [(names[each], each) for each in group["params"]]} for group in groups]


def decay_groups(
    names: Mapping[nn.Parameter, str], train: TrainSection, towers: Mapping[str, str] = WHOLE
) -> list[dict[str, Any]]:
    """Return the parameters in groups: matrices, which are decayed, and vectors (norms, biases), which are not.

    Towers that the recipe treats differently have groups of their own, with what their learning rate is of the
    schedule's as `lr_factor`.
    """
    for tower in train.optimizer.towers:
        refuse_unknown(tower, towers, code="P052", where=f"train.optimizer.towers.{tower}")
    by_way: dict[tuple[bool, float, float], list[nn.Parameter]] = {}
    for each, name in names.items():
        own = train.optimizer.towers.get(tower_of(name, towers), LIKE_THE_REST)
        decay = train.optimizer.weight_decay if own.weight_decay is None else own.weight_decay
        factor = 1.0 if own.lr is None else own.lr / train.lr
        vector = each.ndim < 2
        by_way.setdefault((vector, factor, 0.0 if vector else decay), []).append(each)
    ways = sorted(by_way, key=lambda way: way[0])  # matrices first, and towers in the order that they come in
    return [{"params": by_way[way], "weight_decay": way[2], LR_FACTOR: way[1]} for way in ways]
