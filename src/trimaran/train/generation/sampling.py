"""Which token follows: from logits to an id, reproducible from a seed."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trimaran.core import UserError

FEW_TOKENS = 1024  # top-p seldom keeps more


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a token is chosen. Temperature 0 takes the likeliest. `top_k` 0 and `top_p` 1 leave no token out.

    `top_k` keeps the likeliest tokens; `top_p` keeps the fewest of them whose probabilities sum to at least that.
    """

    temperature: float = 0.9
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


class TokenSampler:
    """Chooses one token after another, with a CPU generator: every rank and every device chooses the same one."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator = torch.Generator().manual_seed(sampling.seed)

    def next_token(self, logits: Tensor) -> int:
        """Return one id, given logits [vocabulary] on the CPU."""
        if torch.isnan(logits).any():
            raise UserError("M022", "the network computes NaN instead of a next token", where="the trained weights",
                            fix="the run has diverged or the weights are damaged: generate from another checkpoint, "
                            "see `trimaran generate RUN --step N`")  # fmt: skip
        if not self._sampling.temperature:
            return int(logits.argmax())
        # In fp64, so that a temperature close to 0 has no NaN: it is the likeliest token.
        scaled = (logits.double() - logits.max()) / self._sampling.temperature
        probabilities, ids = self._kept(torch.softmax(scaled, dim=-1))
        sums = probabilities.cumsum(-1)
        drawn = torch.rand((), dtype=torch.float64, generator=self._generator) * sums[-1]
        index = int(torch.searchsorted(sums, drawn, right=True).clamp(max=len(sums) - 1))
        return index if ids is None else int(ids[index])

    def _kept(self, probabilities: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the probabilities that `top_k` and then `top_p` keep, and their ids; None if they are all."""
        top_k, top_p = self._sampling.top_k, self._sampling.top_p
        if not top_k and top_p >= 1:
            return probabilities, None
        count = min(top_k or FEW_TOKENS, len(probabilities))
        kept, ids = probabilities.topk(count)
        if not top_k and kept.sum() < top_p:  # rare: a sort of the whole vocabulary is slow
            kept, ids = probabilities.sort(descending=True)
        before = kept.cumsum(-1) - kept
        whole = kept.sum() if top_k else 1.0
        count = max(1, int((before < top_p * whole).sum()))
        return kept[:count], ids[:count]
