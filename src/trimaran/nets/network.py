"""What the trainer sees of a network, whoever wrote it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from trimaran.models import ModelSpec, Spec, spec_to_hf
from trimaran.nets.attention_context import Context
from trimaran.nets.decoder import Decoder
from trimaran.nets.hf_weights import hf_tensors, load_hf_weights
from trimaran.nets.tp_plan import tensor_plan
from trimaran.nets.varlen_attention import run_lengths


@dataclass(frozen=True, slots=True)
class Network:
    """A module with what the trainer must know of it. `blocks` are sharded, compiled and recomputed one by one."""

    module: nn.Module
    blocks: tuple[nn.Module, ...]
    spec: Spec | None

    def forward(self, inputs: Mapping[str, Tensor], *stream: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the network, or a stage of it, makes of one micro-batch, and the balance loss, an fp32 scalar.

        Sequences go in whole under every plan. Out come the logits [B, T, vocab] of this rank's positions, a DTensor
        where tensor parallelism has split the vocabulary; a stage but the last returns its stream instead, and a later
        one than the first takes the stream that came. `inputs` may have more than the network asks for.
        """
        known = {"lengths": run_lengths(inputs["host_documents"])} if "host_documents" in inputs else {}
        return self.module(*stream, tokens=inputs["tokens"], documents=inputs.get("documents"), **known)

    @property
    def towers(self) -> Mapping[str, str]:
        """The parts that can be trained differently: the prefix of its parameters' names, by the name of each tower."""
        return {"language": ""}

    def stream_shape(self, inputs: Mapping[str, Tensor], *, tp: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of what comes into this stage of a pipeline and of what leaves it, for one micro-batch."""
        assert self.spec is not None, "only our own networks are cut into stages"
        tokens = inputs["tokens"]
        shape = (len(tokens), self.context.mine(tokens).shape[1] // tp, self.spec.hidden)
        return shape, shape

    @property
    def context(self) -> Context:
        """Which positions of each sequence are this rank's."""
        return self.module.context  # pyrefly: ignore[bad-return]

    def use_context(self, context: Context) -> None:
        """Hold a part of each sequence from now on."""
        self.module.use_context(context)  # pyrefly: ignore[not-callable]

    def tensor_plan(self, degree: int) -> Mapping[str, str]:
        """Return how tensor parallelism of that degree splits the modules: a style of `parallel.axes.tp` by pattern."""
        return tensor_plan(self._decoder)

    @property
    def fringe(self) -> tuple[nn.Module, ...]:
        """Modules outside of the blocks that are compiled as well: of many small steps, each of which costs a pass."""
        return ()

    @property
    def head(self) -> nn.Module | None:
        """The module whose product is the logits, as they leave the network; None where there is none such."""
        return self.module.lm_head  # pyrefly: ignore[bad-return]

    @property
    def vocabulary(self) -> int:
        """How many token ids the network knows."""
        return self._decoder.vocab

    @property
    def longest(self) -> int:
        """How many positions a sequence may have."""
        return self._decoder.max_seq_len

    def disk_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight whole, on the CPU, under its Hugging Face name. Every rank must take every item."""
        return hf_tensors(self.module, self._decoder)

    def disk_config(self) -> dict[str, Any]:
        """Return the config.json that belongs to `disk_tensors`."""
        return spec_to_hf(self._decoder)

    def load(self, folder: Path) -> None:
        """Fill the module in place from the safetensors in `folder`; each rank reads what it holds."""
        load_hf_weights(self.module, folder)

    @property
    def _decoder(self) -> ModelSpec:
        assert isinstance(self.spec, ModelSpec), "a network that is not our decoder has these from elsewhere"
        return self.spec


def decoder_network(spec: ModelSpec, layers: range | None = None) -> Network:
    """Return our own decoder, or the stage of it with these layers, on the default device, its weights not yet set."""
    module = Decoder(spec, layers)
    return Network(module, module.blocks, spec)
