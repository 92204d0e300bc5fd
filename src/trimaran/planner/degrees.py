"""Degrees that divide a number, and their text in messages."""

import math
from collections.abc import Iterable


def divisors(num: int, *, most: int) -> list[int]:
    """Return the divisors of `num` up to `most`, smallest first."""
    small = [each for each in range(1, min(math.isqrt(num), most) + 1) if num % each == 0]
    return small + [num // each for each in reversed(small) if each * each < num and num // each <= most]


def degrees(num: int, *, world_size: int) -> str:
    """Return the degrees that divide both `num` and the world size, as text."""
    return either(each for each in divisors(num, most=world_size) if world_size % each == 0)


def multiples_around(num: int, step: int) -> str:
    """Return the multiples of `step` nearest to `num`, as text: `8 or 12`."""
    below, above = num // step * step, -(-num // step) * step
    return either(dict.fromkeys(each for each in (below, above) if each))


def either(choices: Iterable[object]) -> str:
    """Return the choices as text, `1 or 2 or 4`; of many, the first four and the last."""
    texts = [str(each) for each in choices]
    return " or ".join(texts if len(texts) <= 5 else [*texts[:4], texts[-1]])
