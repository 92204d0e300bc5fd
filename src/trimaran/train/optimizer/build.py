"""AdamW over the parameters that a plan left on this rank."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from trimaran.core import Plan, TrainSection
from trimaran.train.optimizer.adamw import LeanAdamW


def build_optimizer(modules: Iterable[nn.Module], train: TrainSection, plan: Plan) -> Optimizer:
    """Return an AdamW for all that is trained in the modules: a network, or this rank's stages of one.

    Each group has the names of its parameters, in order, as `param_names`. States that are fp32 and stay on the device
    are torch's own fused AdamW's; others are `LeanAdamW`'s.
    """
    constants = train.optimizer
    names = {each: name for module in modules for name, each in module.named_parameters() if each.requires_grad}
    groups = named_groups(names, train)
    defaults = {
        "lr": train.lr,
        "betas": (constants.beta1, constants.beta2),
        "eps": constants.eps,
        "weight_decay": constants.weight_decay,
    }
    on_host = plan.offload == "optimizer"
    if constants.states == "fp32" and not on_host:
        return AdamW(groups, fused=True, **defaults)
    compiled = plan.compile and next(iter(names)).device.type == "cuda"
    return LeanAdamW(
        groups, defaults=defaults, states=constants.states, seed=train.seed, on_host=on_host, compiled=compiled
    )


def named_groups(names: dict[nn.Parameter, str], train: TrainSection) -> list[dict[str, Any]]:
    """Return `decay_groups` of named parameters, those of each mesh apart: torch's fused kernel takes no mixture."""
    by_mesh: dict[object, list[nn.Parameter]] = {}
    for each in names:
        by_mesh.setdefault(each.device_mesh if isinstance(each, DTensor) else None, []).append(each)
    groups = [group for alike in by_mesh.values() for group in decay_groups(alike, train)]
    return [group | {"params": [(names[each], each) for each in group["params"]]} for group in groups]


def decay_groups(trained: Iterable[nn.Parameter], train: TrainSection) -> list[dict[str, Any]]:
    """Return the parameters in groups: matrices, which are decayed, and vectors (norms, biases), which are not."""
    trained = list(trained)
    groups: list[dict[str, Any]] = [
        {"params": [each for each in trained if each.ndim >= 2], "weight_decay": train.optimizer.weight_decay},
        {"params": [each for each in trained if each.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
