"""What the trainer sees of a network, whoever wrote it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from trimaran.models import ModelSpec, spec_to_hf
from trimaran.nets.context import Context
from trimaran.nets.decoder import Decoder
from trimaran.nets.hf_weights import hf_tensors
from trimaran.nets.tensor_plan import tensor_plan


@dataclass(frozen=True, slots=True)
class Network:
    """A module with what the trainer must know of it. `blocks` are sharded, compiled and recomputed one by one."""

    module: nn.Module
    blocks: tuple[nn.Module, ...]
    spec: ModelSpec | None

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return logits [B, T, vocab] and the balance loss, an fp32 scalar; see `Decoder.forward`.

        Sequences go in whole under every plan. Out come the logits of this rank's positions, a DTensor where tensor
        parallelism has split the vocabulary.
        """
        return self.module(tokens=tokens, documents=documents)

    @property
    def context(self) -> Context:
        """Which positions of each sequence are this rank's."""
        return self.module.context  # pyrefly: ignore[bad-return]

    def use_context(self, context: Context) -> None:
        """Hold a part of each sequence from now on."""
        self.module.use_context(context)  # pyrefly: ignore[not-callable]

    def tensor_plan(self, degree: int) -> Mapping[str, str]:
        """Return how tensor parallelism of that degree splits the modules: a style of `parallel.axes.tp` by pattern."""
        assert self.spec is not None, "our own decoder always has a spec"
        return tensor_plan(self.spec)

    @property
    def vocabulary(self) -> int:
        """How many token ids the network knows."""
        assert self.spec is not None, "our own decoder always has a spec"
        return self.spec.vocab

    @property
    def longest(self) -> int:
        """How many positions a sequence may have."""
        assert self.spec is not None, "our own decoder always has a spec"
        return self.spec.max_seq_len

    def disk_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight whole, on the CPU, under its Hugging Face name. Every rank must take every item."""
        assert self.spec is not None, "our own decoder always has a spec"
        return hf_tensors(self.module, self.spec)

    def disk_config(self) -> dict[str, Any]:
        """Return the config.json that belongs to `disk_tensors`."""
        assert self.spec is not None, "our own decoder always has a spec"
        return spec_to_hf(self.spec)


def decoder_network(spec: ModelSpec, layers: range | None = None) -> Network:
    """Return our own decoder, or the stage of it with these layers, on the default device, its weights not yet set."""
    module = Decoder(spec, layers)
    return Network(module, module.blocks, spec)
