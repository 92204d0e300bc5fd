"""What the trainer sees of our model that sees."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from trimaran.models.to_hf_vlm import vlm_to_disk
from trimaran.models.vlm_spec import VlmSpec
from trimaran.nets.network import Network
from trimaran.nets.tp_plan import vlm_tensor_plan
from trimaran.nets.varlen_attention import run_lengths
from trimaran.nets.vlm_model import Vlm
from trimaran.nets.vlm_weights import load_vlm_weights, vlm_tensors

IMAGES = ("positions", "patches", "grids", "features")


@dataclass(frozen=True, slots=True)
class VlmNetwork(Network):
    """Our own model that sees, or a stage of it."""

    module: Vlm
    spec: VlmSpec

    @property
    def head(self) -> nn.Module | None:
        return None if self.module.language is None else self.module.language.lm_head

    @property
    def vocabulary(self) -> int:
        return self.spec.vocab

    @property
    def longest(self) -> int:
        return self.spec.max_seq_len

    def forward(self, inputs: Mapping[str, Tensor], *stream: Tensor) -> tuple[Tensor, Tensor]:
        host, grids = inputs.get("host_documents"), inputs.get("host_grids")
        return self.module(
            *stream,
            tokens=inputs["tokens"],
            documents=inputs.get("documents"),
            lengths=None if host is None else run_lengths(host),
            host_grids=None if grids is None else grids.numpy(),  # DDP and FSDP would move a tensor to the device
            **{name: inputs.get(name) for name in IMAGES},
        )

    @property
    def towers(self) -> Mapping[str, str]:
        return {"vision": "vision.", "projector": "projector.", "language": "language."}

    def stream_shape(self, inputs: Mapping[str, Tensor], *, tp: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See `Network`. Up to the projector it is patches that pass: as many as could be seen at most."""
        tokens, held, bridge = inputs["tokens"], self.module.held, self.spec.vision.layers
        seen = (1, self.module.bound(tokens), self.spec.vision.hidden)
        spoken = (len(tokens), self.context.mine(tokens).shape[1] // tp, self.spec.hidden)
        return seen if held.start <= bridge else spoken, seen if held.stop <= bridge else spoken

    def tensor_plan(self, degree: int) -> Mapping[str, str]:
        return vlm_tensor_plan(self.spec)

    def disk_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return vlm_tensors(self.module)

    def disk_config(self) -> dict[str, Any]:
        return vlm_to_disk(self.spec)

    def load(self, folder: Path) -> None:
        load_vlm_weights(self.module, folder)


def vlm_network(spec: VlmSpec, blocks: range | None = None) -> VlmNetwork:
    """Return our model that sees, or the stage of it with these blocks, its weights not yet set."""
    module = Vlm(spec, blocks)
    return VlmNetwork(module, module.blocks, spec)
