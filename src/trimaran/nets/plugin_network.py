"""The `Network` of a plug-in's family. Its weights on disk have the names of its parameters."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trimaran.core import ModelSection
from trimaran.models import FamilyModule, build_family
from trimaran.nets.decoder.attention_context import Context
from trimaran.nets.hf_weights import load_named_weights
from trimaran.nets.local_shards import ReadTensor, full_tensor
from trimaran.nets.network import Network

MODEL_TYPE = "trimaran_plugin"


@dataclass(frozen=True, slots=True)
class PluginNetwork(Network):
    """See `Network`. It has no cache, no balance loss and no parts that other axes than data parallelism split."""

    built: FamilyModule
    section: ModelSection

    def forward(self, inputs: Mapping[str, Tensor], *stream: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits [B, T, vocabulary], and a balance loss of 0."""
        documents = {"documents": inputs.get("documents")} if self.built.takes_documents else {}
        logits = self.module(inputs["tokens"], **documents)
        return logits, torch.zeros((), device=logits.device)

    @property
    def may_leave_out_parameters(self) -> bool:
        return True

    def has_cache(self, device: torch.device) -> bool:
        return False

    def paged_difference(self, device: torch.device) -> str:
        return "is a plug-in's, which has no key-value cache"

    @property
    def context(self) -> Context:
        return Context()

    def use_context(self, context: Context) -> None:
        raise AssertionError("a legal plan does not split the sequences of a plug-in's family")

    @property
    def head(self) -> nn.Module | None:
        return None

    @property
    def vocabulary(self) -> int:
        return self.built.vocabulary

    @property
    def max_seq_len(self) -> int:
        return self.built.max_seq_len

    def disk_tensors(self, read: ReadTensor = full_tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight unsharded, on the CPU, under its parameter name. Every rank must take every item."""
        return ((name, read(each)) for name, each in self.module.named_parameters())

    def disk_config(self) -> dict[str, Any]:
        named = {"family": self.section.family, "preset": self.section.preset, "shape": self.section.shape}
        return {"model_type": MODEL_TYPE, **named, "vocab_size": self.vocabulary}

    def load(self, folder: Path, report_progress: Callable[[], None] = lambda: None) -> None:
        """Fill the module in place from the safetensors in `folder`. Each rank reads only its shards."""
        fix = "use the model.preset and model.shape that belong to the weights"
        load_named_weights(self.module, folder, self._mismatches, report_progress, fix=fix)

    def _mismatches(self, sources: Mapping[str, Any]) -> list[str]:
        shapes = {name: list(each.shape) for name, each in self.module.named_parameters()}
        found = {name: list(each.get_slice(name).get_shape()) for name, each in sources.items()}
        return sorted(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name))


def plugin_network(section: ModelSection) -> PluginNetwork:
    """Return the network of a plug-in's family on the default device, uninitialised."""
    built = build_family(section)
    return PluginNetwork(built.module, tuple(built.blocks), None, built, section)
