"""Degrees that work, and how they are told."""

import math
from collections.abc import Iterable


def divisors(num: int, *, most: int) -> list[int]:
    """Return the divisors of `num` up to `most`, smallest first."""
    small = [each for each in range(1, min(math.isqrt(num), most) + 1) if num % each == 0]
    return small + [num // each for each in reversed(small) if each * each < num and num // each <= most]


def degrees(num: int, *, world_size: int) -> str:
    """Return the degrees that divide `num` and the world, as people say it."""
    return either(each for each in divisors(num, most=world_size) if world_size % each == 0)


def multiples_around(num: int, step: int) -> str:
    """Return the multiples of `step` nearest to `num`, as people say it: `8 or 12`."""
    below, above = num // step * step, -(-num // step) * step
    return either(dict.fromkeys(each for each in (below, above) if each))


def either(choices: Iterable[object]) -> str:
    """Return the choices as people say them, `1 or 2 or 4`; of many, the first four and the last."""
    words = [str(each) for each in choices]
    return " or ".join(words if len(words) <= 5 else [*words[:4], words[-1]])
