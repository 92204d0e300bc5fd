"""Builds the AdamW for the parameters of this rank, with its learning rate and loss scale."""

import math
from collections.abc import Iterable, Mapping
from inspect import unwrap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from trimaran.core import Plan, TowerOptimizer, TrainSection, UserError
from trimaran.nets import is_dtensor, local_part, refuse_unknown_tower, tower_of
from trimaran.parallel.optimizer.split_weights import NO_SPLIT_WEIGHTS, SplitWeights


class EagerOptimizer(Optimizer):
    """An optimizer that torch never compiles: its own guard against that imports the compiler, for a second a rank."""

    add_param_group = unwrap(Optimizer.add_param_group)
    zero_grad = unwrap(Optimizer.zero_grad)
    state_dict = unwrap(Optimizer.state_dict)
    load_state_dict = unwrap(Optimizer.load_state_dict)


class SplitWeightsOptimizer(EagerOptimizer):
    """An optimizer that may own split weights, multiplies gradients by `factor`, and skips a step if `found_inf`."""

    split_weights: SplitWeights
    factor: Tensor | None  # these are tensors of one element on the weights' device
    found_inf: Tensor | None

    def wait(self) -> None:
        """Wait until states on the host or on disk have been copied back from the device."""
        raise NotImplementedError


def split_weights_of(optimizer: Optimizer) -> SplitWeights:
    return optimizer.split_weights if isinstance(optimizer, SplitWeightsOptimizer) else NO_SPLIT_WEIGHTS


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
    by_mesh: dict[object, dict[nn.Parameter, str]] = {}  # torch's fused kernel cannot mix meshes
    for each, name in names.items():
        by_mesh.setdefault(each.device_mesh if is_dtensor(each) else None, {})[each] = name
    groups = [group for on_mesh in by_mesh.values() for group in decay_groups(on_mesh, train, towers)]
    groups = [group | {"params": [(names[each], each) for each in group["params"]]} for group in groups]
    defaults = {
        "lr": train.lr,
        "betas": (constants.beta1, constants.beta2),
        "eps": constants.eps,
        "weight_decay": constants.weight_decay,
    }
    disk = Path(plan.disk.path) if plan.offloads_to_disk else None
    states, on_host = constants.states, plan.offload == "optimizer" and disk is None
    # Our kernel is faster than torch's: it clips in the same pass over the gradient.
    on_gpu = all(each.is_cuda and each.dtype == torch.float32 for each in names)
    if not groups or not (states != "fp32" or on_host or disk or split.lower_halves or on_gpu):
        return ShardAdamW(groups or [{"params": []}], fused=True, **defaults)
    from trimaran.parallel.optimizer.adamw import LowMemoryAdamW  # noqa: PLC0415  fp32 states on a CPU do not need it

    return LowMemoryAdamW(
        groups, defaults=defaults, states=states, seed=train.seed, on_host=on_host, split=split, disk=disk
    )


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


INITIAL_SCALE = 2.0**16
GROWTH_INTERVAL_STEPS = 2000
MIN_SCALE, MAX_SCALE = 1.0, 2.0**32


class LossScale:
    """A power of two: halved when gradients overflow, doubled after `growth_interval` good steps.

    Every rank decides by the global gradient norm, which is the same number everywhere, so all ranks agree. Reading it
    makes the host wait for the device once a step.
    """

    def __init__(self, *, initial: float = INITIAL_SCALE, growth_interval: int = GROWTH_INTERVAL_STEPS) -> None:
        self.value = initial
        self._growth_interval, self._good_steps = growth_interval, 0

    def accepts(self, norm: Tensor) -> bool:
        """Return whether gradients with this norm may be applied, and set the scale of the next step."""
        if bool(torch.isfinite(norm)):
            self._good_steps += 1
            if self._good_steps == self._growth_interval:
                self.value, self._good_steps = min(self.value * 2, MAX_SCALE), 0
            return True
        if self.value <= MIN_SCALE:
            raise UserError("P030.gradients-not-finite", where="plan.precision")
        self.value, self._good_steps = self.value / 2, 0
        return False

    def state(self) -> dict[str, Any]:
        """Return what the next step's scale depends on, for the checkpoint."""
        return {"value": self.value, "good_steps": self._good_steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.value, self._good_steps = float(state["value"]), int(state["good_steps"])


def build_loss_scale(plan: Plan, train: TrainSection) -> LossScale | None:
    """Return a loss scale if anything computes in fp16; nothing else needs one. DeepSpeed has its own."""
    has_fp16 = "fp16" in (plan.precision, *train.precision.values())
    return LossScale() if has_fp16 and not plan.engine_traits.keeps_states_elsewhere else None


def learning_rate(step: int, train: TrainSection) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0. A pure function: resuming needs no state."""
    schedule = train.schedule
    if step < schedule.warmup_steps:
        return train.lr * (step + 1) / schedule.warmup_steps
    length = max(1, train.steps - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / length)
    match schedule.kind:
        case "cosine":
            fraction = 0.5 * (1 + math.cos(math.pi * progress))
        case "linear":
            fraction = 1 - progress
        case "wsd":
            decay_steps = schedule.decay_steps or max(1, train.steps // 5)
            fraction = min(1.0, max(0, train.steps - step) / decay_steps)
        case "constant":
            fraction = 1.0
    return train.lr * (schedule.floor + (1 - schedule.floor) * fraction)
