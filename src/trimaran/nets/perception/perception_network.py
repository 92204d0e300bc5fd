"""The `Network` of the perception model, and its weights on disk, under their parameter names."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from trimaran.core import UserError
from trimaran.models.perception_spec import PerceptionSpec, perception_config
from trimaran.nets.decoder.attention_context import Context
from trimaran.nets.hf_weights import damaged, open_weights
from trimaran.nets.local_shards import is_on_meta, local_part, local_slices
from trimaran.nets.network import Network
from trimaran.nets.perception.model import Perception
from trimaran.nets.whole_tensors import ReadTensor, full_tensor

# Between these modules queries and tokens are replicated, and every rank computes all the rest.
TENSOR_PLAN = {
    "fusion.layers.*.attention.q_proj": "colwise",
    "fusion.layers.*.attention.k_proj": "colwise",
    "fusion.layers.*.attention.v_proj": "colwise",
    "fusion.layers.*.attention.o_proj": "rowwise",
    "fusion.layers.*.mlp.up_proj": "colwise",
    "fusion.layers.*.mlp.down_proj": "rowwise",
}


@dataclass(frozen=True, slots=True)
class PerceptionNetwork(Network):
    """See `Network`. Its samples are scenes: it has no vocabulary and no sequences."""

    module: Perception
    spec: PerceptionSpec

    def forward(self, inputs: Mapping[str, Tensor], *stream: Tensor) -> tuple[Tensor, Tensor]:
        """Return predictions [B, outputs, cells, cells], or a stage's stream, and a balance loss of 0."""
        return self.module(*stream, inputs=inputs)

    @property
    def towers(self) -> Mapping[str, str]:
        return {name: f"{name}." for name in self.spec.tower_names}

    def stream_shape(self, inputs: Mapping[str, Tensor], *, tp: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        module, num_scenes = self.module, len(inputs["valid"])
        return module.stream_shape(num_scenes, module.held.start), module.stream_shape(num_scenes, module.held.stop)

    def use_context(self, context: Context) -> None:
        raise AssertionError("a legal plan does not split a scene")

    def tensor_plan(self, degree: int) -> Mapping[str, str]:
        return TENSOR_PLAN

    @property
    def head(self) -> None:
        return None

    @property
    def vocabulary(self) -> int:
        return 0

    @property
    def max_seq_len(self) -> int:
        return 0

    def disk_tensors(self, read: ReadTensor = full_tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight unsharded, on the CPU, under its parameter name. Every rank must take every item."""
        return ((name, read(each)) for name, each in self.module.named_parameters())

    def disk_config(self) -> dict[str, Any]:
        return perception_config(self.spec)

    def load(self, folder: Path, report_progress: Callable[[], None] = lambda: None) -> None:
        load_perception_weights(self.module, folder, report_progress)


def perception_network(spec: PerceptionSpec, blocks: range | None = None) -> PerceptionNetwork:
    """Return the model, or the stage with these blocks, on the default device, uninitialised."""
    module = Perception(spec, blocks)
    return PerceptionNetwork(module, module.blocks, spec)


def load_perception_weights(
    module: Perception, folder: Path, report_progress: Callable[[], None] = lambda: None
) -> None:
    """Fill the model, or a stage of it, in place from the safetensors in `folder`. Each rank reads only its shards.

    Names and shapes are checked before the first value is written; on the meta device nothing else is done.
    `report_progress` is called after each tensor.
    """
    with ExitStack() as stack, torch.no_grad():
        sources = open_weights(folder, stack)
        _refuse_mismatch(module, sources, folder)
        if is_on_meta(module):
            return
        try:
            for name, parameter in module.named_parameters():
                if (local := local_part(parameter)).numel():
                    local.copy_(sources[name].get_slice(name)[local_slices(parameter)])
                report_progress()
        except SafetensorError as error:
            raise damaged(folder, error) from None


def _refuse_mismatch(module: Perception, sources: Mapping[str, Any], folder: Path) -> None:
    with torch.device("meta"):
        shapes = {name: list(each.shape) for name, each in Perception(module.spec).named_parameters()}
    wrong = [f"{name} is missing" for name in shapes if name not in sources]
    wrong += [f"{name} is unexpected" for name in sources if name not in shapes]
    for name, shape in shapes.items():
        if name in sources and (found := sources[name].get_slice(name).get_shape()) != shape:
            wrong.append(f"{name} has shape {found} instead of {shape}")
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise UserError("M021", f"the weights do not match the model: {', '.join(wrong[:3])}{more}", where=str(folder),
                        fix="use the config.json that belongs to the weights, and leave model.shape empty")  # fmt: skip
