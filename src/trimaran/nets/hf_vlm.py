"""What the trainer sees of a Hugging Face model that sees: Qwen2-VL, Qwen2.5-VL and LLaVA, unchanged."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from trimaran.core import UserError
from trimaran.models import Spec, VlmSpec
from trimaran.models.from_hf_vlm import vlm_from_disk
from trimaran.nets.hf import HfNetwork, hf_network
from trimaran.nets.hf_attention import is_sighted
from trimaran.nets.hf_vision_adapter import VISION_ADAPTERS, VisionAdapter

try:
    from transformers import vision_utils
except ImportError:  # before transformers 5 a tower cannot be told where its images end
    vision_utils = None


@dataclass(frozen=True, slots=True)
class HfVlmNetwork(HfNetwork):
    """A Hugging Face model that sees. Its `eye` brings the images to it."""

    spec: VlmSpec
    eye: VisionAdapter

    @property
    def vocabulary(self) -> int:
        return self.spec.vocab

    @property
    def longest(self) -> int:
        return self.spec.max_seq_len

    @property
    def towers(self) -> Mapping[str, str]:
        return self.eye.towers

    def forward(self, inputs: Mapping[str, Tensor], *stream: Tensor) -> tuple[Tensor, Tensor]:
        with self.eye.looking(inputs):
            return HfNetwork.forward(self, inputs)

    def _where(self, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        where = HfNetwork._where(self, inputs)
        if not self.spec.sections:
            return where
        positions = inputs.get("positions")
        return where | {"position_ids": where["position_ids"].expand(3, -1, -1) if positions is None else positions}


def network_of_hf(module: nn.Module, spec: Spec | None) -> HfNetwork:
    """Return the network around a Hugging Face model, with whatever it takes beside tokens. See `hf_network`."""
    network = hf_network(module, spec)
    kind = module.config.model_type  # pyrefly: ignore[missing-attribute]
    if kind not in VISION_ADAPTERS:
        return network
    if not isinstance(spec, VlmSpec):
        raise _cannot(network, f"is not built as others of its kind are ({_oddity(module)})")
    if vision_utils is None:
        raise _cannot(network, "needs transformers 5 here")
    if not is_sighted(module):
        raise _cannot(network, "has attention of its own")
    eye = VISION_ADAPTERS[kind](module, spec)
    return HfVlmNetwork(module, _in_order(network.blocks, module, eye), spec, network.architecture, network.ending, eye)


def _oddity(module: Any) -> str:
    """Return what in the configuration of a model that sees is not as we know it."""
    try:
        vlm_from_disk(module.config.to_dict(), where="config.json")
    except UserError as error:
        return error.what
    return "its shape was not told"


def _in_order(blocks: tuple[nn.Module, ...], module: nn.Module, eye: VisionAdapter) -> tuple[nn.Module, ...]:
    """Return the blocks as the forward comes by them: vision, the projector, language."""
    names = {id(part): name for name, part in module.named_modules()}
    language = [block for block in blocks if names[id(block)].startswith(eye.towers["language"])]
    vision = [block for block in blocks if block not in (*language, *eye.unused)]
    return (*vision, eye.projector, *language)


def _cannot(network: HfNetwork, why: str) -> UserError:
    return UserError("M035", f"{network.architecture} {why}, and images cannot be brought to it", where="model.path",
                     fix="use family vlm, or train its language model alone")  # fmt: skip
