"""Rotary positions, and the ways in which families scale them to longer sequences."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """YaRN's own settings. `attention_factor` scales cosines and sines; 0 computes it from the factor.

    `mscale` and `mscale_all_dim` are DeepSeek's two terms of that factor; 0 is none.
    """

    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRope:
    """Phi-3's divisors of each frequency, for sequences up to the original length and for longer ones.

    `attention_factor` scales cosines and sines; 0 computes it from the factor.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    attention_factor: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary positions. `factor` above 1 scales the frequencies in the way of `scaling`, by default as in Llama 3.1.

    `rotary_dim` are the first features of each head that are rotated; 0 is all of them. `interleaved`: a pair are
    neighbouring features, not one of the first half and one of the second.
    """

    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192
    scaling: Literal["llama3", "linear", "yarn", "longrope"] = "llama3"
    rotary_dim: int = 0
    interleaved: bool = False
    yarn: Yarn | None = None
    longrope: LongRope | None = None

    @property
    def is_plain(self) -> bool:
        """Whether every feature of a head is rotated with one of the other half, as the fast kernels do it."""
        return not self.rotary_dim and not self.interleaved


PLAIN_ROPE = Rope()
