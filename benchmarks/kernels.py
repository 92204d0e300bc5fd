"""Measures single kernels on this machine's GPU: matmuls, attention, memory, copies, launches, the optimizer.

usage: python benchmarks/kernels.py RESULTS.json
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

TOKENS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
# outputs x inputs of the linear layers of llama-3.2-1b, -3b, llama-3.1-8b, and shards of the last for tp 2, 4 and 8
WEIGHTS = (
    (2048, 2048), (512, 2048), (8192, 2048), (2048, 8192), (3072, 3072), (1024, 3072), (8192, 3072), (3072, 8192),
    (4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336), (7168, 4096), (3584, 4096), (1792, 4096),
    (4096, 1792), (2048, 4096), (512, 4096), (768, 2048), (2048, 768), (1024, 1024), (3072, 1024), (896, 896),
)  # fmt: skip
HEADS = ((32, 8, 64), (24, 8, 128), (32, 32, 128), (16, 8, 128))
LENGTHS = (1024, 2048, 4096, 8192, 16384)


def seconds_of(work: Callable[[], Any], *, least: float = 0.02) -> float:
    """Return the median time of `work` on the device, over as many calls as fill `least` seconds."""
    work()
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    count = max(5, min(200, int(least / (time.perf_counter() - began))))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(marks)) / 1000


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def products() -> Iterator[dict[str, Any]]:
    """Yield the rate of a linear layer's three matmuls: forward, gradient of the input, gradient of the weight."""
    shapes = [(tokens, *weight) for weight in WEIGHTS for tokens in TOKENS]
    shapes += [(8192, 8192, 8192), (16384, 8192, 8192)]
    shapes += [(tokens, 128256, hidden) for hidden in (2048, 3072, 4096) for tokens in (1024, 4096, 16384)]
    for tokens, outputs, inputs in shapes:
        x, weight, grad = random(tokens, inputs), random(outputs, inputs), random(tokens, outputs)
        seconds = {
            "forward": seconds_of(lambda: x @ weight.T),  # noqa: B023
            "to_input": seconds_of(lambda: grad @ weight),  # noqa: B023
            "to_weight": seconds_of(lambda: grad.T @ x),  # noqa: B023
        }
        flops = 2 * tokens * outputs * inputs
        rates = {key: round(flops / value / 1e12, 1) for key, value in seconds.items()}
        yield {"tokens": tokens, "outputs": outputs, "inputs": inputs, "tflops": rates}


def fp8_products() -> Iterator[dict[str, Any]]:
    scale = torch.ones((), device="cuda")
    for tokens in (4096, 16384):
        for outputs, inputs in ((8192, 8192), (8192, 2048), (2048, 8192), (2048, 2048), (8192, 3072), (14336, 4096)):
            x = random(tokens, inputs).to(torch.float8_e4m3fn)
            weight = random(outputs, inputs).to(torch.float8_e4m3fn)
            seconds = seconds_of(
                lambda: torch._scaled_mm(x, weight.T, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)  # noqa: B023
            )
            rate = round(2 * tokens * outputs * inputs / seconds / 1e12, 1)
            yield {"tokens": tokens, "outputs": outputs, "inputs": inputs, "tflops": rate}


