"""The perception model, or one stage of it."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trimaran.core.input_rules import CAMERA_METRES, SceneRules
from trimaran.models.perception_spec import PerceptionSpec
from trimaran.nets.decoder.attention_context import Context
from trimaran.nets.decoder.moe import as_autocast
from trimaran.nets.perception.layers import (
    CameraNeck,
    CameraStem,
    FusionLayer,
    FusionStem,
    Heads,
    LidarStem,
    RadarStem,
    Residual,
)

TARGET_METRES = 0.6  # above the ground: the middle of most objects
MIN_BIAS = -20.0  # effectively no attention; much lower scores would give denormals, which are slow on a CPU
ROW_TOLERANCE = 2.0  # a cell's bias is wider over rows than over columns, because objects differ in height


POINTS = {"lidar": ("points", "point_rows"), "radar": ("radar_points", "radar_point_rows")}
"""The inputs of the towers of points: the points of all scenes, and the scene of each."""


class Perception(nn.Module):
    """Maps camera images, LiDAR and radar points to predictions for every ground cell; or one pipeline stage.

    The towers are a sequence of blocks: camera, LiDAR, radar, fusion, heads; a sensor that the model lacks has none.
    The stream between two blocks of the camera is its features. After the camera it is one tensor: the camera tokens,
    followed by the pillars of each sensor so far, or by the queries of the cells.
    """

    def __init__(self, spec: PerceptionSpec, blocks: range | None = None) -> None:
        super().__init__()
        self.spec, self.context = spec, Context()
        self.held = range(spec.layers) if blocks is None else blocks
        for tower in spec.tower_names[:-1]:  # containers that are never called; only the blocks in them are
            self.add_module(tower, nn.ModuleDict({"layers": nn.ModuleList()}))
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
        names, num_scenes = self.spec.block_names, len(inputs["valid"])
        camera, cells = self._unpack(stream[0]) if stream else (inputs.get("cameras"), [])
        bias = None
        for number, block in zip(self.held, self.blocks, strict=True):
            tower, _, leaf = names[number].partition(".")
            if tower == "camera":
                camera = block(camera)
            elif tower in POINTS and leaf == "stem":
                points, rows = POINTS[tower]
                cells = [*cells, block(inputs[points], inputs[rows], num_scenes)]
            elif tower == "fusion" and leaf == "stem":
                cells = [block(num_scenes, *cells)]
            elif tower == "fusion":
                if bias is None:
                    assert camera is not None, "a model without cameras has no fusion layers"
                    placed = camera_bias(self.spec.scenes(), self.spec.grid, camera.device, inputs.get("rig"))
                    bias = as_autocast(placed)
                cells = [block(cells[-1], camera, bias)]
            else:
                cells = [*cells[:-1], block(cells[-1])]
        out = cells[0] if names[self.held[-1]] == "heads" else self._pack(camera, cells)
        return out, torch.zeros((), device=out.device)

    def stream_shape(self, num_scenes: int, before: int) -> tuple[int, ...]:
        """Return the shape of the stream before block number `before`."""
        spec = self.spec
        name = spec.block_names[min(before, spec.layers - 1)]
        if name.startswith("camera"):
            number = max(0, before - 2)  # of the previous residual block; all but the first halve the image
            size = [each // 2 ** (1 + number) for each in (spec.height, spec.width)]
            return (num_scenes * spec.cameras, spec.camera_widths[number], *size)
        return (num_scenes, spec.num_tokens + self._num_maps(before) * spec.cells * spec.cells, spec.hidden)

    def _num_maps(self, before: int) -> int:
        """Return how many numbers of each cell the stream has before a block: pillars of each sensor, or queries."""
        names = self.spec.block_names[:before]
        return 1 if "fusion.stem" in names else sum(f"{sensor}.stem" in names for sensor in POINTS)

    def _pack(self, camera: Tensor | None, cells: list[Tensor]) -> Tensor:
        if not cells:
            assert camera is not None, "the first block of a model without cameras makes pillars"
            return camera
        flat = [each.flatten(2).transpose(1, 2) if each.ndim == 4 else each for each in cells]
        return torch.cat([*([] if camera is None else [camera.to(flat[0].dtype)]), *flat], dim=1)

    def _unpack(self, stream: Tensor) -> tuple[Tensor | None, list[Tensor]]:
        """Return the camera features or tokens, and the pillars or queries of the cells."""
        spec, first = self.spec, self.held[0]
        if not (num_maps := self._num_maps(first)):
            return stream, []
        camera, *cells = stream.split([spec.num_tokens, *[spec.cells * spec.cells] * num_maps], dim=1)
        if "fusion.stem" not in spec.block_names[:first]:
            cells = [each.transpose(1, 2).unflatten(2, (spec.cells, spec.cells)).contiguous() for each in cells]
        return camera if spec.cameras else None, cells


def camera_bias(rules: SceneRules, grid: tuple[int, int], device: torch.device, rig: Tensor | None = None) -> Tensor:
    """Return the fp32 attention bias of each cell and camera token [cells * cells, cameras * rows * columns].

    `rig` [cameras, RIG_NUMBERS] is the calibration of recorded cameras; without it they are those of the rules. If each
    scene has its own, [B, cameras, RIG_NUMBERS], the result is [B, 1, cells * cells, tokens].

    It is a Gaussian, about one token wide, of the angle between the direction of the cell and that of the token.
    Computed in each forward: no buffer that a meta device or a cast could corrupt.
    """
    if rig is not None and rig.ndim == 3:
        return torch.stack([camera_bias(rules, grid, device, each) for each in rig])[:, None]
    rows, columns = grid
    if rig is None:
        lens = (rules.focal, rules.width / 2, rules.horizon, CAMERA_METRES, 0.0, 0.0)
        rig = torch.tensor([(heading, *lens) for heading in rules.headings], device=device)
    headings, focals, centres_right, centres_down, metres, ahead, left = rig.float()[:, :, None, None].unbind(1)
    right = (torch.arange(columns, device=device) + 0.5) * (rules.width / columns) - centres_right
    down = ((torch.arange(rows, device=device) + 0.5) * (rules.height / rows))[:, None] - centres_down
    azimuths = headings - (right / focals).atan()
    # Pixels of an outer column are farther from the camera than those of the middle one.
    slopes = down / (right**2 + focals**2).sqrt()
    azimuths, slopes, focals, metres, ahead, left = (
        each.flatten() for each in torch.broadcast_tensors(azimuths, slopes, focals, metres, ahead, left)
    )
    centres = (torch.arange(rules.cells, device=device) + 0.5) * rules.cell - rules.reach
    x, y = torch.meshgrid(centres, centres, indexing="ij")
    x, y = x.flatten()[:, None] - ahead, y.flatten()[:, None] - left  # from each camera
    distances = torch.hypot(x, y).clamp(min=rules.cell)
    turned = torch.atan2(y, x) - azimuths
    turned = (turned + math.pi).remainder(2 * math.pi) - math.pi
    lower = (metres - TARGET_METRES) / distances - slopes
    wide = rules.width / columns / focals
    tall = ROW_TOLERANCE * rules.height / rows / focals
    return (-((turned / wide) ** 2 + (lower / tall) ** 2) / 2).clamp(min=MIN_BIAS)


def _block(spec: PerceptionSpec, name: str) -> nn.Module:
    owner, _, leaf = name.rpartition(".")
    if owner == "camera.layers":
        number = int(leaf)
        in_channels = spec.camera_widths[max(0, number - 1)]
        return Residual(in_channels, spec.camera_widths[number], stride=2 if number else 1)
    if owner in ("lidar.layers", "radar.layers"):
        return Residual(spec.hidden, spec.hidden)
    kinds: dict[str, Any] = {
        "camera.stem": CameraStem,
        "camera.neck": CameraNeck,
        "lidar.stem": LidarStem,
        "radar.stem": RadarStem,
        "fusion.stem": FusionStem,
        "fusion.layers": FusionLayer,
        "heads": Heads,
    }
    return kinds[owner if owner.endswith("layers") else name](spec)
