"""Text generation from a trained network."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from trimaran.core import ModelSection, UserError
from trimaran.core.parse_text import TextError, load_json
from trimaran.core.regular_files import read_regular_bytes
from trimaran.data.text.tokenizer import Tokenizer, open_tokenizer
from trimaran.models import weight_files
from trimaran.nets import Network, open_network
from trimaran.train.generation.next_token import NextTokenModel
from trimaran.train.generation.sampling import TokenSampler

TOKENIZER = "trimaran-tokenizer.json"


def open_saved_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer that `save_tokenizer` wrote to the folder of a trained model."""
    file = folder / TOKENIZER
    fix = "train the run again, or export a checkpoint of it: `trimaran export RUN`"
    try:
        description = load_json(read_regular_bytes(file))
    except OSError as error:
        raise UserError("T011", f"the tokenizer cannot be read: {error.strerror}", where=str(file), fix=fix) from None
    except TextError as error:
        raise UserError("T011", f"the tokenizer's description is not JSON: {error.what}", where=str(file), fix=fix
                        ) from None  # fmt: skip
    if not isinstance(description, dict):
        raise UserError("T011", "the tokenizer's description has no fields", where=str(file), fix=fix)
    return open_tokenizer(description, folder)


def first_device() -> torch.device:
    """Return this machine's first device."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_trained(section: ModelSection, folder: Path, device: torch.device | None = None) -> Network:
    """Return the unsharded network of the weights in `folder`, on `device`; by default this machine's first one."""
    device = device or first_device()
    if section.kind.is_hf and not weight_files(folder):  # they would be random
        raise UserError("M020", "the folder holds no weights", where=str(folder),
                        fix="name a folder with safetensors")  # fmt: skip
    if section.kind.is_plugin:  # its code alone knows the network of a shape
        own = section.model_copy(update={"path": str(folder)})
    else:
        own = ModelSection(family=section.family, path=str(folder), trust_remote_code=section.trust_remote_code)
    network = unfilled_network(own, device)
    if not section.kind.is_hf:
        network.load(folder)
    return network


def unfilled_network(section: ModelSection, device: torch.device) -> Network:
    """Return the unsharded network of `section` on `device`. Weights of ours are undefined, those of hf as on disk.

    Layers that predict later tokens are left out: only training needs them.
    """
    network, fill = open_network(section.model_copy(update={"multi_token_prediction": None}))
    fill(device)
    return network


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Return the token ids of `prompt`; the end-of-document token if it is empty."""
    return [*tokenizer.begin_ids, *tokenizer.encode(prompt).tolist()] or [tokenizer.end_id]


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
        """The tokens generated so far."""
        return self.ids[self.num_prompt_ids :]

    @torch.no_grad()
    def _logits(self) -> Tensor:
        has_compiler = "torch._dynamo" in sys.modules  # importing it takes a second, and nothing is compiled without it
        with torch.compiler.set_stance("force_eager") if has_compiler else nullcontext():  # every length is a new shape
            return self._model.logits(torch.tensor(self.ids[-self._model.max_length :]))
