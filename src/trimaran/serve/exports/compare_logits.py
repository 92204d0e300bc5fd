"""Compares the logits of an export with those of the checkpoint; which packages an export needs."""

import contextlib
import importlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimaran.core import UserError
from trimaran.nets import Network

# Rows of different lengths: a graph that has a fixed batch or length fails with the second.
SHAPES = ((2, 24), (1, 7))
# The root mean square of the difference of logits, as a fraction of that of the logits. fp32 allows for another order
# of additions; the others for the rounding of each weight: half a step of its block or of its mantissa.
BOUNDS = {
    "fp32": 1e-4,
    "fp16": 5e-3,
    "bf16": 3e-2,
    "int8": 5e-2,
    "q8_0": 5e-2,
    "q5_1": 0.12,
    "q5_0": 0.12,
    "q4_1": 0.3,
    "q4_0": 0.3,
    "int4": 0.3,
}
Logits = Callable[[Tensor], Tensor]


def require_package(name: str, *, where: str) -> Any:
    """Return the module `name`; raise UserError with the command that installs it if it is missing."""
    try:
        with quiet_packages():
            return importlib.import_module(name)
    except ImportError as error:
        raise UserError("K071.needs-package", where=where, name=name.partition(".")[0], error=error) from None


@contextlib.contextmanager
def quiet_packages() -> Iterator[None]:
    """Keep warnings of packages off the terminal, and their prints off stdout, which is for a command's answer."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsDifference:
    """How far the logits of an export are from those of the checkpoint."""

    largest_difference: float  # absolute, of a logit
    relative_difference: float  # the root mean square of the differences, as a fraction of that of the logits
    bound: float  # of the relative difference, that rounding explains
    same_choice: float  # the fraction of positions at which both choose the same token


def sample_tokens(vocabulary: int, max_seq_len: int) -> list[Tensor]:
    """Return the tokens that exports are compared on, [B, T] each: the same in every process."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(0, vocabulary, (rows, min(length, max_seq_len)), generator=generator) for rows, length in SHAPES
    ]


def network_logits(network: Network) -> Logits:
    @torch.no_grad()
    def logits(tokens: Tensor) -> Tensor:
        device = next(network.module.parameters()).device
        return network.forward({"tokens": tokens.to(device)})[0].float().cpu()

    return logits


def compare_logits(reference: Logits, exported: Logits, batches: list[Tensor], *, precision: str) -> LogitsDifference:
    """Return the difference of two functions from tokens to logits. `precision` is a key of BOUNDS."""
    largest = squares = total = same = count = 0.0
    for tokens in batches:
        expected, found = reference(tokens).double(), exported(tokens).double()
        assert expected.shape == found.shape, (expected.shape, found.shape)
        difference = (found - expected).nan_to_num(torch.inf)
        largest = max(largest, difference.abs().max().item())
        squares, total = squares + difference.square().sum().item(), total + expected.square().sum().item()
        same += (expected.argmax(-1) == found.argmax(-1)).sum().item()
        count += tokens.numel()
    relative = (squares / total) ** 0.5 if total else largest
    return LogitsDifference(largest_difference=largest, relative_difference=relative, bound=BOUNDS[precision],
                            same_choice=same / count)  # fmt: skip


def refuse_difference(difference: LogitsDifference, where: str) -> None:
    """Raise UserError if an export is farther from its checkpoint than rounding explains."""
    if not difference.relative_difference <= difference.bound:
        share = f"{difference.relative_difference:.3g}"
        raise UserError("K072.export-differs-checkpoint-logits", where=where, share=share, bound=difference.bound)
