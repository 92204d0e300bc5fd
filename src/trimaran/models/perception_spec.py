"""The shape of a perception model: cameras, LiDAR, radar, their fusion and two heads."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from trimaran.core import Bytes, Flops, ModelSection, UserError, did_you_mean
from trimaran.core.input_rules import GROUND, LIDAR_NUMBERS, OBJECTS, RADAR_NUMBERS, ScenePoints, SceneRules
from trimaran.core.regular_files import expand_user
from trimaran.models.config_fields import changed, read_json, refuse_unknown, wrong_value
from trimaran.models.outline import LayerOperators, Opaque, Outline, OutlineLayer, Tower
from trimaran.models.spec import InitialRules

MODEL_TYPE = "trimaran_perception"
MAX_CONFIG_BYTES = 1_000_000
POINT_FEATURES = LIDAR_NUMBERS + 2  # and the offset within the cell
RADAR_FEATURES = RADAR_NUMBERS + 2  # and the offset within the cell
BOX_OUTPUTS = 8  # offset of the centre within its cell (2), height, three sizes, and sine and cosine of the yaw
GROUPS = 8  # of GroupNorm
# For the cost model: points of a simulated scene, and at most so many in a cell on average.
NUM_POINTS, NUM_RADAR_POINTS, POINTS_A_CELL = 2500, 64, 4
# A fusion layer, as traced on one H200 (torch 2.11): its residual stream and what its norms save are fp32.
FUSION = LayerOperators(launches=90, norm_bytes=8, residual_bytes=96, biased=True)
BIAS_BYTES = 4  # of the attention bias of a cell and a token
LARGEST = 1 << 16  # for any number in a shape

# Kernels of the forward of a convolution with a norm and a ReLU, casts included: half as many without.
LAUNCHES = 16
# Bytes that a convolution moves per element of its input and of its output, with a norm and without (counted).
MOVED_IN, MOVED_OUT, MOVED_PLAIN = 10, 26, 6

_CONVOLUTIONS = ("conv1", "norm1", "conv2", "norm2", "skip")
PARTS: dict[str, tuple[str, ...]] = {
    "camera.stem": ("conv", "norm"),
    "camera.layers": _CONVOLUTIONS,
    "camera.neck": ("proj", "places", "norm"),
    "lidar.stem": ("fc1", "norm1", "fc2", "norm2"),
    "lidar.layers": _CONVOLUTIONS[:-1],
    "radar.stem": ("fc1", "norm1", "fc2", "norm2"),
    "radar.layers": _CONVOLUTIONS[:-1],
    "fusion.stem": ("queries", "join", "norm"),
    "fusion.layers": (
        "attention_norm", "attention", *(f"attention.{each}_proj" for each in "qkvo"),
        "mlp_norm", "mlp", "mlp.up_proj", "mlp.down_proj",
    ),
    "heads": tuple(
        f"{head}{part}" for head in ("boxes", "segmentation") for part in ("", ".conv", ".norm", ".out")
    ),
}  # fmt: skip
"""The modules inside each kind of block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PerceptionSpec:
    """The shape of a perception model.

    `camera_widths` are the channels of the camera's residual blocks, each at half the resolution of the previous one.
    LiDAR and radar pillars and fusion queries have `hidden` features. A sensor is left out by `cameras`, `lidar_layers`
    or `radar_layers` 0. Fusion layers attend to cameras, so without them there are none. See `SceneRules` for the rest.
    """

    name: str
    cameras: int
    height: int
    width: int
    camera_widths: tuple[int, ...]
    lidar_layers: int
    fusion_layers: int
    hidden: int
    heads: int
    ffn: int
    cells: int
    reach: float
    radar_layers: int = 0

    @property
    def block_names(self) -> tuple[str, ...]:
        """The blocks in forward order: the units of sharding, recompute and pipeline stages."""
        counts = {"camera": len(self.camera_widths)} if self.cameras else {}
        names: list[str] = []
        for tower, count in (counts | self.point_sensors | {"fusion": self.fusion_layers}).items():
            names += [f"{tower}.stem", *(f"{tower}.layers.{number}" for number in range(count))]
            names += ["camera.neck"] if tower == "camera" else []
        return *names, "heads"

    @property
    def point_sensors(self) -> dict[str, int]:
        """The sensors whose points become pillars, in forward order, with their number of layers."""
        layers = {"lidar": self.lidar_layers, "radar": self.radar_layers}
        return {sensor: count for sensor, count in layers.items() if count}

    @property
    def tower_names(self) -> tuple[str, ...]:
        """The towers, in forward order."""
        return *(("camera",) if self.cameras else ()), *self.point_sensors, "fusion", "heads"

    @property
    def layers(self) -> int:
        """Number of blocks that a pipeline can be split between."""
        return len(self.block_names)

    @property
    def num_blocks(self) -> int:
        return self.layers

    @property
    def language(self) -> None:
        """The decoder of the model: none."""
        return

    @property
    def vision(self) -> None:
        """The vision tower of a vision-language model: none."""
        return

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tokens of one camera."""
        stride = 2 ** len(self.camera_widths)
        return self.height // stride, self.width // stride

    @property
    def num_tokens(self) -> int:
        """Tokens of all cameras."""
        return self.cameras * self.grid[0] * self.grid[1]

    @property
    def num_heats(self) -> int:
        return len(OBJECTS)

    @property
    def num_grounds(self) -> int:
        return len(GROUND)

    @property
    def num_parameters(self) -> int:
        return perception_outline(self).num_parameters

    def initial_rules(self, name: str) -> InitialRules:
        """Return how the parameter `name` starts."""
        return InitialRules(depth=max(1, self.fusion_layers), by_fan_in=True)

    def tensor_sizes(self, whole: Collection[str] = ()) -> dict[str, int]:
        """Return what tensor parallelism splits, by name: heads and widths of the fusion."""
        return {"heads of the fusion": self.heads, "features of the fusion's feed-forward": self.ffn}

    def images(self) -> None:
        """Return the rules by which the data preprocesses images of conversations: none."""

    def scenes(self) -> SceneRules:
        """Return the rules by which the data renders scenes for this model."""
        return SceneRules(
            cameras=self.cameras, height=self.height, width=self.width, cells=self.cells, reach=self.reach,
            lidar=self.lidar_layers > 0, radar=self.radar_layers > 0,
        )  # fmt: skip


SHAPE = tuple(field.name for field in fields(PerceptionSpec) if field.name != "name")
OPTIONAL_SHAPE = ("radar_layers",)  # not in the config.json of older models
ABSENT_AT_ZERO = ("cameras", "lidar_layers", "radar_layers", "fusion_layers")

PERCEPTION_PRESETS = {
    "tiny": PerceptionSpec(
        name="tiny", cameras=4, height=32, width=64, camera_widths=(16, 48), lidar_layers=2, fusion_layers=2,
        hidden=48, heads=4, ffn=96, cells=24, reach=12.0,
    ),
    "base": PerceptionSpec(
        name="base", cameras=6, height=256, width=512, camera_widths=(64, 128, 256, 512), lidar_layers=6,
        fusion_layers=6, hidden=256, heads=8, ffn=1024, cells=96, reach=48.0,
    ),
}  # fmt: skip
PERCEPTION_PRESETS |= {
    "tiny-radar": replace(PERCEPTION_PRESETS["tiny"], name="tiny-radar", radar_layers=1),
    "base-radar": replace(PERCEPTION_PRESETS["base"], name="base-radar", radar_layers=2),
}


def perception_spec(section: ModelSection) -> PerceptionSpec:
    """Return the shape of `section`: a preset or the config.json of a trained model, with the given changes."""
    if section.path is None:
        name = section.preset or "tiny"
        if name not in PERCEPTION_PRESETS:
            similar = did_you_mean(name, PERCEPTION_PRESETS)
            raise UserError(
                "M001.no-preset-perception",
                where="model.preset",
                name=name,
                similar=similar,
                perception_presets=", ".join(PERCEPTION_PRESETS),
            )
        return _reshaped(PERCEPTION_PRESETS[name], section.shape, "model.shape")
    path = expand_user(section.path)
    folder = path.parent if path.name == "config.json" else path
    file = folder / "config.json"
    if not file.is_file():
        raise UserError("M040.no-perception-model", where=f"model.path {path}")
    config = read_json(file, limit_bytes=MAX_CONFIG_BYTES)
    kind = config.pop("model_type", None)
    if kind != MODEL_TYPE:
        raise UserError("M040.model-type", where=str(file), kind=kind, model_type=MODEL_TYPE)
    shape = {key: config[key] for key in SHAPE if key in config}
    if missing := [key for key in SHAPE if key not in shape and key not in OPTIONAL_SHAPE]:
        raise UserError("M040.shape-not-complete", where=str(file), missing=missing[0])
    spec = _reshaped(replace(PERCEPTION_PRESETS["tiny"], name=folder.resolve().name), shape, str(file))
    return _reshaped(spec, section.shape, "model.shape")


def perception_config(spec: PerceptionSpec) -> dict[str, Any]:
    """Return the config.json of a model with this shape."""
    shape = {key: getattr(spec, key) for key in SHAPE}
    return {"model_type": MODEL_TYPE, "architectures": ["Perception"]} | shape


def _reshaped(spec: PerceptionSpec, shape: Mapping[str, Any], where: str) -> PerceptionSpec:
    refuse_unknown(shape, SHAPE, where)
    spec = changed(PerceptionSpec, spec, shape, where)
    for field, wrong in _invalid_fields(spec):
        raise wrong_value(f"{field}: {wrong}", f"{where}.{field}")
    return spec


def _invalid_fields(spec: PerceptionSpec) -> Iterator[tuple[str, str]]:
    """Yield (field, problem) for each invalid field."""
    for field in SHAPE:
        value, least = getattr(spec, field), 0 if field in ABSENT_AT_ZERO else 1
        values = value if isinstance(value, tuple) else (value,)
        if not values or not all(0 < each <= LARGEST or each == least == 0 for each in values):
            yield field, f"{value} is not from {least} to {LARGEST}"
    if 0 < spec.cameras < 3:
        yield "cameras", "fewer than 3 do not cover all directions"
    if not spec.cameras and not spec.point_sensors:
        yield "cameras", "the model has no sensor: no cameras, no lidar_layers and no radar_layers"
    if (spec.fusion_layers > 0) != (spec.cameras > 0):
        reason = "attend to cameras, and there are none" if spec.fusion_layers else "leave the cameras without effect"
        yield "fusion_layers", f"{spec.fusion_layers} fusion layers {reason}"
    stride = 2 ** len(spec.camera_widths)
    for field in ("height", "width"):
        if getattr(spec, field) % stride:
            yield field, f"{getattr(spec, field)} pixels cannot be halved {len(spec.camera_widths)} times"
    if spec.hidden % spec.heads:
        yield "heads", f"{spec.heads} heads do not divide hidden {spec.hidden}"
    for field, channels in (("camera_widths", spec.camera_widths), ("hidden", (spec.hidden,))):
        if wrong := [each for each in channels if each % min(GROUPS, each)]:
            yield field, f"{wrong[0]} channels are not a multiple of {GROUPS} groups"


def perception_outline(spec: PerceptionSpec, points: ScenePoints | None = None) -> Outline:
    """Return the outline for scenes with these `points`, or simulated ones. Convolutions are given as totals."""
    cells, hidden = spec.cells * spec.cells, spec.hidden
    layer = OutlineLayer(
        operators=FUSION, hidden=hidden, heads=spec.heads, kv_heads=spec.heads, head_dim=hidden // spec.heads,
        ffn=spec.ffn, gated=False, causal=False, extras=4 * hidden,
    )  # fmt: skip
    queries = _elementwise("queries", cells * hidden + 2 * hidden, cells, hidden)
    if len(spec.point_sensors) > 1:
        join = _convolution(cells, len(spec.point_sensors) * hidden, hidden, kernel=1, images=0)
        queries = _merged("queries", [join, queries])
    if points is not None and points.own_rigs:  # all fusion layers share the bias of a scene
        queries = replace(queries, saved_bytes=Bytes(queries.saved_bytes + BIAS_BYTES * cells * spec.num_tokens))
    heads = _merged("heads", [
        part
        for outputs in (spec.num_heats + BOX_OUTPUTS, spec.num_grounds)
        for part in (_convolution(cells, hidden, hidden), _convolution(cells, hidden, outputs, kernel=1, images=0))
    ])  # fmt: skip
    heads = replace(heads, parameters=heads.parameters + spec.num_heats + BOX_OUTPUTS + spec.num_grounds)  # biases
    towers = (
        *([Tower(name="camera", runs=_camera(spec), hidden=spec.camera_widths[-1], positions=spec.num_tokens)]
          if spec.cameras else []),
        *(Tower(name=sensor, runs=_pillars(spec, sensor, points), hidden=hidden, positions=cells)
          for sensor in spec.point_sensors),
        Tower(
            name="fusion", runs=((queries, 1), (layer, spec.fusion_layers))[: 2 if spec.cameras else 1], hidden=hidden,
            positions=cells, segment=spec.num_tokens,
        ),
        Tower(name="heads", runs=((heads, 1),), hidden=hidden, positions=cells),
    )  # fmt: skip
    return Outline(name=spec.name, towers=towers)


def _camera(spec: PerceptionSpec) -> tuple[tuple[Opaque, int], ...]:
    positions, in_channels = spec.cameras * (spec.height // 2) * (spec.width // 2), spec.camera_widths[0]
    blocks = [_merged("camera stem", [_convolution(positions, 3, in_channels, images=spec.cameras, stride=2)])]
    for number, out_channels in enumerate(spec.camera_widths):
        positions //= 4 if number else 1
        parts = [
            _convolution(positions, in_channels, out_channels, images=spec.cameras, stride=2 if number else 1),
            _convolution(positions, out_channels, out_channels, images=spec.cameras),
        ]
        if in_channels != out_channels or number:
            parts.append(
                _convolution(positions, in_channels, out_channels, kernel=1, images=0, stride=2 if number else 1)
            )
        blocks.append(_merged(f"camera layer {number}", parts))
        in_channels = out_channels
    proj = _convolution(positions, in_channels, spec.hidden, kernel=1, images=0)
    blocks.append(
        _merged("camera neck", [proj, _elementwise("", (positions + 2) * spec.hidden, positions, spec.hidden)])
    )
    return tuple((each, 1) for each in blocks)


def _pillars(spec: PerceptionSpec, sensor: str, points: ScenePoints | None) -> tuple[tuple[Opaque, int], ...]:
    """Return the blocks of LiDAR or radar: an MLP for each point of a scene, then convolutions over the cells."""
    cells, hidden = spec.cells * spec.cells, spec.hidden
    features, simulated = (POINT_FEATURES, NUM_POINTS) if sensor == "lidar" else (RADAR_FEATURES, NUM_RADAR_POINTS)
    count = min(simulated, POINTS_A_CELL * cells)
    if points is not None:
        count = max(1, round(points.lidar if sensor == "lidar" else points.radar))
    mlp = [_convolution(count, each, hidden, kernel=1, images=count) for each in (features, hidden)]
    stem = _merged(f"{sensor} stem", [*mlp, _elementwise("", 0, cells, hidden)])
    layer = _merged(f"{sensor} layer", [_convolution(cells, hidden, hidden)] * 2)
    return (stem, 1), (layer, spec.point_sensors[sensor])


def _convolution(
    positions: int, in_channels: int, out_channels: int, *, kernel: int = 3, stride: int = 1, images: int = 1
) -> Opaque:
    """Return a convolution at each of the `positions` of so many images, then a norm and a ReLU; 0 images: no norm.

    It saves a 16-bit copy of its input, the norm its input in fp32, and the ReLU its result. Traffic is that of the
    kernels on a GPU, a third of forward and backward: casts, changes of layout, the norm, and the ReLU.
    """
    weights, normed = in_channels * out_channels * kernel * kernel, images > 0
    inputs = positions * stride * stride * in_channels
    moved = MOVED_IN * inputs + (MOVED_OUT if normed else MOVED_PLAIN) * positions * out_channels
    return Opaque(
        name="", parameters=weights + 2 * out_channels * normed,
        sample_flops=Flops(2.0 * positions * weights),
        saved_bytes=Bytes(2 * inputs + 8 * positions * out_channels * normed),
        moved_bytes=Bytes(moved),
        output_bytes=Bytes(4 * positions * out_channels), num_kernels=LAUNCHES if normed else LAUNCHES // 2,
        norm_row_bytes=4 * positions * out_channels // (min(GROUPS, out_channels) * images) if normed else 0,
    )  # fmt: skip


def _elementwise(name: str, parameters: int, positions: int, features: int) -> Opaque:
    size = 4 * positions * features
    return Opaque(
        name=name, parameters=parameters, sample_flops=Flops(0.0), saved_bytes=Bytes(2 * size),
        moved_bytes=Bytes(4 * size), output_bytes=Bytes(size), num_kernels=2,
    )  # fmt: skip


def _merged(name: str, parts: list[Opaque]) -> Opaque:
    """Return the parts as one block; its output is that of the last part."""
    added = [field.name for field in fields(Opaque) if field.name not in ("name", "output_bytes")]
    sums: dict[str, Any] = {field: sum(getattr(each, field) for each in parts) for field in added}
    return Opaque(name=name, output_bytes=parts[-1].output_bytes, **sums)
