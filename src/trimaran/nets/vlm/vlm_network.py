"""The `Network` of our vision-language model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from trimaran.models.vlm_config import disk_form, vlm_to_disk
from trimaran.models.vlm_spec import VlmSpec
from trimaran.nets.decoder.key_value_cache import KeyValueCache
from trimaran.nets.decoder.tp_plan import vlm_tensor_plan
from trimaran.nets.decoder.varlen_attention import run_lengths
from trimaran.nets.network import Network
from trimaran.nets.paged_cache import PagedExtension
from trimaran.nets.vlm.vlm_model import Vlm
from trimaran.nets.vlm.vlm_names import DiskTensor, in_memory
from trimaran.nets.vlm.vlm_weights import load_vlm_weights, vlm_reader, vlm_tensors
from trimaran.nets.whole_tensors import ReadTensor, full_tensor

IMAGE_INPUTS = ("positions", "patches", "grids", "features")


@dataclass(frozen=True, slots=True)
class VlmNetwork(Network):
    """Our vision-language model, or a stage of it."""

    module: Vlm
    spec: VlmSpec

    @property
    def head(self) -> nn.Module | None:
        return None if self.module.language is None else self.module.language.lm_head

    @property
    def vocabulary(self) -> int:
        return self.spec.vocab

    @property
    def max_seq_len(self) -> int:
        return self.spec.max_seq_len

    def forward(self, inputs: Mapping[str, Tensor], *stream: Tensor) -> tuple[Tensor, Tensor]:
        host_documents, host_grids = inputs.get("host_documents"), inputs.get("host_grids")
        return self.module(
            *stream,
            tokens=inputs["tokens"],
            documents=inputs.get("documents"),
            lengths=None if host_documents is None else run_lengths(host_documents),
            host_grids=None
            if host_grids is None
            else host_grids.numpy(),  # DDP and FSDP would move a tensor to the device
            **{name: inputs.get(name) for name in IMAGE_INPUTS},
        )

    def extend(self, cache: KeyValueCache, inputs: Mapping[str, Tensor], counts: Sequence[int] | None = None) -> Tensor:
        images = {name: inputs[name] for name in IMAGE_INPUTS if name in inputs}
        extension = cache.extend(inputs["tokens"], counts)
        return self.module(tokens=inputs["tokens"], extension=extension, **images)[0]

    def extend_pages(self, extension: PagedExtension, inputs: Mapping[str, Tensor], *stream: Tensor) -> Tensor:
        images = {name: inputs[name] for name in IMAGE_INPUTS if name in inputs}
        return self.module(*stream, tokens=inputs["tokens"], extension=extension, **images)[0]

    @property
    def towers(self) -> Mapping[str, str]:
        return {"vision": "vision.", "projector": "projector.", "language": "language."}

    def stream_shape(self, inputs: Mapping[str, Tensor], *, tp: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See `Network`. Up to the projector it is the vision stream, padded to its maximum length.

        The tensors of deepstack accompany both.
        """
        tokens, held, projector = inputs["tokens"], self.module.held, self.spec.vision.layers
        vision = (1, self.module.max_vision_length(tokens), self.spec.vision.hidden * self.spec.num_projections)
        rows, length = len(tokens), self.context.shard(tokens).shape[1] // tp
        into, out = ((rows, length, self.spec.hidden * (1 + each)) for each in self.module.num_pending)
        return vision if held.start <= projector else into, vision if held.stop <= projector else out

    def tensor_plan(self, degree: int) -> Mapping[str, str]:
        return vlm_tensor_plan(self.spec)

    def disk_tensors(self, read: ReadTensor = full_tensor) -> Iterator[tuple[str, Tensor]]:
        return vlm_tensors(self.module, read)

    def disk_config(self) -> dict[str, Any]:
        return vlm_to_disk(self.spec)

    def hf_parameter(self, name: str) -> DiskTensor:
        return in_memory(name, self.spec, disk_form(self.spec))

    def load(self, folder: Path, report_progress: Callable[[], None] = lambda: None) -> None:
        load_vlm_weights(self.module, folder, report_progress)

    def weight_reader(self, files: Mapping[str, Any]) -> Callable[[str], Tensor]:
        return vlm_reader(self.module, files)


def vlm_network(spec: VlmSpec, blocks: range | None = None) -> VlmNetwork:
    """Return our vision-language model, or the stage with these blocks, on the default device, uninitialised."""
    module = Vlm(spec, blocks)
    return VlmNetwork(module, module.blocks, spec)
