"""What makes a rank slow or wrong, called in the rank before it trains: see `tests.diagnosed_runs.train`."""

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trimaran.checkpoint import Saver
from trimaran.data import Sequences, TokenSample
from trimaran.nets import DecoderLayer, Network
from trimaran.train import build

Hook = Callable[[torch.nn.Module, Any, Any], Any]


def load_slowly(row_seconds: float) -> None:
    load = Sequences.__getitem__

    def slowly(self: Sequences, index: int) -> TokenSample:
        time.sleep(row_seconds)
        return load(self, index)

    Sequences.__getitem__ = slowly  # type: ignore[method-assign]


def sync_slowly(seconds: float) -> None:
    """Make each fsync slow."""
    sync = os.fsync

    def slowly(fd: int) -> None:
        time.sleep(seconds)
        sync(fd)

    os.fsync = slowly  # pyrefly: ignore[bad-assignment]


def save_slowly(seconds: float) -> None:
    """Make each checkpoint slow, before it is written."""
    start = Saver.start

    def slowly(self: Saver, request: Any) -> None:
        time.sleep(seconds)
        start(self, request)

    Saver.start = slowly  # type: ignore[method-assign]


def forward_slowly(layer_seconds: float, rank: int | None = None) -> None:
    """Make the forward of each layer slow, on one rank or on all."""
    forward = DecoderLayer.forward

    def slowly(self: DecoderLayer, *inputs: Any, **named: Any) -> Any:
        time.sleep(layer_seconds)
        return forward(self, *inputs, **named)

    if rank is None or os.environ["RANK"] == str(rank):
        DecoderLayer.forward = slowly  # type: ignore[method-assign]


class Sleep(torch.autograd.Function):
    """The identity, which sleeps in forward, and twice as long in backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, seconds: float) -> Tensor:
        ctx.seconds = 2 * seconds
        time.sleep(seconds)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0], None


def compute_slowly(row_seconds: float, late: dict[int, float]) -> None:
    """Make forward and backward take this long per row, and `late` seconds longer on some ranks."""
    forward = DecoderLayer.forward

    def slowly(self: DecoderLayer, stream: Tensor, *rest: Any, **named: Any) -> Any:
        seconds = row_seconds * len(stream) + late.get(int(os.environ["RANK"]), 0.0)
        return forward(self, Sleep.apply(stream, seconds / 3), *rest, **named)

    DecoderLayer.forward = slowly  # type: ignore[method-assign]


def wait_for_values() -> None:
    """Make the host wait for a value of each layer."""
    forward = DecoderLayer.forward

    def waits(self: DecoderLayer, stream: Tensor, *rest: Any, **named: Any) -> Any:
        assert stream.abs().max().item() < 1e9
        return forward(self, stream, *rest, **named)

    DecoderLayer.forward = waits  # type: ignore[method-assign]


def compile_each_step() -> None:
    """Compile for a new size in every step of a decoder of four layers."""
    forward, sizes = DecoderLayer.forward, itertools.count(2)
    double = torch.compile(lambda part: part * 2, backend="eager", dynamic=False)

    def compiles(self: DecoderLayer, stream: Tensor, *rest: Any, **named: Any) -> Any:
        double(stream.detach()[:, : next(sizes) // 4])
        return forward(self, stream, *rest, **named)

    DecoderLayer.forward = compiles  # type: ignore[method-assign]


def change_network(change: Callable[[Network], None]) -> None:
    """Call `change` with the network that this rank will build."""
    build_networks = build.build_networks

    def changed(*args: Any) -> tuple[Network, ...]:
        networks = build_networks(*args)
        change(networks[0])
        return networks

    build.build_networks = changed  # pyrefly: ignore[bad-assignment]


def hook(module: str, function: Hook) -> None:
    """Add a forward hook to a module of the network that this rank will build."""

    def add(network: Network) -> None:
        network.module.get_submodule(module).register_forward_hook(function)

    change_network(add)
