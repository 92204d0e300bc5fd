"""Chooses the next tokens of many sequences at once, and keeps them on the device for the next step."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trimaran.core import DEVICE_TRAITS
from trimaran.serve.engine.engine_request import TokenConstraint, TopTokens
from trimaran.train import FEW_TOKENS, Sampling

NOT_A_TOKEN = -1  # where the logits are NaN
DRAWS = 64  # made at once: a call of the generator costs as much as many draws
MAX_LAUNCHED = 1024  # sequences of a step


class TokenChooser:
    """How one request's tokens are chosen. Draw k depends on its seed and k only, and is that of `TokenSampler`."""

    def __init__(self, sampling: Sampling, constraint: TokenConstraint | None = None, *, num_drawn: int = 0) -> None:
        """`num_drawn` tokens were chosen already: their draws are skipped."""
        self.sampling, self.constraint = sampling, constraint
        self._draws: list[float] = []
        self._generator = torch.Generator().manual_seed(sampling.seed) if sampling.temperature else None
        if self._generator is not None and num_drawn:
            torch.rand(num_drawn, dtype=torch.float64, generator=self._generator)

    def draw(self) -> float:
        if not self._draws:
            draws = torch.rand(DRAWS, dtype=torch.float64, generator=self._generator)
            self._draws = draws.flip(0).tolist()
        return self._draws.pop()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of a token, and the likeliest tokens with theirs."""

    logprob: float
    top: TopTokens


def choose_tokens(logits: Tensor, choosers: Sequence[TokenChooser], *, excluded: int | None = None) -> list[int]:
    """Return the next token of each sequence, given logits fp32 [sequences, vocabulary]; NOT_A_TOKEN for NaN.

    Everything happens on the device of the logits, and only the chosen ids are copied to the host.
    """
    return choose_on_device(logits, choosers, excluded=excluded).tolist()


def choose_on_device(logits: Tensor, choosers: Sequence[TokenChooser], *, excluded: int | None = None) -> Tensor:
    """Return the next token of each sequence, i64 [sequences], on the device of the logits; see `choose_tokens`.

    `excluded` is a token that no sequence may choose. Only a request with top-p and no top-k waits for the device.
    """
    constrained = [row for row, chooser in enumerate(choosers) if chooser.constraint is not None]
    if excluded is not None or constrained:
        logits = logits.clone()
    if excluded is not None:
        logits[:, excluded] = float("-inf")
    if constrained:
        masks = np.stack([each.constraint.allowed() for each in choosers if each.constraint is not None])
        index = moved(np.array(constrained), logits.device)
        logits[index] = logits[index].masked_fill(~moved(masks, logits.device), float("-inf"))
    chosen = likeliest_tokens(logits)
    by_rule: dict[int, list[int]] = {}
    for row, chooser in enumerate(choosers):
        sampling = chooser.sampling
        if sampling.temperature:
            few = min(sampling.top_k or FEW_TOKENS, logits.shape[1])
            by_rule.setdefault(few if sampling.top_k else -few if sampling.top_p < 1 else 0, []).append(row)
    for count, rows in by_rule.items():
        is_all = len(rows) == len(choosers)
        index = None if is_all else moved(np.array(rows), logits.device)
        of_rows = logits if index is None else logits[index]
        drawn = _draw_tokens(of_rows, [choosers[row] for row in rows], count)
        drawn = drawn.masked_fill(of_rows.amax(-1).isnan(), NOT_A_TOKEN)
        chosen = drawn if index is None else chosen.index_copy(0, index, drawn)
    return chosen


def likeliest_tokens(logits: Tensor) -> Tensor:
    """Return the likeliest token of each row, i64 [rows]; NOT_A_TOKEN where one of its logits is NaN."""
    likeliest, chosen = logits.max(dim=-1)
    return chosen.masked_fill(likeliest.isnan(), NOT_A_TOKEN)


def moved(array: np.ndarray, device: torch.device) -> Tensor:
    """Return an array as a tensor on `device`. The host does not wait for the copy to a GPU."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if DEVICE_TRAITS[device.type].has_own_memory else tensor


