"""How fast the devices of this machine compute now: matmuls per second, in a process that does nothing else."""

import time

import torch
from torch import Tensor

from trimaran.core import DEVICE_TRAITS

SIZE = {"cpu": 256, "cuda": 4096}
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
MAX_MATMULS = 64  # between two readings of the clock


def measure_speed(kind: str, *, devices: int, seconds: float) -> float:
    """Return the matmuls per second of the slowest device, comparable only on the same machine."""
    names = ["cpu"] if DEVICE_TRAITS[kind].shares_cores else [f"cuda:{index}" for index in range(devices)]
    rates = []
    for device in map(torch.device, names):
        size, dtype = SIZE[device.type], DTYPE[device.type]
        matrix = torch.ones((size, size), dtype=dtype, device=device) / size
        multiply(matrix, 1)  # the first one loads kernels
        began, count, times = time.perf_counter(), 0, 1
        while (took := time.perf_counter() - began) < seconds:
            multiply(matrix, times)
            count, times = count + times, min(MAX_MATMULS, 2 * times)
        rates.append(count / took)
    return min(rates)


def multiply(matrix: Tensor, times: int) -> None:
    for _ in range(times):
        _result = matrix @ matrix
    if matrix.is_cuda:
        torch.cuda.synchronize(matrix.device)
