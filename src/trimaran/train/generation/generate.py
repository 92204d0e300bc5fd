"""Text generation from a trained network: logits of the next token, its choice, and the sequence."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from trimaran.core import ModelSection, TextError, UserError, load_json, read_regular_bytes
from trimaran.data import Tokenizer, grid_positions, open_tokenizer
from trimaran.models import weight_files
from trimaran.nets import Network, open_network

FEW_TOKENS = 1024  # top-p seldom keeps more


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a token is chosen: temperature 0 takes the likeliest, `top_k` 0 and `top_p` 1 leave none out.

    `top_p` keeps the fewest of the likeliest whose probabilities sum to it.
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
            raise UserError("M022.network-computes-nan", where="the trained weights")
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


@dataclass(frozen=True, slots=True)
class NextTokenModel:
    """Computes the logits [vocabulary], fp32 on the CPU, of the token that follows at most `max_length` ids (CPU)."""

    logits: Callable[[Tensor], Tensor]
    max_length: int


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image of a sequence: its patches u8 [P, values], and the grids [parts, 2] of rows and columns of patches.

    `first` is the index of its first token; `merge` x `merge` patches are one token.
    """

    patches: np.ndarray
    grids: np.ndarray
    first: int
    merge: int

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """The first token, and the rows and columns of tokens, of each part."""
        sizes = (self.grids // self.merge).tolist()
        starts = accumulate((rows * columns for rows, columns in sizes), initial=self.first)
        return [(start, rows, columns) for start, (rows, columns) in zip(starts, sizes, strict=False)]

    @property
    def stop(self) -> int:
        return self.first + len(self.patches) // self.merge**2


class CachedLogits:
    """Computes logits after a sequence, running only what differs from the last one.

    `images` are those of all sequences, in order. With `has_grid` positions are time, row and column (Qwen2-VL).
    """

    def __init__(self, network: Network, device: torch.device, *, has_grid: bool = False) -> None:
        self._network, self._device, self._has_grid = network, device, has_grid
        self._cache = network.new_cache()
        self._ids = torch.empty(0, dtype=torch.long)
        self.images: list[PlacedImage] = []

    def __call__(self, ids: Tensor) -> Tensor:
        """Return the logits of the token after `ids` [length]."""
        # The cache keeps the tokens that are the same: not all of `ids`, and no part of an image.
        most = min(len(self._ids), len(ids) - 1)
        differs = (self._ids[:most] != ids[:most]).nonzero()
        same = int(differs[0]) if len(differs) else most
        unchanged = min([same, *(each.first for each in self.images if each.first < same < each.stop)])
        is_longer = self._cache.length <= self._network.long_after < len(ids)  # from now on angles are others
        self._cache.truncate(0 if is_longer else unchanged)
        start = self._cache.length
        inputs = {"tokens": ids[None, start:]}
        images = [each for each in self.images if each.stop <= len(ids)]
        if self._has_grid:
            spans = [span for each in images for span in each.spans]
            inputs["positions"] = torch.from_numpy(grid_positions(len(ids), spans)[:, None, start:])
        if new := [each for each in images if each.first >= start]:
            inputs["patches"] = torch.from_numpy(np.concatenate([each.patches for each in new]))
            inputs["grids"] = torch.from_numpy(np.concatenate([each.grids for each in new]))
        inputs = {name: each.to(self._device) for name, each in inputs.items()}
        self._ids = ids[:0]  # if this fails, nothing is known of the cache
        logits = self._network.extend(self._cache, inputs)[0, 0].float().cpu()
        self._ids = ids.clone()
        return logits


def whole_sequence_logits(network: Network, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return a function that runs the whole sequence through a network whose architecture has no usable cache."""
    return lambda ids: network.forward({"tokens": ids[None].to(device)})[0][0, -1].float().cpu()


TOKENIZER = "trimaran-tokenizer.json"


def open_saved_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer that `save_tokenizer` wrote to the folder of a trained model."""
    file = folder / TOKENIZER
    try:
        description = load_json(read_regular_bytes(file))
    except OSError as error:
        raise UserError("T011.tokenizer-cannot-read-train", where=str(file), reason=error.strerror) from None
    except TextError as error:
        raise UserError("T011.tokenizer-description-not-json", where=str(file), error=error.what) from None
    if not isinstance(description, dict):
        raise UserError("T011.tokenizer-description", where=str(file))
    return open_tokenizer(description, folder)


def first_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_trained(section: ModelSection, folder: Path, device: torch.device | None = None) -> Network:
    """Return the unsharded network of the weights in `folder`, on `device`; by default this machine's first one."""
    device = device or first_device()
    if section.kind.is_hf and not weight_files(folder):  # they would be random
        raise UserError("M020.folder-holds-no-weights", where=str(folder))
    if section.kind.is_plugin:  # its code alone knows the network of a shape
        own = section.model_copy(update={"path": str(folder)})
    else:
        own = ModelSection(family=section.family, path=str(folder), trust_remote_code=section.trust_remote_code)
    network = unfilled_network(own, device)
    if not section.kind.is_hf:
        network.load(folder)
    return network


def unfilled_network(section: ModelSection, device: torch.device) -> Network:
    """Return the unsharded network of `section`, without layers for later tokens. Our weights are undefined."""
    network, fill = open_network(section.model_copy(update={"multi_token_prediction": None}))
    fill(device)
    return network


def save_tokenizer(tokenizer: Tokenizer | None, folder: Path) -> None:
    """Write the tokenizer, if there is one, beside the weights, so that the folder is enough to generate text."""
    if tokenizer is None:
        return
    tokenizer.save(folder)
    (folder / TOKENIZER).write_text(json.dumps(tokenizer.describe()) + "\n", encoding="utf-8")


FinishReason = Literal["end", "length", "context", "stopped"]


class Generation:
    """The tokens that follow a prompt, one by one. Iterate over it once; then `finish_reason` says why it ended.

    `end`: the model generated one of `stop_ids`, which is not part of the text; `length`: after `max_tokens`;
    `context`: the next token would not fit in the model's positions; `stopped`: `allows_next` said no. It is called
    after each token but the last, and says whether to generate another, the same on every rank.
    """

    def __init__(
        self,
        model: NextTokenModel,
        prompt: Sequence[int],
        sampler: TokenSampler,
        *,
        max_tokens: int,
        allows_next: Callable[[], bool] = lambda: True,
    ) -> None:
        self._model, self._sampler, self._max_tokens = model, sampler, max_tokens
        self._allows_next = allows_next
        self.ids = list(prompt)
        self.num_prompt_ids = len(self.ids)
        self.stop_ids: frozenset[int] = frozenset()
        self.slides = True  # text that is longer than the model's positions loses its beginning
        self.finish_reason: FinishReason = "length"

    def __iter__(self) -> Iterator[int]:
        for number in range(self._max_tokens):
            if number and not self._allows_next():
                self.finish_reason = "stopped"
                return
            if not self.slides and len(self.ids) > self._model.max_length:
                self.finish_reason = "context"
                return
            token = self._sampler.next_token(self._logits())
            if token in self.stop_ids:
                self.finish_reason = "end"
                return
            self.ids.append(token)
            yield token

    @property
    def new_ids(self) -> list[int]:
        return self.ids[self.num_prompt_ids :]

    @torch.no_grad()
    def _logits(self) -> Tensor:
        has_compiler = "torch._dynamo" in sys.modules  # importing it takes a second, and nothing is compiled without it
        with torch.compiler.set_stance("force_eager") if has_compiler else nullcontext():  # every length is a new shape
            return self._model.logits(torch.tensor(self.ids[-self._model.max_length :]))
