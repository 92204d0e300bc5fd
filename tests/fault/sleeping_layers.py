"""Each layer sleeps for its rows, so that the time of compute does not depend on how busy the test machine is.

TRIMARAN_TEST_ROW_SECONDS is how long a layer's forward takes for each row; backward takes twice as long. A rank of
which the run directory has a file `slow-RANK` or `slow-HOST` takes as many times longer as the file says, from its next
step on. So does a measurement of the speed of that host.
"""

import os
import platform
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimaran.nets import DecoderLayer
from trimaran.train.process import measure_speed

RUN = Path("/proc/self/fd/1").readlink().parents[1]  # a rank prints to RUN/logs/rank-RANK.log
row_seconds = float(os.environ["TRIMARAN_TEST_ROW_SECONDS"])
layer_forward = DecoderLayer.forward


def sleep(rows: int) -> None:
    times = 1.0
    for name in (os.environ.get("RANK", "none"), platform.node()):
        with suppress(OSError, ValueError):
            times = float((RUN / f"slow-{name}").read_text())
    time.sleep(times * rows * row_seconds)


class SleepingBackward(torch.autograd.Function):
    """The identity; its backward sleeps, which needs no core."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.rows = value.shape[0]
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        sleep(2 * ctx.rows)
        return gradients[0]


def sleeping_forward(self: DecoderLayer, stream: Tensor, *rest: Any, **named: Any) -> Any:
    sleep(stream.shape[0])
    return layer_forward(self, SleepingBackward.apply(stream), *rest, **named)


def sleeping_multiply(matrix: Tensor, times: int) -> Tensor:
    for _ in range(times):
        sleep(1)
    return matrix


measure_speed.multiply = sleeping_multiply  # pyrefly: ignore[bad-assignment]
DecoderLayer.forward = sleeping_forward  # type: ignore[method-assign]
