"""The frequencies of rotary positions, and how each way of scaling changes them."""

import math

import torch
from torch import Tensor

from trimaran.models.layer_variations import Rope, Yarn


def frequencies(rope: Rope, head_dim: int, device: torch.device, *, long: bool = False) -> Tensor:
    """Return one fp32 frequency for each pair of rotated features. `long`: LongRoPE's, of sequences beyond training."""
    width = rope.rotary_dim or head_dim
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    plain = 1.0 / rope.theta**exponents
    if rope.longrope is not None:
        factors = rope.longrope.long_factors if long else rope.longrope.short_factors
        return plain / torch.tensor(factors, dtype=torch.float32, device=device)
    if rope.factor == 1:
        return plain
    match rope.scaling:
        case "linear":
            return plain / rope.factor
        case "yarn":
            return _yarn(plain, rope, width)
        case _:
            return _llama3(plain, rope)


def rotation_scale(rope: Rope) -> float:
    """Return what cosines and sines are multiplied by."""
    if rope.longrope is not None:
        if rope.longrope.attention_factor or rope.factor <= 1:
            return rope.longrope.attention_factor or 1.0
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_seq_len))
    if rope.scaling != "yarn" or rope.factor == 1:
        return 1.0
    yarn = rope.yarn or Yarn()
    if yarn.attention_factor:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return yarn_scale(rope.factor, yarn.mscale) / yarn_scale(rope.factor, yarn.mscale_all_dim)
    return yarn_scale(rope.factor)


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's scale of attention for positions that are stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(plain: Tensor, rope: Rope) -> Tensor:
    # Wavelengths much shorter than the original context stay, longer ones are scaled by `factor`, and those in between
    # are interpolated.
    turns = rope.original_max_seq_len * plain / (2 * math.pi)
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return plain * (kept + (1 - kept) / rope.factor)


def _yarn(plain: Tensor, rope: Rope, width: int) -> Tensor:
    """Return the frequencies of YaRN: fast ones stay, slow ones are divided by the factor, with a ramp in between."""
    yarn = rope.yarn or Yarn()

    def pair_with(turns: float) -> float:
        return width * math.log(rope.original_max_seq_len / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with(yarn.beta_fast), pair_with(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high = high + 0.001 if low == high else high
    pairs = torch.arange(width // 2, dtype=torch.float32, device=plain.device)
    slow = ((pairs - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * slow + plain * (1 - slow)
