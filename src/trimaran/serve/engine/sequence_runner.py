"""Runs models that cannot attend to pages: one sequence after another, each with its own cache."""

import sys
from typing import Any

import torch
from torch import Tensor

from trimaran.nets import Network
from trimaran.nets.decoder.key_value_cache import KeyValueCache
from trimaran.serve.engine.engine_batch import ALL, LAST, EngineBatch
from trimaran.serve.engine.model_runner import RunnerTraits, StepLogits


class _CachedSequence:
    """The tokens of one sequence. Those from `num_cached` on are not in its cache yet."""

    __slots__ = ("cache", "num_cached", "tokens")

    def __init__(self, cache: KeyValueCache | None) -> None:
        self.cache, self.num_cached = cache, 0
        self.tokens: list[int] = []


class SequenceRunner:
    """A runner for networks with recurrent layers or an attention of their own. Nothing is batched.

    Pages only limit how many tokens are in the caches: the caches themselves are those of the network. Without a usable
    one the whole sequence is computed for each token.
    """

    def __init__(
        self, network: Network, device: torch.device, dtype: torch.dtype, *, num_pages: int, page_size: int
    ) -> None:
        self.network, self.device, self.dtype = network, device, dtype
        self.num_pages, self.page_size = num_pages, page_size
        self.vocabulary, self.max_length = network.vocabulary, network.max_seq_len
        self.traits = RunnerTraits(reuses_prefixes=False, embeds=False)
        network.module.eval()
        self._has_cache = network.has_cache(device)
        self._long_after = min(network.long_after, _longrope_limit(network.module))
        self._sequences: dict[int, _CachedSequence] = {}

    def run(self, batch: EngineBatch) -> StepLogits:
        for number in batch.finished.tolist():
            self._sequences.pop(number, None)
        rows: list[Tensor] = []
        with torch.inference_mode(), torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            for index, (number, want) in enumerate(zip(batch.sequences.tolist(), batch.wants.tolist(), strict=True)):
                new = batch.tokens[batch.query_starts[index] : batch.query_starts[index + 1]].tolist()
                if number not in self._sequences:
                    self._sequences[number] = _CachedSequence(self.network.new_cache() if self._has_cache else None)
                sequence = self._sequences[number]
                sequence.tokens += new
                if want == LAST:
                    rows.append(self._last_logits(sequence))
                elif want == ALL:
                    rows.append(self._all_logits(sequence)[-len(new) :])
        empty = torch.empty(0, self.vocabulary, device=self.device)
        return StepLogits(torch.cat([empty, *(each.float() for each in rows)]))

    def _last_logits(self, sequence: _CachedSequence) -> Tensor:
        """Return the logits [1, vocabulary] after the last token."""
        if sequence.cache is None:
            return self._all_logits(sequence)[-1:]
        if sequence.num_cached <= self._long_after < len(sequence.tokens):  # its keys were rotated by other angles
            sequence.cache, sequence.num_cached = self.network.new_cache(), 0
        new = torch.tensor(sequence.tokens[sequence.num_cached :], device=self.device)
        sequence.num_cached = len(sequence.tokens)
        return self.network.extend(sequence.cache, {"tokens": new[None]})[0]

    def _all_logits(self, sequence: _CachedSequence) -> Tensor:
        """Return the logits [length, vocabulary] after every token, without the cache."""
        tokens = torch.tensor(sequence.tokens, device=self.device)
        return self.network.forward({"tokens": tokens[None]})[0][0]


def _longrope_limit(module: Any) -> int:
    """Return the length after which all positions of a sequence get other rotary frequencies; no length if none."""
    config = getattr(module, "config", None)
    parameters = {} if config is None else getattr(config.get_text_config(), "rope_parameters", None) or {}
    is_long = parameters.get("rope_type") == "longrope"
    return parameters["original_max_position_embeddings"] if is_long else sys.maxsize
