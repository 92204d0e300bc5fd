"""Makes a rank's compute, loader and disk slow; imported if TRIMARAN_TEST_PLUGIN names this module.

TRIMARAN_TEST_SLOW_SECONDS has four numbers, in seconds: extra time per forward and per backward of a layer, CPU time
of the loader per row, and extra time per fsync.
"""

import os
import time
from typing import Any

import torch
from torch import Tensor

from trimaran.data import Sequences, TokenSample
from trimaran.nets import DecoderLayer

forward_seconds, backward_seconds, row_seconds, sync_seconds = map(
    float, os.environ["TRIMARAN_TEST_SLOW_SECONDS"].split()
)
layer_forward, load, sync = DecoderLayer.forward, Sequences.__getitem__, os.fsync


class SlowBackward(torch.autograd.Function):
    """The identity; its backward sleeps, which needs no core."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        time.sleep(backward_seconds)
        return gradients[0]


def slow_layer_forward(self: DecoderLayer, stream: Tensor, *rest: Any, **named: Any) -> Any:
    time.sleep(forward_seconds)
    return layer_forward(self, SlowBackward.apply(stream), *rest, **named)


def slow_load(self: Sequences, index: int) -> TokenSample:
    until = time.perf_counter() + row_seconds
    while time.perf_counter() < until:
        pass
    return load(self, index)


def slow_sync(fd: int) -> None:
    time.sleep(sync_seconds)
    sync(fd)


DecoderLayer.forward = slow_layer_forward  # type: ignore[method-assign]
Sequences.__getitem__ = slow_load  # type: ignore[method-assign]
os.fsync = slow_sync  # pyrefly: ignore[bad-assignment]
