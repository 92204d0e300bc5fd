"""The `Network` of a Hugging Face vision-language model: Qwen2-VL, Qwen2.5-VL or LLaVA, unchanged."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trimaran.core import UserError
from trimaran.models import Spec, VlmSpec
from trimaran.models.vlm_config import vlm_from_disk
from trimaran.nets.decoder.key_value_cache import KeyValueCache
from trimaran.nets.hf.hf import HfNetwork, hf_network
from trimaran.nets.hf.hf_attention import takes_scope
from trimaran.nets.hf.hf_vision_adapter import VISION_ADAPTERS, VisionAdapter
from trimaran.nets.paged_cache import PagedExtension

try:
    from transformers import vision_utils
except ImportError:  # before transformers 5 a tower takes no image boundaries
    vision_utils = None


@dataclass(frozen=True, slots=True)
class HfVlmNetwork(HfNetwork):
    """A Hugging Face vision-language model. Its `adapter` encodes the images."""

    spec: VlmSpec
    adapter: VisionAdapter

    @property
    def vocabulary(self) -> int:
        return self.spec.vocab

    @property
    def max_seq_len(self) -> int:
        return self.spec.max_seq_len

    @property
    def towers(self) -> Mapping[str, str]:
        return self.adapter.towers

    def forward(self, inputs: Mapping[str, Tensor], *stream: Tensor) -> tuple[Tensor, Tensor]:
        with self.adapter.with_images(inputs):
            return HfNetwork.forward(self, inputs)

    def extend(self, cache: KeyValueCache, inputs: Mapping[str, Tensor], counts: Sequence[int] | None = None) -> Tensor:
        """See `Network`. The vision tower does not run without images."""
        with self.adapter.with_images(inputs) if "patches" in inputs else nullcontext():
            if self.spec.sections and "positions" not in inputs:
                starts = torch.tensor(cache.lengths, device=inputs["tokens"].device)[:, None]
                positions = starts + torch.arange(inputs["tokens"].shape[1], device=starts.device)
                inputs = {**inputs, "positions": positions.expand(3, -1, -1)}
            return HfNetwork.extend(self, cache, inputs, counts)

    def extend_pages(self, extension: PagedExtension, inputs: Mapping[str, Tensor], *stream: Tensor) -> Tensor:
        with self.adapter.with_images(inputs) if "patches" in inputs else nullcontext():
            return HfNetwork.extend_pages(self, extension, inputs)

    def _attention_arguments(self, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        arguments = HfNetwork._attention_arguments(self, inputs)
        if not self.spec.sections:
            return arguments
        positions = inputs.get("positions")
        if positions is None:
            positions = arguments["position_ids"].expand(3, -1, -1)
        return arguments | {"position_ids": positions}


def network_of_hf(module: nn.Module, spec: Spec | None) -> HfNetwork:
    """Return the network of a Hugging Face model, with or without vision. See `hf_network`."""
    network = hf_network(module, spec)
    kind = module.config.model_type  # pyrefly: ignore[missing-attribute]
    if kind not in VISION_ADAPTERS:
        return network
    if spec is None or spec.vision is None:
        raise _no_images(network, f"its configuration is not supported ({_difference(module)})")
    if vision_utils is None:
        raise _no_images(network, "that needs transformers 5")
    if not takes_scope(module):
        raise _no_images(network, "it has its own attention implementation")
    adapter = VISION_ADAPTERS[kind](module, spec)
    return HfVlmNetwork(
        module, _in_order(network.blocks, module, adapter), spec, network.architecture, network.logits_head, adapter
    )


def _difference(module: Any) -> str:
    """Return what the vlm family does not support in the model's configuration."""
    try:
        vlm_from_disk(module.config.to_dict(), where="config.json")
    except UserError as error:
        return error.what
    return "it has no spec"


def _in_order(blocks: tuple[nn.Module, ...], module: nn.Module, adapter: VisionAdapter) -> tuple[nn.Module, ...]:
    """Return the blocks in the order of the forward: vision, the projector, language."""
    names = {id(part): name for name, part in module.named_modules()}
    language = [block for block in blocks if names[id(block)].startswith(adapter.towers["language"])]
    vision = [block for block in blocks if block not in (*language, *adapter.unused)]
    return (*vision, adapter.projector, *language)


def _no_images(network: HfNetwork, reason: str) -> UserError:
    return UserError("M035", f"{network.architecture} cannot be trained with images: {reason}", where="model.path",
                     fix="use family vlm, or train its language model alone")  # fmt: skip
