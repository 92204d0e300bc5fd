"""Checks that replicated weights are equal on all ranks: if not, the ranks train different models in silence."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm

from trimaran.core import UserError
from trimaran.parallel.comm.json_exchange import all_gather_int64, all_gather_json
from trimaran.train.health.memory_check import bit_checksum

FIRST_STEPS = 3
CHECK_EVERY = 100
MAX_NAMES = 5
DIFFERENT_BUFFERS = "P135"


def check_same_model(model: nn.Module) -> None:
    """Raise UserError on all ranks if they have built different models. Every rank must call it."""
    if dist.get_world_size() == 1:
        return
    parts = [(name, list(each.shape), str(each.dtype), each.requires_grad) for name, each in _tensors_of(model)]
    digest = int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), signed=True)
    digests = all_gather_int64(np.array([digest]))
    if (digests == digests[0]).all():
        return
    every = all_gather_json([[name, f"{shape} {dtype}{'' if trained else ', frozen'}"]
                             for name, shape, dtype, trained in parts])  # fmt: skip
    first = dict(map(tuple, every[0]))
    rank = next(number for number, each in enumerate(every) if each != every[0])
    other = dict(map(tuple, every[rank]))
    name = next((each for each in [*first, *other] if first.get(each) != other.get(each)), "the order of its parts")
    raise UserError("P138", f"ranks have built different models: {name} is {first.get(name, 'missing')} on rank 0 and "
                    f"{other.get(name, 'missing')} on rank {rank}", where="prepare(model, optimizer)",
                    fix="build the same model on every rank: settings must not depend on the rank, or on files that "
                    "differ between machines")  # fmt: skip


class ReplicaAgreement:
    """Compares the replicated weights and buffers of all ranks, after the first updates and then now and then.

    Other updates cost nothing.
    """

    def __init__(self, model: nn.Module, *, is_on: bool) -> None:
        self._model, self._is_on = model, is_on and dist.get_world_size() > 1
        self._num_steps, self._warned = 0, False

    def check(self, step: int) -> None:
        """Raise UserError on all ranks if their weights differ, and warn if their buffers do."""
        self._num_steps += 1
        if not self._is_on or (self._num_steps > FIRST_STEPS and self._num_steps % CHECK_EVERY):
            return
        if differing := _differing(self._weights()):
            raise UserError("P134", f"after step {step} the ranks hold different weights: {_listed(differing)}",
                            where="loop.step()", fix="change weights alike on every rank: without random numbers that "
                            "differ between ranks, and only by loop.step() or from values that all ranks share. "
                            "prepare(..., check_replicas=False) turns this check off")  # fmt: skip
        if not self._warned and (differing := _differing(dict(_buffers_of(self._model)))):
            self._warned = True
            if dist.get_rank() == 0:
                warnings.warn(
                    f"{DIFFERENT_BUFFERS}: after step {step} the ranks hold different buffers: {_listed(differing)}. "
                    "Each rank updates them from its own rows; loop.evaluate and checkpoints use rank 0's. Update them "
                    "from the rows of all ranks, for instance with torch.distributed.all_reduce.",
                    stacklevel=3,
                )

    def _weights(self) -> dict[str, Tensor]:
        return {name: each.detach() for name, each in self._model.named_parameters() if not isinstance(each, DTensor)}


def _differing(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that are not equal bit by bit on all ranks. Every rank must call it."""
    strided = {name: each for name, each in tensors.items() if each.layout is torch.strided and each.numel()}
    if not strided:
        return []
    checksums = torch.stack([bit_checksum(each) for each in strided.values()]).cpu().numpy()
    gathered = all_gather_int64(checksums)
    unequal = (gathered != gathered[0]).any(0)
    return [name for name, differs in zip(strided, unequal, strict=True) if differs]


def _buffers_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers except BatchNorm's, which has its own warning; see `batch_norm_warning`."""
    for path, module in model.named_modules():
        if not isinstance(module, AnyBatchNorm):
            for name, buffer in module.named_buffers(recurse=False):
                yield f"{path}.{name}" if path else name, buffer


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
