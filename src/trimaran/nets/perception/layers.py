"""The blocks of the perception model. Their norms cover one scene at a time, so results do not depend on the plan."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimaran.core.input_rules import SceneRules
from trimaran.models.perception_spec import BOX_OUTPUTS, GROUPS, POINT_FEATURES, RADAR_FEATURES, PerceptionSpec

INITIAL_HEAT = -2.0  # added to the heat logits: few cells hold an object, and learning that first would take long
PIXEL_MEAN, PIXEL_STD = 0.5, 0.25
RADAR_DBSM_MEAN, RADAR_DBSM_STD, RADAR_METRES_A_SECOND = 5.0, 10.0, 5.0


class GroupNorm(nn.GroupNorm):
    """GroupNorm that returns the input's dtype."""

    def forward(self, input: Tensor) -> Tensor:
        x = input
        return F.group_norm(x, self.num_groups, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


class SceneLayerNorm(nn.LayerNorm):
    """LayerNorm that returns the input's dtype."""

    def forward(self, input: Tensor) -> Tensor:
        x = input
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


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
        """Return pillars [num_scenes, hidden, cells, cells] of `points` [P, ...] of the scenes `rows` [P]; P may be 0.

        All points must be inside the grid.
        """
        place, cell_numbers = place_features(points, self.rules)
        features = torch.cat([place[:, :2], self.values(points), place[:, 2:]], dim=1)
        x = F.relu(self.norm2(self.fc2(F.relu(self.norm1(self.fc1(features))))))
        cells = self.rules.cells
        cell_numbers = cell_numbers + rows.long() * cells * cells
        pillars = x.new_zeros(num_scenes * cells * cells, x.shape[1])
        # No value is negative after the ReLU, so 0 means no points.
        pillars = pillars.scatter_reduce(0, cell_numbers[:, None].expand_as(x), x, "amax")
        return pillars.view(num_scenes, cells, cells, -1).permute(0, 3, 1, 2).contiguous()


class LidarStem(PillarStem):
    """Pillars of LiDAR points [P, 4]: x, y, z, intensity."""

    def __init__(self, spec: PerceptionSpec) -> None:
        super().__init__(spec, POINT_FEATURES, lidar_values)


class RadarStem(PillarStem):
    """Pillars of radar points [P, 7]: x, y, z, radar cross-section, radial velocity (vx, vy), age."""

    def __init__(self, spec: PerceptionSpec) -> None:
        super().__init__(spec, RADAR_FEATURES, radar_values)


def lidar_values(points: Tensor) -> Tensor:
    """Return height and intensity of each point, scaled to about 1."""
    return points[:, 2:] - 0.5


def radar_values(points: Tensor) -> Tensor:
    """Return height, cross-section, velocity and age of each point, scaled to about 1."""
    z, cross_section, *velocity, age = points[:, 2:].unbind(1)
    velocity = [each / RADAR_METRES_A_SECOND for each in velocity]
    return torch.stack([z - 0.5, (cross_section - RADAR_DBSM_MEAN) / RADAR_DBSM_STD, *velocity, 2 * age], dim=1)


def place_features(points: Tensor, rules: SceneRules) -> tuple[Tensor, Tensor]:
    """Return the place of each point in the grid and in its cell [P, 4], scaled to about 1, and its cell number."""
    flat = (points[:, :2] + rules.reach) / rules.cell
    cells = flat.floor().clamp(0, rules.cells - 1)
    inside = 2 * (flat - cells) - 1
    index = cells.long()
    return torch.cat([points[:, :2] / rules.reach, inside], dim=1), index[:, 0] * rules.cells + index[:, 1]


class FusionStem(nn.Module):
    """Makes the queries: the pillars of each cell plus a learnt embedding of the cell.

    `join` maps the pillars of several sensors to one.
    """

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
        """Return the attention output for queries `x` [B, Q, hidden].

        `bias` [Q, num_tokens], or [B, 1, Q, num_tokens] if scenes differ, is added to the scores.
        """
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
