"""The perception model: cameras, LiDAR and radar in, boxes and a bird's-eye-view segmentation out; and its `Network`.

Norms cover one scene at a time, so that results do not depend on the plan. Weights on disk have their parameter names.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimaran.core import CAMERA_METRES, SceneRules
from trimaran.models import BOX_OUTPUTS, GROUPS, POINT_FEATURES, RADAR_FEATURES, PerceptionSpec, perception_config
from trimaran.nets.decoder.attention_context import Context
from trimaran.nets.decoder.moe import as_autocast
from trimaran.nets.hf_weights import load_named_weights
from trimaran.nets.local_shards import ReadTensor, full_tensor
from trimaran.nets.network import Network

INITIAL_HEAT = -2.0  # added to the heat logits: few cells hold an object, and learning that first would take long
PIXEL_MEAN, PIXEL_STD = 0.5, 0.25
RADAR_DBSM_MEAN, RADAR_DBSM_STD, RADAR_METRES_A_SECOND = 5.0, 10.0, 5.0
TARGET_METRES = 0.6  # above the ground: the middle of most objects
MIN_BIAS = -20.0  # effectively no attention; much lower scores would give denormals, which are slow on a CPU
ROW_TOLERANCE = 2.0  # a cell's bias is wider over rows than over columns, because objects differ in height
# The inputs of the towers of points: the points of all scenes, and the scene of each.
POINTS = {"lidar": ("points", "point_rows"), "radar": ("radar_points", "radar_point_rows")}
# Between these modules queries and tokens are replicated, and every rank computes all the rest.
TENSOR_PLAN = {
    "fusion.layers.*.attention.q_proj": "colwise",
    "fusion.layers.*.attention.k_proj": "colwise",
    "fusion.layers.*.attention.v_proj": "colwise",
    "fusion.layers.*.attention.o_proj": "rowwise",
    "fusion.layers.*.mlp.up_proj": "colwise",
    "fusion.layers.*.mlp.down_proj": "rowwise",
}


class GroupNorm(nn.GroupNorm):
    """GroupNorm that returns the input's dtype."""

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = (each.to(input.dtype) for each in (self.weight, self.bias))
        return F.group_norm(input, self.num_groups, weight, bias, self.eps)


class SceneLayerNorm(nn.LayerNorm):
    """LayerNorm that returns the input's dtype."""

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = (each.to(input.dtype) for each in (self.weight, self.bias))
        return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


def norm_of(channels: int) -> GroupNorm:
    return GroupNorm(min(GROUPS, channels), channels)


class Residual(nn.Module):
    """A residual block of two convolutions; a `stride` of 2 halves the image."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = norm_of(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = norm_of(out_channels)
        same = in_channels == out_channels and stride == 1
        self.skip = None if same else nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the images [N, channels, rows, columns] after this block."""
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(inner + (x if self.skip is None else self.skip(x)))


class CameraStem(nn.Module):
    """Maps u8 images to features at half the resolution."""

    def __init__(self, spec: PerceptionSpec) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, spec.camera_widths[0], 3, stride=2, padding=1, bias=False)
        self.norm = norm_of(spec.camera_widths[0])

    def forward(self, cameras: Tensor) -> Tensor:
        """Return features [B * cameras, channels, rows, columns] of `cameras` u8 [B, cameras, 3, height, width]."""
        pixels = (cameras.flatten(0, 1).float() / 255 - PIXEL_MEAN) / PIXEL_STD
        return F.relu(self.norm(self.conv(pixels)))