def attention() -> Iterator[dict[str, Any]]:
    """Yield causal attention's rate, forward and backward (2.5 times the FLOPs), for 16k tokens and one sequence."""
    for heads, kv_heads, head_dim in HEADS:
        for length in LENGTHS:
            for batch in sorted({1, 16384 // length}):
                query = random(batch, heads, length, head_dim).requires_grad_()
                keys = random(batch, kv_heads, length, head_dim).requires_grad_()
                values = random(batch, kv_heads, length, head_dim).requires_grad_()

                def forward() -> torch.Tensor:
                    return F.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)  # noqa: B023

                out, grad = forward(), random(batch, heads, length, head_dim)
                fore = seconds_of(forward)
                back = seconds_of(
                    lambda: torch.autograd.grad(out, (query, keys, values), grad, retain_graph=True)  # noqa: B023
                )
                flops = 2 * 2 * batch * heads * length * length * head_dim / 2
                yield {
                    "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "length": length, "batch": batch,
                    "forward_tflops": round(flops / fore / 1e12, 1),
                    "backward_tflops": round(2.5 * flops / back / 1e12, 1),
                }  # fmt: skip


def memory() -> dict[str, Any]:
    """Return the bandwidth (bytes read and written) of copies by size, of an addition, and to and from the host."""
    copies = {}
    for power in range(20, 33, 2):
        source = torch.empty(2**power, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        copies[2**power] = round(2 * 2**power / seconds_of(lambda: target.copy_(source)) / 1e9, 1)  # noqa: B023
    a, b = random(2**30), random(2**30)
    out = torch.empty_like(a)
    added = round(3 * a.nbytes / seconds_of(lambda: torch.add(a, b, out=out)) / 1e9, 1)
    read = round(a.nbytes / seconds_of(lambda: a.sum()) / 1e9, 1)
    host = torch.empty(2**30, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    down = round(2**30 / seconds_of(lambda: host.copy_(device, non_blocking=True)) / 1e9, 2)
    up = round(2**30 / seconds_of(lambda: device.copy_(host, non_blocking=True)) / 1e9, 2)
    return {
        "copy_gb_per_second": copies, "add_gb_per_second": added, "sum_gb_per_second": read,
        "to_host_gb_per_second": down, "from_host_gb_per_second": up,
    }  # fmt: skip


def launches() -> dict[str, Any]:
    """Return the host time of one small operation: alone, with autograd, a linear layer, a backward, a CUDA graph."""
    x = random(8, 8)
    weight = random(8, 8).requires_grad_()
    layer = torch.nn.Linear(8, 8, device="cuda", dtype=torch.bfloat16)

    def per_call(work: Callable[[], Any], count: int = 2000) -> float:
        for _ in range(200):
            work()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            work()
        torch.cuda.synchronize()
        return round((time.perf_counter() - began) / count * 1e6, 2)

    def both() -> None:
        (x @ weight).sum().backward()

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(100):
            x.add_(1)
    return {
        "add_us": per_call(lambda: x + x),
        "add_autograd_us": per_call(lambda: weight + x),
        "linear_us": per_call(lambda: layer(x)),
        "matmul_sum_backward_us": per_call(both),
        "graph_kernel_us": round(seconds_of(graph.replay) * 1e4, 3),
    }


def optimizer() -> dict[str, Any]:
    """Return the seconds of fused AdamW over 1e9 fp32 parameters, and those of the gradient norm before it."""
    parameters = [torch.nn.Parameter(torch.randn(2**24, device="cuda")) for _ in range(60)]
    for each in parameters:
        each.grad = torch.randn_like(each)
    adam = torch.optim.AdamW(parameters, fused=True)
    count = sum(each.numel() for each in parameters)
    adamw = seconds_of(adam.step)
    norm = seconds_of(
        lambda: torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
    )
    return {
        "parameters": count,
        "adamw_fused_seconds": adamw,
        "adamw_fused_gb_per_second": round(28 * count / adamw / 1e9, 1),
        "norm_seconds": norm,
        "norm_gb_per_second": round(4 * count / norm / 1e9, 1),
    }


def main() -> None:
    into = Path(sys.argv[1])
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    parts: dict[str, Callable[[], Any]] = {
        "memory": memory, "launches": launches, "optimizer": optimizer, "products": lambda: list(products()),
        "fp8_products": lambda: list(fp8_products()), "attention": lambda: list(attention()),
    }  # fmt: skip
    for name, part in parts.items():
        began = time.monotonic()
        results[name] = part()
        torch.cuda.empty_cache()
        into.write_text(json.dumps(results, indent=1))
        print(name, round(time.monotonic() - began, 1), "s", flush=True)


if __name__ == "__main__":
    main()
