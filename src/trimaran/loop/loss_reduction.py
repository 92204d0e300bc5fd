"""Tells from the autograd graph whether a loss is a sum or a mean, so that neither is taken for the other."""

import linecache
import sys
import warnings
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from trimaran.core import UserError

Reduction = Literal["sum", "mean"]
TRANSPARENT = ("ToCopyBackward", "SqueezeBackward", "ViewBackward", "ReshapeAliasBackward", "CloneBackward", "Neg")
MEAN, SUM = 1, 2  # ATen's numbers of reductions
MAX_DEPTH = 16
PACKAGE = str(Path(__file__).parents[1])


def reduction_of(loss: Tensor) -> Reduction | None:
    """Return how the loss was reduced to a number, if the last operations of its graph show it beyond doubt.

    A constant factor of at most 1 or a constant divisor of at least 1 leaves a mean a mean. A scaled sum is unknown: it
    may be a mean. The outputs of compiled and custom functions are unknown.
    """
    return _reduction(loss.grad_fn, MAX_DEPTH)


def check_reduction(loss: Tensor, *, claimed: Reduction | None, count: int | None) -> None:
    """Raise UserError if the graph contradicts `claimed` (None: a sum). Warn if nothing was claimed and it is unknown.

    `count` is the number of samples or tokens, None if it is not known. The mean of one is also its sum.
    """
    if count == 1:
        return
    found = reduction_of(loss)
    if found is None and claimed is None:
        warnings.warn(
            "the graph of this loss does not show whether it is a sum or a mean: it is taken as the sum over its "
            "tokens or samples. Say which it is: loop.backward(loss, ..., reduction='sum') or reduction='mean'.",
            stacklevel=3,
        )
    if found is None or found == (claimed or "sum"):
        return
    factor = f"{count} times" if count else "as many times as the batch has samples"
    if found == "mean":
        what = f"the loss is a mean but is taken as a sum: its gradient would be {factor} too small"
        fix = 'add reduction="mean" to this line, or compute the loss with reduction="sum"'
    else:
        what = f'the loss is a sum but reduction="mean" is set: its gradient would be {factor} too large'
        fix = 'remove reduction="mean" from this line'
    raise UserError("P044", what, where=_calling_line(), fix=fix)


def _calling_line() -> str:
    """Return the line of the user's script that called Trimaran."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    file, number = frame.f_code.co_filename, frame.f_lineno
    return f"{file}:{number}: {linecache.getline(file, number).strip()}".removesuffix(": ")


def _reduction(node: Any, depth: int) -> Reduction | None:
    if node is None or depth == 0:
        return None
    name = node.name()
    inner = [following for following, _ in node.next_functions if following is not None]
    if name.startswith(TRANSPARENT):
        return _reduction(inner[0], depth - 1)
    if name.startswith(("MeanBackward", "SumBackward")):
        if torch.Size(node._saved_self_sym_sizes).numel() == 1:
            return _reduction(inner[0], depth - 1) if inner else None
        return "mean" if name.startswith("Mean") else "sum"
    if hasattr(node, "_saved_reduction"):  # cross_entropy, mse_loss and the like
        kinds: dict[int, Reduction] = {MEAN: "mean", SUM: "sum"}
        return kinds.get(node._saved_reduction)
    if name.startswith(("AddBackward", "SubBackward")) and len(inner) == 2:
        first, second = (_reduction(each, depth - 1) for each in inner)
        return first if first == second else None
    if name.startswith(("MulBackward", "DivBackward")) and len(inner) == 1:
        factor = _constant(node, name)
        found = _reduction(inner[0], depth - 1)
        return found if factor is not None and (found == "mean" or factor == 1) and abs(factor) <= 1 else None
    return None


def _constant(node: Any, name: str) -> float | None:
    """Return the constant that the loss was multiplied by; None if it is a tensor of the device or not saved."""
    other = getattr(node, "_saved_other", None)
    if isinstance(other, Tensor):
        other = other.item() if other.device.type == "cpu" and other.numel() == 1 else None
    if not isinstance(other, (int, float)) or other == 0:
        return None
    return float(other) if name.startswith("Mul") else 1 / other
