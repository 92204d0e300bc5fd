"""Parameters that are trained and that the loss does not depend on."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from trimaran.nets import Network
from trimaran.parallel.gradient_norm import gradient_of

MOST_NAMED = 64


def watch_unused(optimizer: Optimizer, networks: Sequence[Network]) -> Callable[[], dict[str, Any]]:
    """Return a reader of the parameters here that have no gradient when the optimizer first moves the weights.

    It gives them once, under `unused`, and nothing before and afterwards. A gradient of zeros is one: experts that no
    token came to have it.
    """
    names: list[str] = []

    def look(*_: object) -> None:
        handle.remove()
        held = {each for group in optimizer.param_groups for each in group["params"]}
        found = ((name, each) for network in networks for name, each in network.module.named_parameters())
        names.extend(name for name, each in found if each in held and gradient_of(each) is None)
        del names[MOST_NAMED:]

    handle = optimizer.register_step_pre_hook(look)
    return lambda: {"unused": [names.pop(0) for _ in range(len(names))]} if names else {}
