"""Measured rates of the ranks of this CPU, and their file in the user's cache."""

import json
import logging
import math
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from trimaran.core import read_regular_bytes, write_atomically

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 1 << 14
MAX_RATE = 1e9


class CpuRates(NamedTuple):
    """Rates of one rank while all ranks run, in the units of the cost model; `probe/measure_cpu.py` finds them."""

    matmul_gflops: float
    extra_rows: float  # rows that a matmul could compute while it rearranges its weight
    attention_gflops: float
    attention_backward_gflops: float
    elementwise_gb_per_second: float
    update_gb_per_second: float
    layer_us: float  # overhead of a block's operators, forward and backward
    scatter: float  # half of the distance between the quartiles of the measurements, relative to their median
    all_reduce_us: float = 0.0  # of gloo; 0 with one rank
    all_reduce_gb_per_second: float = 0.0


def cpu_rates_path(folder: Path, machine: str, *, ranks: int, threads: int) -> Path:
    """Return the file of the rates of `ranks` ranks. Another version of torch has other kernels, so another file."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "none"
    return folder / f"{machine}-{ranks}x{threads}-torch-{torch}.json"


def read_cpu_rates(path: Path) -> CpuRates | None:
    """Return the rates in the file; None if there is none. An unusable file is a warning, not an error."""
    try:
        raw = read_regular_bytes(path, follow_links=True, limit_bytes=MAX_FILE_BYTES + 1)
        return parse_cpu_rates(json.loads(raw))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("the measured rates in %s are ignored: %s", path, error)
        return None


def parse_cpu_rates(tree: object) -> CpuRates:
    """Return the rates; raise ValueError unless each is a number in its range."""
    if not isinstance(tree, Mapping) or not tree.keys() <= set(CpuRates._fields):
        raise ValueError("these are not the rates of a CPU")
    may_be_zero = {"extra_rows", "scatter", *CpuRates._field_defaults}
    for name, value in tree.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not (0 if name in may_be_zero else 1e-9) <= value <= MAX_RATE:
            raise ValueError(f"{name} is not a rate")
    try:
        return CpuRates(**{str(name): float(value) for name, value in tree.items()})
    except TypeError:
        raise ValueError("a rate is missing") from None


def write_cpu_rates(path: Path, rates: CpuRates) -> None:
    """Write the file atomically: a planner that reads it meanwhile gets the old or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(rates._asdict(), indent=2) + "\n", mode=0o644)
