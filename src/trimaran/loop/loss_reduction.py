"""Tells from the autograd graph whether a loss is a sum or a mean, so that neither is taken for the other."""

import linecache
import math
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
CHECK_OFF = "prepare(..., check_loss=False) turns this check off"
PACKAGES = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)


def reduction_of(loss: Tensor) -> Reduction | None:
    """Return how the loss was reduced to a number, if the last operations of its graph show it beyond doubt.

    A constant factor of at most 1 or a constant divisor of at least 1 leaves a mean a mean. A scaled sum is unknown: it
    may be a mean. The outputs of compiled and custom functions are unknown.
    """
    return _reduction(loss.grad_fn, MAX_DEPTH)


def check_reduction(loss: Tensor, *, claimed: Reduction | None, count: float | None) -> None:
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
    factor = f"{count:g} times" if count else "as many times as the batch has samples"
    if found == "mean":
        what = f"the loss is a mean but is taken as a sum: its gradient would be {factor} too small"
        fix = 'add reduction="mean" to this line, or compute the loss with reduction="sum"'
    else:
        what = f'the loss is a sum but reduction="mean" is set: its gradient would be {factor} too large'
        fix = 'remove reduction="mean" from this line'
    raise UserError("P044", what, where=calling_line(), fix=fix)


def check_divisor(loss: Tensor, *, count: float, reads_device: bool) -> None:
    """Raise UserError if `loss` is a mean, and its graph shows that it was divided by something else than `count`.

    `cross_entropy` divides by the class weights of the labels that are not ignored. A mean over elements may have
    several for each sample, but not 7 for 5. Without `reads_device`, divisors on the device are not read, for which the
    host would wait.
    """
    sizes = []
    for node in _means(loss.grad_fn, MAX_DEPTH):
        if hasattr(node, "_saved_total_weight"):
            weight = node._saved_total_weight
            if not weight.is_cpu and not reads_device:
                sizes.append(1)
                continue
            divisor, num_labels = float(weight), node._saved_target.numel()
            is_equal = abs(divisor - count) <= max(1e-5, 4 * torch.finfo(weight.dtype).eps) * max(divisor, count)
            if is_equal or not math.isfinite(divisor):
                sizes.append(1)
                continue
            if node._saved_weight is None and divisor == num_labels:  # perhaps several tokens for each sample
                sizes.append(num_labels)
                continue
            labels = f"labels != {ignored_index(node)}"
            if node._saved_weight is None:
                divided, line = "the labels that are not ignored", f"num_tokens=({labels}).sum()"
            else:
                divided, line = "the class weights of the labels", f"num_samples=weight[labels[{labels}]].sum()"
            what = f"the loss was divided by {divisor:g}, {divided}, but backward was told that it is the mean of"
            raise UserError(
                "P143.wrong-mean", where=calling_line(), text=what, count=count, line=line, check_off=CHECK_OFF
            )
        sizes.append(_numel(node.next_functions[0]))
    sizes += _divisors_of_sums(loss.grad_fn, MAX_DEPTH, reads_device) if not sizes else []
    # One mean that fits is enough: another may be a penalty on weights.
    if sizes and count > 0 and count == int(count) and all(size % count and count % size for size in sizes):
        raise UserError("P143.loss-mean-over", where=calling_line(), sizes=sizes[0], count=count, check_off=CHECK_OFF)


def ignored_index(node: Any) -> int:
    """Return the `ignore_index` of a cross-entropy's node, which has it as an unsigned number."""
    return (node._saved_ignore_index + 2**63) % 2**64 - 2**63


def accumulation_divisor(loss: Tensor) -> int:
    """Return the whole number that a mean was divided by in its last operation; 1 if there is none.

    The sum of so many losses, divided by their number, is their mean. A factor of 0.5 belongs to the loss itself.
    """
    node = loss.grad_fn
    while node is not None and node.name().startswith(TRANSPARENT):
        node = node.next_functions[0][0]
    if node is None or not node.name().startswith(("MulBackward", "DivBackward")):
        return 1
    inner = [each for each, _ in node.next_functions if each is not None]
    factor = _constant(node, node.name())
    if len(inner) != 1 or not factor or not 0 < factor <= 0.5 or _reduction(inner[0], MAX_DEPTH) != "mean":
        return 1
    divisor = round(1 / factor)
    if divisor == 2 and node.name().startswith("MulBackward"):
        return 1
    return divisor if abs(divisor * factor - 1) < 1e-6 and _num_terms(inner[0]) != divisor else 1


def _num_terms(node: Any) -> int:
    if not node.name().startswith(("AddBackward", "SubBackward")):
        return 1
    return sum(_num_terms(each) for each, _ in node.next_functions if each is not None)


def _means(node: Any, depth: int) -> list[Any]:
    """Return the nodes that divide by a count, in a loss that is a mean or a weighted sum of means."""
    if node is None or depth == 0:
        return []
    name = node.name()
    inner = [each for each, _ in node.next_functions if each is not None]
    if getattr(node, "_saved_reduction", None) == MEAN or name.startswith("MeanBackward"):
        is_number = _numel(node.next_functions[0]) == 1 and not hasattr(node, "_saved_total_weight")
        return _means(inner[0], depth - 1) if is_number else [node]
    is_scale = name.startswith(("MulBackward", "DivBackward")) and len(inner) == 1
    if name.startswith((*TRANSPARENT, "AddBackward", "SubBackward")) or is_scale:
        return [found for each in inner for found in _means(each, depth - 1)]
    return []


def _divisors_of_sums(node: Any, depth: int, reads_device: bool) -> list[int]:
    """Return the whole numbers that sums were divided by, such as the number of ones in a mask."""
    if node is None or depth == 0:
        return []
    name = node.name()
    inner = [each for each, _ in node.next_functions if each is not None]
    if name.startswith("DivBackward") and len(inner) == 1 and _reduction(inner[0], depth - 1) == "sum":
        divisor = node._saved_other
        is_read = isinstance(divisor, Tensor) and (divisor.is_cpu or reads_device)
        divisor = float(divisor) if is_read and divisor.numel() == 1 else 0.0
        return [int(divisor)] if divisor > 1 and divisor == int(divisor) else []
    if name.startswith((*TRANSPARENT, "AddBackward", "SubBackward", "MulBackward")):
        return [found for each in inner for found in _divisors_of_sums(each, depth - 1, reads_device)]
    return []


def _numel(edge: Any) -> int:
    node, number = edge
    return torch.Size(node._input_metadata[number].shape).numel() if node is not None else 1


def calling_line() -> str:
    """Return the line of the user's script that called Trimaran."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGES):
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
        other = other.item() if other.is_cpu and other.numel() == 1 else None
    if not isinstance(other, (int, float)) or other == 0:
        return None
    return float(other) if name.startswith("Mul") else 1 / other