def logprobs_of(logits: Tensor, tokens: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Return the log-probabilities of one token in each row of logits [rows, vocabulary], and of its likeliest ones."""
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    most = min(max(num_top, default=0), logits.shape[1])
    values, ids = (each.tolist() for each in logprobs.topk(most)) if most else ([[]] * len(chosen),) * 2
    return [
        TokenLogprobs(own, tuple(zip(row_ids[:number], row_values[:number], strict=True)))
        for own, row_ids, row_values, number in zip(chosen, ids, values, num_top, strict=True)
    ]


def _draw_tokens(logits: Tensor, choosers: Sequence[TokenChooser], num_candidates: int) -> Tensor:
    """Return one drawn id for each row; see `TokenSampler`. All rows have the same number of candidates.

    These are the likeliest tokens; 0 for all. A negative number is that of a row without top-k.
    """
    rules = np.array([(each.sampling.temperature, each.sampling.top_p, each.draw()) for each in choosers])
    temperatures, top_p, draws = moved(rules, logits.device).t().unsqueeze(-1)
    # In fp64, so that a temperature close to 0 has no NaN: it is the likeliest token.
    scaled = (logits.double() - logits.amax(-1, keepdim=True)) / temperatures
    kept, ids, last = torch.softmax(scaled, dim=-1), None, logits.shape[1] - 1
    if num_candidates:
        probabilities = kept
        kept, ids = probabilities.topk(abs(num_candidates))
        whole: Tensor | float = kept.sum(-1, keepdim=True) if num_candidates > 0 else 1.0
        if num_candidates < 0 and bool((kept.sum(-1, keepdim=True) < top_p).any()):  # rare: a sort is slow
            kept, ids = probabilities.sort(descending=True)
        before = kept.cumsum(-1) - kept
        counts = (before < top_p * whole).sum(-1, keepdim=True).clamp(min=1)
        kept = kept * (torch.arange(kept.shape[1], device=kept.device) < counts)
        last = counts - 1
    sums = kept.cumsum(-1)
    index = torch.searchsorted(sums, draws * sums[:, -1:], right=True)
    index = torch.minimum(index, torch.as_tensor(last, device=index.device))
    return (index if ids is None else ids.gather(1, index)).squeeze(1)


class PendingTokens:
    """The tokens of a step that may still be computed, by the number of the sequence in its batch."""

    def __init__(self, host: Tensor, copied: torch.cuda.Event | None) -> None:
        self._host, self._copied = host, copied

    def read(self) -> list[int]:
        """Wait for the step, and return its tokens; NOT_A_TOKEN for NaN. Sequences that chose none have any number."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.tolist()


class ChosenTokens:
    """The tokens that the last step of a runner has chosen: `tokens`, i64 [MAX_LAUNCHED], always the same memory."""

    def __init__(self, device: torch.device) -> None:
        self.tokens = torch.zeros(MAX_LAUNCHED, dtype=torch.int64, device=device)
        self._is_gpu = DEVICE_TRAITS[device.type].has_own_memory
        # Two: that of a step is written before that of the step before is read.
        self._host = [torch.zeros(MAX_LAUNCHED, dtype=torch.int64, pin_memory=self._is_gpu) for _ in range(2)]
        self._steps = 0

    def put(self, found: Tensor, sequences: np.ndarray, num_sequences: int) -> None:
        """Take the tokens of these sequences of a step; the others keep what they have."""
        if len(sequences) == num_sequences:
            self.tokens[:num_sequences].copy_(found)
        elif len(sequences):
            self.tokens.index_copy_(0, moved(sequences, self.tokens.device), found)

    def to_host(self, count: int) -> PendingTokens:
        """Copy the first tokens to the host, without waiting for them."""
        host = self._host[self._steps % 2][:count]
        self._steps += 1
        host.copy_(self.tokens[:count], non_blocking=True)
        copied = torch.cuda.Event() if self._is_gpu else None
        if copied is not None:
            copied.record()
        return PendingTokens(host, copied)


def chosen_or_given(given: Tensor, chosen: Tensor) -> Tensor:
    """Return tokens in which -1 - s is replaced by `chosen[s]`; by 0 where that is NaN's, whose answer has ended."""
    of_last = chosen[(-1 - given).clamp(min=0)]
    return torch.where(given < 0, of_last, given).clamp(min=0)