class CameraNeck(nn.Module):
    """Maps image features to tokens, one for each position of each camera, with learnt position embeddings."""

    def __init__(self, spec: PerceptionSpec) -> None:
        super().__init__()
        self.cameras = spec.cameras
        self.proj = nn.Conv2d(spec.camera_widths[-1], spec.hidden, 1, bias=False)
        self.places = nn.Embedding(spec.num_tokens, spec.hidden)
        self.norm = SceneLayerNorm(spec.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens [B, num_tokens, hidden]."""
        tokens = self.proj(x).flatten(2).transpose(1, 2)
        tokens = tokens.reshape(-1, self.cameras * tokens.shape[1], tokens.shape[2])
        return self.norm(tokens + self.places.weight.to(tokens.dtype))


class PillarStem(nn.Module):
    """Maps the points of a sensor to pillars: an MLP for each point, and the maximum over the points of each cell.

    A maximum does not depend on the order of the points, so results are the same on every device. `values` returns
    what is known of each point besides its place, scaled to about 1.
    """

    def __init__(self, spec: PerceptionSpec, num_features: int, values: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.rules, self.values = spec.scenes(), values
        self.fc1 = nn.Linear(num_features, spec.hidden, bias=False)
        self.norm1 = SceneLayerNorm(spec.hidden)
        self.fc2 = nn.Linear(spec.hidden, spec.hidden, bias=False)
        self.norm2 = SceneLayerNorm(spec.hidden)

    def forward(self, points: Tensor, rows: Tensor, num_scenes: int) -> Tensor:
        """Return pillars [num_scenes, hidden, cells, cells] of points in the grid, [P, ...], of scenes `rows` [P]."""
        rules, cells = self.rules, self.rules.cells
        flat = (points[:, :2] + rules.reach) / rules.cell
        corners = flat.floor().clamp(0, cells - 1)
        # The place in the grid and that in the cell, scaled to about 1.
        features = [points[:, :2] / rules.reach, self.values(points), 2 * (flat - corners) - 1]
        x = F.relu(self.norm2(self.fc2(F.relu(self.norm1(self.fc1(torch.cat(features, dim=1)))))))
        index = corners.long()
        cell_numbers = index[:, 0] * cells + index[:, 1] + rows.long() * cells * cells
        pillars = x.new_zeros(num_scenes * cells * cells, x.shape[1])
        # No value is negative after the ReLU, so 0 means no points.
        pillars = pillars.scatter_reduce(0, cell_numbers[:, None].expand_as(x), x, "amax")
        return pillars.view(num_scenes, cells, cells, -1).permute(0, 3, 1, 2).contiguous()


def lidar_values(points: Tensor) -> Tensor:
    """Return height and intensity of LiDAR points [P, 4]: x, y, z, intensity; scaled to about 1."""
    return points[:, 2:] - 0.5


def radar_values(points: Tensor) -> Tensor:
    """Return the same of radar points [P, 7]: x, y, z, cross-section, velocity (vx, vy), age."""
    z, cross_section, *velocity, age = points[:, 2:].unbind(1)
    velocity = [each / RADAR_METRES_A_SECOND for each in velocity]
    return torch.stack([z - 0.5, (cross_section - RADAR_DBSM_MEAN) / RADAR_DBSM_STD, *velocity, 2 * age], dim=1)


class FusionStem(nn.Module):
    """Makes the queries: the pillars of each cell, joined over the sensors, plus a learnt embedding of the cell."""

    def __init__(self, spec: PerceptionSpec) -> None:
        super().__init__()
        num_sensors = len(spec.point_sensors)
        self.queries = nn.Embedding(spec.cells * spec.cells, spec.hidden)
        self.join = nn.Linear(num_sensors * spec.hidden, spec.hidden, bias=False) if num_sensors > 1 else None
        self.norm = SceneLayerNorm(spec.hidden)

    def forward(self, num_scenes: int, *pillars: Tensor) -> Tensor:
        """Return queries [B, cells * cells, hidden] of pillars [B, hidden, cells, cells], one for each sensor."""
        maps = [each.flatten(2).transpose(1, 2) for each in pillars]
        if not maps:
            return self.norm(self.queries.weight.expand(num_scenes, -1, -1))
        x = maps[0] if self.join is None else self.join(torch.cat(maps, dim=2))
        return self.norm(x + self.queries.weight.to(x.dtype))


class CrossAttention(nn.Module):
    """Queries attend to the tokens. The number of heads follows from its projections, so a TP slice works."""

    def __init__(self, spec: PerceptionSpec) -> None:
        super().__init__()
        self.head_dim = spec.hidden // spec.heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(spec.hidden, spec.hidden, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, tokens: Tensor, bias: Tensor) -> Tensor:
        """Return the output for queries `x` [B, Q, hidden]; `bias` [Q or B, 1, Q, tokens] is added to the scores."""
        query, key, value = (
            each.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for each in (self.q_proj(x), self.k_proj(tokens), self.v_proj(tokens))
        )
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=bias.to(query.dtype))
        return self.o_proj(out.transpose(1, 2).flatten(2))


class PerceptionFeedForward(nn.Module):
    def __init__(self, spec: PerceptionSpec) -> None:
        super().__init__()
        self.up_proj = nn.Linear(spec.hidden, spec.ffn, bias=False)
        self.down_proj = nn.Linear(spec.ffn, spec.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x)))


class FusionLayer(nn.Module):
    """Cross-attention to the cameras, then a feed-forward, each added to the queries."""

    def __init__(self, spec: PerceptionSpec) -> None:
        super().__init__()
        self.attention_norm = SceneLayerNorm(spec.hidden)
        self.attention = CrossAttention(spec)
        self.mlp_norm = SceneLayerNorm(spec.hidden)
        self.mlp = PerceptionFeedForward(spec)

    def forward(self, x: Tensor, tokens: Tensor, bias: Tensor) -> Tensor:
        """Return the queries after this layer."""
        x = x + self.attention(self.attention_norm(x), tokens, bias)
        return x + self.mlp(self.mlp_norm(x))


class Head(nn.Module):
    """Predicts the outputs of each cell from the cell and its neighbours."""

    def __init__(self, hidden: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(hidden, hidden, 3, padding=1, bias=False)
        self.norm = norm_of(hidden)
        self.out = nn.Conv2d(hidden, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.norm(self.conv(x))))


class Heads(nn.Module):
    """Boxes and segmentation [B, outputs, cells, cells]; the first outputs are heat, one for each object class."""

    def __init__(self, spec: PerceptionSpec) -> None:
        super().__init__()
        self.cells, self.num_heats = spec.cells, spec.num_heats
        self.boxes = Head(spec.hidden, spec.num_heats + BOX_OUTPUTS)
        self.segmentation = Head(spec.hidden, spec.num_grounds)

    def forward(self, x: Tensor) -> Tensor:
        """Return the predictions for queries [B, cells * cells, hidden]."""
        grid = x.transpose(1, 2).unflatten(2, (self.cells, self.cells)).contiguous()
        boxes = self.boxes(grid).float()
        heat, numbers = boxes[:, : self.num_heats] + INITIAL_HEAT, boxes[:, self.num_heats :]
        return torch.cat([heat, numbers, self.segmentation(grid).float()], dim=1)


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
        "lidar.stem": partial(PillarStem, num_features=POINT_FEATURES, values=lidar_values),
        "radar.stem": partial(PillarStem, num_features=RADAR_FEATURES, values=radar_values),
        "fusion.stem": FusionStem,
        "fusion.layers": FusionLayer,
        "heads": Heads,
    }
    return kinds[owner if owner.endswith("layers") else name](spec)


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
        """Fill the model, or a stage of it, in place from the safetensors in `folder`. Each rank reads its shards."""
        fix = "use the config.json that belongs to the weights, and leave model.shape empty"
        load_named_weights(self.module, folder, self._mismatches, report_progress, fix=fix)

    def _mismatches(self, sources: Mapping[str, Any]) -> list[str]:
        with torch.device("meta"):
            shapes = {name: list(each.shape) for name, each in Perception(self.spec).named_parameters()}
        wrong = [f"{name} is missing" for name in shapes if name not in sources]
        wrong += [f"{name} is unexpected" for name in sources if name not in shapes]
        for name, shape in shapes.items():
            if name in sources and (found := sources[name].get_slice(name).get_shape()) != shape:
                wrong.append(f"{name} has shape {found} instead of {shape}")
        return wrong


def perception_network(spec: PerceptionSpec, blocks: range | None = None) -> PerceptionNetwork:
    """Return the model, or the stage with these blocks, on the default device, uninitialised."""
    module = Perception(spec, blocks)
    return PerceptionNetwork(module, module.blocks, spec)
