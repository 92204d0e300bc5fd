"""The order of samples: a pure function of (seed, global index), the same for every number of ranks and workers."""

import math

import numpy as np

ROUNDS = 4
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def position(seed: int, index: int, length: int) -> int:
    """Return the sample at global `index` when `length` samples are reshuffled each epoch."""
    return int(positions(seed, np.array([index]), length)[0])


def positions(seed: int, indices: np.ndarray, length: int) -> np.ndarray:
    """Return `position` of every index. Each epoch is a permutation of range(length), computed without a table.

    A Feistel network permutes the cells of the smallest near-square grid with at least `length` cells. An index that
    lands outside is permuted again until it is inside (cycle walking), which keeps the map a bijection.
    """
    assert length > 0
    epochs, places = np.divmod(indices.astype(np.uint64), np.uint64(length))
    keys = _mix(_mix(np.full_like(epochs, seed) + GOLDEN) + epochs)
    height = math.isqrt(length - 1) + 1
    width = -(-length // height)
    places = _feistel(places, keys, height, width)
    while (out_of_bounds := places >= length).any():
        places[out_of_bounds] = _feistel(places[out_of_bounds], keys[out_of_bounds], height, width)
    return places.astype(np.int64)


def _feistel(cells: np.ndarray, keys: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return the cells after ROUNDS rounds. A round shifts each column by a hash of its number, then each row."""
    rows, columns = np.divmod(cells, np.uint64(width))
    for _ in range(ROUNDS):
        keys = keys + GOLDEN
        rows = (rows + _mix(columns ^ keys) % np.uint64(height)) % np.uint64(height)
        keys = keys + GOLDEN
        columns = (columns + _mix(rows ^ keys) % np.uint64(width)) % np.uint64(width)
    return rows * np.uint64(width) + columns


def _mix(values: np.ndarray) -> np.ndarray:
    """Return splitmix64's finalizer of each value: every input bit affects every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
