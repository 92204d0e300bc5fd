"""A rank whose computing is waiting and whose loader and disk are slow; imported where TRIMARAN_TEST_PLUGIN names it.

TRIMARAN_TEST_DIPS is four numbers of seconds: what a micro-batch takes longer, whatever its rows; what the backward of
each layer takes longer; what a row keeps a core of the loader busy; what the disk needs to be sure of a file.
"""

import os
import time
from typing import Any

import torch
from torch import Tensor

from trimaran.data import Sequences, TokenSample
from trimaran.nets.decoder import DecoderLayer
from trimaran.train.steppers.stepper import PlainStepper

call_seconds, layer_seconds, row_seconds, sync_seconds = map(float, os.environ["TRIMARAN_TEST_DIPS"].split())
judge, forward, load, sync = PlainStepper._losses, DecoderLayer.forward, Sequences.__getitem__, os.fsync


class Pause(torch.autograd.Function):
    """Returns what it gets; its backward takes long, and no core."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        time.sleep(layer_seconds)
        return gradients[0]


def judge_slowly(self: PlainStepper, inputs: Any) -> Any:
    time.sleep(call_seconds)
    return judge(self, inputs)


def pass_slowly(self: DecoderLayer, stream: Tensor, *rest: Any, **named: Any) -> Any:
    return forward(self, Pause.apply(stream), *rest, **named)


def load_slowly(self: Sequences, index: int) -> TokenSample:
    until = time.perf_counter() + row_seconds
    while time.perf_counter() < until:
        pass
    return load(self, index)


def sync_slowly(fd: int) -> None:
    time.sleep(sync_seconds)
    sync(fd)


PlainStepper._losses = judge_slowly  # type: ignore[method-assign]
DecoderLayer.forward = pass_slowly  # type: ignore[method-assign]
Sequences.__getitem__ = load_slowly  # type: ignore[method-assign]
os.fsync = sync_slowly
