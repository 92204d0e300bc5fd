"""Small functions about ranks, for a loop of one's own. Without a process group there is one rank."""

import hashlib
import math
import random
import sys
from collections.abc import Mapping
from typing import Any, Literal, TextIO, overload

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.core import UserError
from trimaran.parallel import all_gather_json

Reduce = Literal["mean", "sum", "max", "min"]


@overload
def gather_metrics(
    metrics: Mapping[str, float | Tensor], *, reduce: Reduce = "mean", weight: float | Tensor = 1.0
) -> dict[str, float]: ...


@overload
def gather_metrics(metrics: Mapping[str, float | Tensor], *, reduce: Literal["list"]) -> dict[str, list[float]]: ...


def gather_metrics(
    metrics: Mapping[str, float | Tensor],
    *,
    reduce: Reduce | Literal["list"] = "mean",
    weight: float | Tensor = 1.0,
) -> dict[str, float] | dict[str, list[float]]:
    """Return the metrics of all ranks, the same on every rank: their mean, sum, max or min, or a list by rank.

    The mean is weighted: `weight` is how many samples or tokens this rank's values are a mean of, so that ranks with
    more of them count more. Every rank must call it, with the same names. Values are numbers or tensors of one element;
    reading those of a GPU synchronises with it.
    """
    values = {name: float(value) for name, value in metrics.items()}
    ranks = _all_gather([values, float(weight)])
    for rank, (other, _) in enumerate(ranks):
        if other.keys() != ranks[0][0].keys():
            raise UserError(
                "K081.rank-metrics-rank",
                where="trimaran.gather_metrics(metrics)",
                listed=_listed(ranks[0][0]),
                rank=rank,
                other=_listed(other),
            )
    names = list(ranks[0][0])
    if reduce == "list":
        return {name: [other[name] for other, _ in ranks] for name in names}
    if reduce == "mean":
        total = sum(share for _, share in ranks)
        return {
            name: sum(other[name] * share for other, share in ranks if share) / total if total else float("nan")
            for name in names
        }
    reduced = {"sum": sum, "max": max, "min": min}
    if reduce not in reduced:
        raise UserError("K081.reduce-not-way", where="trimaran.gather_metrics(reduce=...)", reduce=reduce)
    return {name: reduced[reduce]([other[name] for other, _ in ranks]) for name in names}


def print_in_order(*values: Any, sep: str = " ", file: TextIO | None = None) -> None:
    """Print what each rank passes, in order, by rank 0 alone. Every rank must call it, also without values."""
    texts = _all_gather(sep.join(map(str, values)) if values else None)
    if not dist.is_initialized() or dist.get_rank() == 0:
        out = sys.stdout if file is None else file
        out.writelines(f"{text}\n" for text in texts if text is not None)
        out.flush()


def seed_rank(seed: int) -> int:
    """Seed torch, NumPy and Python's random on this rank, and return its seed: another one on every rank.

    For what should differ between ranks, such as dropout, noise and augmentation. Call it after `prepare`. Before it, a
    model would start from other weights on every rank, which `prepare` then replaces by those of rank 0. Data must be
    drawn from a generator of its own, the same on every rank: `torch.Generator().manual_seed(seed)`.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    own = int.from_bytes(hashlib.sha256(f"{seed}/{rank}".encode()).digest()[:8], "little") >> 1
    torch.manual_seed(own)
    np.random.seed(own % 2**32)
    random.seed(own)
    return own


def _all_gather(value: Any) -> list[Any]:
    return all_gather_json(value) if dist.is_initialized() else [value]


def _listed(metrics: Mapping[str, float]) -> str:
    return ", ".join(metrics) or "none"


def scale_lr(lr: float, *, batch: int, new_batch: int, rule: Literal["linear", "sqrt"]) -> float:
    """Return the learning rate for `new_batch` samples a step, if `lr` is good for `batch`.

    `linear` multiplies it by new_batch / batch: for SGD, with a warm-up (Goyal et al. 2017, arXiv:1706.02677). `sqrt`
    multiplies it by the square root of that: for Adam and other adaptive optimizers (Malladi et al. 2022,
    arXiv:2205.10287). Both are starting points, and fail for very large batches.
    """
    if rule not in ("linear", "sqrt"):
        raise UserError("K082.rule-not-rule", where="trimaran.scale_lr(rule=...)", rule=rule)
    if not (lr > 0 and batch > 0 and new_batch > 0):
        raise UserError("K082.lr-batch-new", where="trimaran.scale_lr(...)", lr=lr, batch=batch, new_batch=new_batch)
    ratio = new_batch / batch
    return lr * (ratio if rule == "linear" else math.sqrt(ratio))
