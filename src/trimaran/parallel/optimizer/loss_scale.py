"""Dynamic loss scaling for fp16: keeps small gradients above what fp16 can represent."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trimaran.core import Plan, TrainSection, UserError

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
            raise UserError("P030", "the gradients are not finite in fp16, even without a loss scale",
                            where="plan.precision", fix="use bf16, which has the range of fp32, or fp32")  # fmt: skip
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
