"""The learning rate for another batch size."""

import math
from typing import Literal

from trimaran.core import UserError


def scale_lr(lr: float, *, batch: int, new_batch: int, rule: Literal["linear", "sqrt"]) -> float:
    """Return the learning rate for `new_batch` samples a step, if `lr` is good for `batch`.

    `linear` multiplies it by new_batch / batch: for SGD, with a warm-up (Goyal et al. 2017, arXiv:1706.02677). `sqrt`
    multiplies it by the square root of that: for Adam and other adaptive optimizers (Malladi et al. 2022,
    arXiv:2205.10287). Both are starting points, and fail for very large batches.
    """
    if rule not in ("linear", "sqrt"):
        raise UserError("K082", f"rule={rule!r} is not a rule", where="trimaran.scale_lr(rule=...)",
                        fix="use 'linear' for SGD, 'sqrt' for Adam")  # fmt: skip
    if not (lr > 0 and batch > 0 and new_batch > 0):
        raise UserError("K082", f"lr={lr}, batch={batch} and new_batch={new_batch} must be above 0",
                        where="trimaran.scale_lr(...)", fix="pass the samples of an optimizer step")  # fmt: skip
    ratio = new_batch / batch
    return lr * (ratio if rule == "linear" else math.sqrt(ratio))
