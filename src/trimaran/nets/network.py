"""What the trainer sees of a network, whoever wrote it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from trimaran.models import ModelSpec, spec_to_hf
from trimaran.nets.decoder import Decoder
from trimaran.nets.hf_weights import hf_tensors


@dataclass(frozen=True, slots=True)
class Network:
    """A module with what the trainer must know of it. `blocks` are sharded, compiled and recomputed one by one."""

    module: nn.Module
    blocks: tuple[nn.Module, ...]
    spec: ModelSpec | None

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return logits [B, T, vocab] and the balance loss, an fp32 scalar; see `Decoder.forward`."""
        return self.module(tokens, documents)

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


def decoder_network(spec: ModelSpec) -> Network:
    """Return our own decoder of that shape, on the current default device, its weights not yet set."""
    module = Decoder(spec)
    return Network(module, tuple(module.layers), spec)
