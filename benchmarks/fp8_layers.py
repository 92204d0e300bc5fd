"""Forward and backward of one linear layer on a GPU in bf16 and with each fp8 recipe, and the parts of `block`.

usage: python benchmarks/fp8_layers.py [OUT.jsonl] [--rows 8192] [--shapes 14336x4096,4096x14336,4096x4096]

A shape is outputs x inputs. Weights are bf16, as those of split weights. Layers are compiled. Times are medians of CUDA
events over calls that alternate between all of them, in ms.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trimaran.parallel.fp8_blocks import Blocks, cast_rows, cast_weight, multiply
from trimaran.parallel.fp8_linear import as_fp8

ROUNDS, WARM = 20, 5


def layer_call(kind: str, rows: Tensor, gradient: Tensor) -> Callable[[], Any]:
    """Return forward and backward of a compiled layer."""
    layer = nn.Linear(rows.shape[1], gradient.shape[1], bias=False, device="cuda", dtype=torch.bfloat16)
    if kind != "bf16":
        as_fp8(layer, kind)
    run = torch.compile(layer, fullgraph=True)

    def call() -> None:
        rows.grad = layer.weight.grad = None
        run(rows).backward(gradient)

    return call


def parts_of_block(rows: Tensor, weight: Tensor, gradient: Tensor) -> dict[str, Callable[[], Any]]:
    """Return the operators of a layer with blocks, one by one."""
    plain, turned = cast_rows(rows.detach(), False)
    grad, grad_turned = cast_rows(gradient, False)
    of_weight, weight_turned = cast_weight(weight), cast_weight(weight, turned=True)
    assert isinstance(plain, Blocks)
    assert isinstance(turned, Blocks)
    assert isinstance(grad, Blocks)
    assert isinstance(grad_turned, Blocks)
    return {
        "cast rows": lambda: cast_rows(rows.detach(), False),
        "cast gradient": lambda: cast_rows(gradient, False),
        "cast weight": lambda: cast_weight(weight),
        "cast weight, transposed": lambda: cast_weight(weight, turned=True),
        "matmul forward": lambda: multiply(plain, of_weight, torch.bfloat16),
        "matmul for rows": lambda: multiply(grad, weight_turned, torch.bfloat16),
        "matmul for weight": lambda: multiply(grad_turned, turned, torch.bfloat16),
    }


def milliseconds(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Return the median time of each call. All take turns, so that clocks are the same for each."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(ROUNDS + WARM):
        for name, call in calls.items():
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            call()
            after.record()
            after.synchronize()
            if number >= WARM:
                found[name].append(before.elapsed_time(after))
    return {name: round(statistics.median(times), 4) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyrefly: ignore[missing-attribute]
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--shapes", default="14336x4096,4096x14336,4096x4096")
    asked = parser.parse_args()
    for shape in asked.shapes.split(","):
        outputs, inputs = map(int, shape.split("x"))
        rows = torch.randn(asked.rows, inputs, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        gradient = torch.randn(asked.rows, outputs, device="cuda", dtype=torch.bfloat16)
        weight = (0.02 * torch.randn(outputs, inputs, device="cuda")).bfloat16()
        layers = {kind: layer_call(kind, rows, gradient) for kind in ("bf16", "tensor", "block")}
        facts = {"shape": shape, "rows": asked.rows, "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
        facts |= {"device": torch.cuda.get_device_name(), "layers_ms": milliseconds(layers)}
        facts["block_ms"] = milliseconds(parts_of_block(rows, weight, gradient))
        print(json.dumps(facts), flush=True)
        if asked.out:
            with asked.out.open("a") as file:
                file.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
