"""The perception model, or one stage of it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trimaran.models.perception_spec import PerceptionSpec
from trimaran.nets.attention_context import Context
from trimaran.nets.perception.geometry import sight_bias
from trimaran.nets.perception.layers import (
    CameraNeck,
    CameraStem,
    FusionLayer,
    FusionStem,
    Heads,
    LidarStem,
    Residual,
)


class Perception(nn.Module):
    """Cameras and points in, answers for every cell of the ground out; or one stage, which holds some of the blocks.

    The towers are parts of one line of blocks: cameras, LiDAR, fusion, heads. Between blocks of the camera passes what
    it sees, and behind it its tokens with, as soon as there are any, the pillars or queries of the ground: one tensor.
    """

    def __init__(self, spec: PerceptionSpec, blocks: range | None = None) -> None:
        super().__init__()
        self.spec, self.context = spec, Context()
        self.held = range(spec.layers) if blocks is None else blocks
        # Dictionaries, which are never called: what is asked of a tower is asked of the blocks in it.
        self.camera, self.lidar, self.fusion = (nn.ModuleDict({"layers": nn.ModuleList()}) for _ in range(3))
        for number, name in enumerate(spec.block_names):  # what another stage holds is None here: names stay
            owner, _, leaf = name.rpartition(".")
            block = _block(spec, name) if number in self.held else None
            self.get_submodule(owner).add_module(leaf, block)

    @property
    def blocks(self) -> tuple[nn.Module, ...]:
        """The blocks that are here, in the order of the forward."""
        return tuple(self.get_submodule(self.spec.block_names[number]) for number in self.held)

    def forward(self, *stream: Tensor, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return answers [B, outputs, cells, cells], or the stream of a stage but the last, and a balance loss of 0."""
        names = self.spec.block_names
        seen, ground = self._unpacked(stream[0]) if stream else (inputs["cameras"], None)
        bias = None
        for number, block in zip(self.held, self.blocks, strict=True):
            name = names[number]
            if name.startswith("camera."):
                seen = block(seen)
            elif name == "lidar.stem":
                ground = block(inputs["points"], inputs["point_rows"], len(inputs["cameras"]))
            elif name.startswith("fusion.layers."):
                if bias is None:
                    bias = sight_bias(self.spec.scenes(), self.spec.grid, seen.device)
                ground = block(ground, seen, bias)
            else:
                ground = block(ground)
        out = ground if names[self.held[-1]] == "heads" else self._packed(seen, ground)
        assert out is not None, "the stem of the LiDAR comes before all that works on the ground"
        return out, torch.zeros((), device=out.device)

    def stream_shape(self, num_scenes: int, before: int) -> tuple[int, ...]:
        """Return the shape of what comes into block number `before` for so many scenes."""
        spec = self.spec
        name = spec.block_names[min(before, spec.layers - 1)]
        if name.startswith("camera"):
            number = max(0, before - 2)  # of the residual block that it came out of; all but the first halve
            size = [each // 2 ** (1 + number) for each in (spec.height, spec.width)]
            return (num_scenes * spec.cameras, spec.camera_widths[number], *size)
        ground = 0 if name == "lidar.stem" else spec.cells * spec.cells
        return (num_scenes, spec.num_tokens + ground, spec.hidden)

    def _packed(self, seen: Tensor, ground: Tensor | None) -> Tensor:
        if ground is None:
            return seen
        if ground.ndim == 4:  # pillars
            ground = ground.flatten(2).transpose(1, 2)
        return torch.cat([seen.to(ground.dtype), ground], dim=1)

    def _unpacked(self, stream: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what the cameras see and what is known of the ground, where there is any yet."""
        spec, name = self.spec, self.spec.block_names[self.held[0]]
        if name.startswith("camera") or name == "lidar.stem":
            return stream, None
        seen, ground = stream.split([spec.num_tokens, spec.cells * spec.cells], dim=1)
        if name.startswith("lidar") or name == "fusion.stem":
            ground = ground.transpose(1, 2).unflatten(2, (spec.cells, spec.cells)).contiguous()
        return seen, ground


def _block(spec: PerceptionSpec, name: str) -> nn.Module:
    owner, _, leaf = name.rpartition(".")
    if owner == "camera.layers":
        number = int(leaf)
        taken = spec.camera_widths[max(0, number - 1)]
        return Residual(taken, spec.camera_widths[number], stride=2 if number else 1)
    if owner == "lidar.layers":
        return Residual(spec.hidden, spec.hidden)
    kinds: dict[str, Any] = {
        "camera.stem": CameraStem,
        "camera.neck": CameraNeck,
        "lidar.stem": LidarStem,
        "fusion.stem": FusionStem,
        "fusion.layers": FusionLayer,
        "heads": Heads,
    }
    return kinds[owner if owner.endswith("layers") else name](spec)
