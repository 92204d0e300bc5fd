"""How fast this machine is, in a few hundredths of a second: a first guess, not a benchmark."""

import functools
import time

from trimaran.core import Flops

WIDTH = 64
PRODUCTS = 256
TRIES = 24


def cpu_flops(threads: int = 1) -> Flops:
    """Return the float32 rate of `threads` cores in a matrix product, as if they did not slow each other down."""
    return Flops(_core_flops() * threads)


@functools.cache
def _core_flops() -> float:
    """Return one core's rate, whatever number of threads NumPy's BLAS would like to use.

    Threads cannot be counted or limited from here without the environment. But OpenBLAS keeps a product of up to
    2**18 multiplications on one thread, and a stack of 64 x 64 products runs at 0.9 or more of a large one's rate.
    The best of several tries is the one that nobody interrupted.
    """
    import numpy as np  # noqa: PLC0415  (a tenth of a second that only a CPU run has to pay)

    left = np.full((PRODUCTS, WIDTH, WIDTH), 0.5, dtype=np.float32)
    right, out = left[0].copy(), np.empty_like(left)
    best = float("inf")
    for _ in range(TRIES):
        start = time.perf_counter()
        np.matmul(left, right, out=out)
        best = min(best, time.perf_counter() - start)
    return 2.0 * WIDTH**3 * PRODUCTS / best
