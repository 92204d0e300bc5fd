"""Finds trained parameters that the loss does not depend on."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from trimaran.nets import Network

MAX_REPORTED_NAMES = 64


def watch_unused_parameters(optimizer: Optimizer, networks: Sequence[Network]) -> Callable[[], dict[str, Any]]:
    """Return a function that reports this rank's parameters without a gradient at the optimizer's first step.

    It returns them once, under `unused`, and an empty dict before and afterwards. A gradient of zeros counts as one:
    experts that received no token have it.
    """
    names: list[str] = []

    def find_unused(*_: object) -> None:
        handle.remove()
        held = {each for group in optimizer.param_groups for each in group["params"]}
        named = ((name, each) for network in networks for name, each in network.module.named_parameters())
        names.extend(name for name, each in named if each in held and each.grad is None)
        del names[MAX_REPORTED_NAMES:]

    handle = optimizer.register_step_pre_hook(find_unused)
    return lambda: {"unused": [names.pop(0) for _ in range(len(names))]} if names else {}
