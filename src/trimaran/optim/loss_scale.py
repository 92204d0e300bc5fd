"""The loss scale of fp16: small gradients are lifted above what fp16 can hold, and lowered again before the update."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trimaran.core import Plan, TrainSection, UserError

START = 2.0**16
GROW_AFTER = 2000
SMALLEST, LARGEST = 1.0, 2.0**32


class LossScale:
    """A power of two that follows the gradients: halved when they overflow, doubled after `grow_after` good steps.

    Every rank decides by the norm of all gradients of the model, which is the same number everywhere: that is how they
    agree. Looking at it makes the host wait for the device, once a step.
    """

    def __init__(self, *, start: float = START, grow_after: int = GROW_AFTER) -> None:
        self.value = start
        self._grow_after, self._good_steps = grow_after, 0

    def accepts(self, norm: Tensor) -> bool:
        """Return whether gradients with this norm may move the weights, and settle the scale of the next step."""
        if bool(torch.isfinite(norm)):
            self._good_steps += 1
            if self._good_steps == self._grow_after:
                self.value, self._good_steps = min(self.value * 2, LARGEST), 0
            return True
        if self.value <= SMALLEST:
            raise UserError("P030", "the gradients are not finite in fp16, even without a loss scale",
                            where="plan.precision", fix="use bf16, which has the range of fp32, or fp32")  # fmt: skip
        self.value, self._good_steps = self.value / 2, 0
        return False

    def state(self) -> dict[str, Any]:
        """Return what the next step's scale depends on."""
        return {"value": self.value, "good_steps": self._good_steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.value, self._good_steps = float(state["value"]), int(state["good_steps"])


def build_loss_scale(plan: Plan, train: TrainSection) -> LossScale | None:
    """Return a loss scale where anything computes in fp16; nothing else needs one."""
    return LossScale() if "fp16" in (plan.precision, *train.precision.values()) else None
