"""The perception model, or one stage of it."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trimaran.core.scene_rules import CAMERA_METRES, SceneRules
from trimaran.models.perception_spec import PerceptionSpec
from trimaran.nets.attention_context import Context
from trimaran.nets.moe import as_autocast
from trimaran.nets.perception.layers import (
    CameraNeck,
    CameraStem,
    FusionLayer,
    FusionStem,
    Heads,
    LidarStem,
    Residual,
)

TARGET_METRES = 0.6  # above the ground: the middle of most objects
MIN_BIAS = -20.0  # effectively no attention; much lower scores would give denormals, which are slow on a CPU
ROW_TOLERANCE = 2.0  # a cell's bias is wider over rows than over columns, because objects differ in height


class Perception(nn.Module):
    """Maps camera images and points to predictions for every ground cell; or one pipeline stage.

    The towers are a sequence of blocks: camera, LiDAR, fusion, heads. The stream between two blocks of the camera is
    its features. After the camera it is one tensor: the camera tokens, followed by the pillars or queries of the cells,
    if there are any yet.
    """

    def __init__(self, spec: PerceptionSpec, blocks: range | None = None) -> None:
        super().__init__()
        self.spec, self.context = spec, Context()
        self.held = range(spec.layers) if blocks is None else blocks
        # Containers that are never called; only the blocks in them are.
        self.camera, self.lidar, self.fusion = (nn.ModuleDict({"layers": nn.ModuleList()}) for _ in range(3))
        for number, name in enumerate(spec.block_names):  # blocks of other stages are None, so that names do not change
            owner, _, leaf = name.rpartition(".")
            block = _block(spec, name) if number in self.held else None
            self.get_submodule(owner).add_module(leaf, block)

    @property
    def blocks(self) -> tuple[nn.Module, ...]:
        """The blocks of this stage, in the order of the forward."""
        return tuple(self.get_submodule(self.spec.block_names[number]) for number in self.held)

    def forward(self, *stream: Tensor, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return predictions [B, outputs, cells, cells], or a stage's stream, and a balance loss of 0."""
        names = self.spec.block_names
        camera, cells = self._unpack(stream[0]) if stream else (inputs["cameras"], None)
        bias = None
        for number, block in zip(self.held, self.blocks, strict=True):
            name = names[number]
            if name.startswith("camera."):
                camera = block(camera)
            elif name == "lidar.stem":
                cells = block(inputs["points"], inputs["point_rows"], len(inputs["cameras"]))
            elif name.startswith("fusion.layers."):
                if bias is None:
                    placed = camera_bias(self.spec.scenes(), self.spec.grid, camera.device, inputs.get("rig"))
                    bias = as_autocast(placed)
                cells = block(cells, camera, bias)
            else:
                cells = block(cells)
        out = cells if names[self.held[-1]] == "heads" else self._pack(camera, cells)
        assert out is not None, "the LiDAR stem precedes all blocks that use the cells"
        return out, torch.zeros((), device=out.device)

    def stream_shape(self, num_scenes: int, before: int) -> tuple[int, ...]:
        """Return the shape of the stream before block number `before`."""
        spec = self.spec
        name = spec.block_names[min(before, spec.layers - 1)]
        if name.startswith("camera"):
            number = max(0, before - 2)  # of the previous residual block; all but the first halve the image
            size = [each // 2 ** (1 + number) for each in (spec.height, spec.width)]
            return (num_scenes * spec.cameras, spec.camera_widths[number], *size)
        num_cells = 0 if name == "lidar.stem" else spec.cells * spec.cells
        return (num_scenes, spec.num_tokens + num_cells, spec.hidden)

    def _pack(self, camera: Tensor, cells: Tensor | None) -> Tensor:
        if cells is None:
            return camera
        if cells.ndim == 4:  # pillars
            cells = cells.flatten(2).transpose(1, 2)
        return torch.cat([camera.to(cells.dtype), cells], dim=1)

    def _unpack(self, stream: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the camera features or tokens, and the pillars or queries of the cells, if there are any yet."""
        spec, name = self.spec, self.spec.block_names[self.held[0]]
        if name.startswith("camera") or name == "lidar.stem":
            return stream, None
        camera, cells = stream.split([spec.num_tokens, spec.cells * spec.cells], dim=1)
        if name.startswith("lidar") or name == "fusion.stem":
            cells = cells.transpose(1, 2).unflatten(2, (spec.cells, spec.cells)).contiguous()
        return camera, cells


def camera_bias(rules: SceneRules, grid: tuple[int, int], device: torch.device, rig: Tensor | None = None) -> Tensor:
    """Return the fp32 attention bias of each cell and camera token [cells * cells, cameras * rows * columns].

    It is a Gaussian, about one token wide, of the angle between the direction of the cell and that of the token.
    Computed in each forward: no buffer that a meta device or a cast could corrupt. `rig` [cameras, RIG_NUMBERS] is the
    calibration of recorded cameras; else they are those of the rules.
    """
    rows, columns = grid
    if rig is None:
        own = [(heading, rules.focal, rules.width / 2, rules.horizon, CAMERA_METRES) for heading in rules.headings]
        rig = torch.tensor(own, device=device)
    headings, focals, centres_right, centres_down, metres = rig.float()[:, :, None, None].unbind(1)
    right = (torch.arange(columns, device=device) + 0.5) * (rules.width / columns) - centres_right
    down = ((torch.arange(rows, device=device) + 0.5) * (rules.height / rows))[:, None] - centres_down
    azimuths = headings - (right / focals).atan()
    # Pixels of an outer column are farther from the camera than those of the middle one.
    slopes = down / (right**2 + focals**2).sqrt()
    azimuths, slopes, focals, metres = torch.broadcast_tensors(azimuths, slopes, focals, metres)
    centres = (torch.arange(rules.cells, device=device) + 0.5) * rules.cell - rules.reach
    x, y = torch.meshgrid(centres, centres, indexing="ij")
    distances = torch.hypot(x, y).flatten().clamp(min=rules.cell)
    turned = torch.atan2(y, x).flatten()[:, None] - azimuths.flatten()[None]
    turned = (turned + math.pi).remainder(2 * math.pi) - math.pi
    lower = (metres.flatten()[None] - TARGET_METRES) / distances[:, None] - slopes.flatten()[None]
    wide = rules.width / columns / focals.flatten()[None]
    tall = ROW_TOLERANCE * rules.height / rows / focals.flatten()[None]
    return (-((turned / wide) ** 2 + (lower / tall) ** 2) / 2).clamp(min=MIN_BIAS)


def _block(spec: PerceptionSpec, name: str) -> nn.Module:
    owner, _, leaf = name.rpartition(".")
    if owner == "camera.layers":
        number = int(leaf)
        in_channels = spec.camera_widths[max(0, number - 1)]
        return Residual(in_channels, spec.camera_widths[number], stride=2 if number else 1)
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
