"""The tokens that a step has chosen, kept on the device: the next step starts before the host has read them."""

import numpy as np
import torch
from torch import Tensor

from trimaran.core.traits import DEVICE_TRAITS
from trimaran.serve.engine.engine_batch import EngineBatch
from trimaran.serve.engine.token_choice import moved

MAX_LAUNCHED = 1024  # sequences of a step


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

    def filled_in(self, tokens: Tensor, batch: EngineBatch) -> Tensor:
        """Return the tokens of a batch, on the device, with those that the last step has chosen."""
        return chosen_or_given(tokens, self.tokens) if batch.tokens.min() < 0 else tokens

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
