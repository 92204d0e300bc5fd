"""Simulated traffic scenes with cameras, LiDAR and radar. A scene is a function of the seed and its number.

Both sensors are needed: LiDAR measures position and size; only cameras see colour, which distinguishes a taxi from a
car and road from terrain.
"""

import math
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from trimaran.core import BOX_NUMBERS, CAMERA_METRES, GROUND, OBJECTS, RADAR_NUMBERS, SceneRules

SWEEPS, SWEEP_SECONDS = 3, 0.075
FIELD_OF_VIEW = math.radians(60)  # to each side
RANGE_NOISE_METRES, AZIMUTH_NOISE, SPEED_NOISE, CROSS_SECTION_NOISE = 0.1, math.radians(1), 0.1, 3.0
CLUTTER_POINTS, CLUTTER_CROSS_SECTION = 3.0, -5.0  # of one radar in one sweep, on average; dBsm
MIN_RANGE_METRES = 0.2
PARKED_FRACTION = 0.3

# For each of OBJECTS: cross-section in dBsm, top speed in m/s, and points that one radar sees in a sweep on average.
CROSS_SECTIONS = np.array([10.0, 10.0, 18.0, -2.0])
TOP_SPEEDS = np.array([12.0, 12.0, 9.0, 1.8])
POINTS_A_SWEEP = np.array([3.0, 3.0, 5.0, 1.2])
LIDAR_METRES, LIDAR_BEAMS, LIDAR_COLUMNS = 1.8, 16, 200
LIDAR_DEGREES = (-22.0, 2.0)  # elevation of the lowest and the highest beam
LIDAR_NOISE_METRES, LIDAR_DROP_FRACTION = 0.03, 0.05
MIN_BOX_POINTS = 3  # a box with fewer LiDAR points is not a target
MAX_OBJECTS, PLACEMENT_ATTEMPTS = 6, 12
MIN_DISTANCE_METRES, MARGIN_METRES = 3.0, 0.5
PIXEL_NOISE = 8.0
GROUND_HIT, SKY = -1, -2
# length, width, height in metres of each of OBJECTS; each box is up to a tenth larger or smaller.
SIZES = np.array([[4.0, 1.8, 1.5], [4.0, 1.8, 1.5], [6.5, 2.4, 2.8], [0.7, 0.7, 1.7]], dtype=np.float32)
OBJECT_FRACTIONS = np.array([0.3, 0.3, 0.15, 0.25])  # of each of OBJECTS
TAXI_YELLOW = np.array([225.0, 190.0, 20.0], dtype=np.float32)
PAINTS = np.array([[200, 40, 40], [40, 70, 190], [215, 215, 220], [45, 45, 50], [120, 50, 130]], dtype=np.float32)
TERRAIN_GREEN, ROAD_GREY, SKY_BLUE = (
    np.array(each, dtype=np.float32) for each in ((80, 120, 60), (95, 95, 98), (165, 200, 235))
)
FACE_BRIGHTNESS = np.array([0.7, 0.85, 1.0], dtype=np.float32)  # of faces along a box, across it and on top


@dataclass(frozen=True, slots=True)
class RadarMount:
    """Where a radar is on the vehicle, in metres, and where it looks, in radians from x to y."""

    x: float
    y: float
    metres: float
    heading: float


RADARS = (
    RadarMount(1.8, 0.0, 0.5, 0.0),
    RadarMount(1.2, 0.8, 0.6, math.pi / 2),
    RadarMount(1.2, -0.8, 0.6, -math.pi / 2),
    RadarMount(-1.5, 0.6, 0.6, math.pi),
    RadarMount(-1.5, -0.6, 0.6, math.pi),
)


def radar_points(seed: int, number: int, boxes: np.ndarray, rules: SceneRules) -> np.ndarray:
    """Return the points [R, RADAR_NUMBERS] of all radars and sweeps of scene `number`, inside the grid."""
    # They have a generator of their own, so that a scene's other sensors are the same with and without radar.
    draw, kinds = np.random.default_rng([seed, number, RADAR_NUMBERS]), boxes[:, -1].astype(np.int64)
    # Vehicles move along their length, people in any direction.
    speeds = draw.uniform(0.2, 1.0, len(boxes)) * TOP_SPEEDS[kinds] * (draw.random(len(boxes)) > PARKED_FRACTION)
    ends = math.pi * draw.integers(2, size=len(boxes))
    walks = draw.uniform(-math.pi, math.pi, len(boxes))
    headings = np.where(kinds == OBJECTS.index("pedestrian"), walks, boxes[:, 6] + ends)
    velocities = np.stack([np.cos(headings), np.sin(headings)], axis=1) * speeds[:, None]
    sweeps = [
        _sweep(draw, boxes, velocities, radar, age, rules)
        for age in np.arange(SWEEPS) * SWEEP_SECONDS
        for radar in RADARS
    ]
    points = np.concatenate(sweeps).astype(np.float32)
    return points[(np.abs(points[:, :2]) < rules.reach).all(axis=1)]


def _sweep(
    draw: np.random.Generator,
    boxes: np.ndarray,
    velocities: np.ndarray,
    radar: RadarMount,
    age: float,
    rules: SceneRules,
) -> np.ndarray:
    """Return the points of one radar `age` seconds ago."""
    kinds = boxes[:, -1].astype(np.int64)
    counts = draw.poisson(POINTS_A_SWEEP[kinds])
    owners = np.repeat(np.arange(len(boxes)), counts)
    along, across = (draw.uniform(-0.5, 0.5, (2, len(owners)))) * boxes[owners, 3:5].T
    cos, sin = np.cos(boxes[owners, 6]), np.sin(boxes[owners, 6])
    objects = boxes[owners, :2] - velocities[owners] * age + np.stack([along * cos - across * sin,
                                                                       along * sin + across * cos], axis=1)  # fmt: skip
    clutter = draw.uniform(-rules.reach, rules.reach, (draw.poisson(CLUTTER_POINTS), 2))
    places = np.concatenate([objects, clutter])
    moving = np.concatenate([velocities[owners], np.zeros_like(clutter)])
    strengths = np.concatenate([CROSS_SECTIONS[kinds[owners]], np.full(len(clutter), CLUTTER_CROSS_SECTION)])
    offsets = places - [radar.x, radar.y]
    away = np.hypot(*offsets.T) + draw.normal(0, RANGE_NOISE_METRES, len(places))
    azimuths = np.arctan2(offsets[:, 1], offsets[:, 0]) + draw.normal(0, AZIMUTH_NOISE, len(places))
    toward = np.stack([np.cos(azimuths), np.sin(azimuths)], axis=1)
    speeds = (moving * toward).sum(axis=1) + draw.normal(0, SPEED_NOISE, len(places))
    points = np.empty((len(places), RADAR_NUMBERS))
    points[:, :2] = toward * away[:, None] + [radar.x, radar.y]
    points[:, 2], points[:, 6] = radar.metres, age
    points[:, 3] = strengths + draw.normal(0, CROSS_SECTION_NOISE, len(places))
    points[:, 4:6] = toward * speeds[:, None]
    turned = np.abs((azimuths - radar.heading + math.pi) % (2 * math.pi) - math.pi)
    return points[(turned < FIELD_OF_VIEW) & (away > MIN_RANGE_METRES)]


@dataclass(frozen=True, slots=True)
class SimulatedScene:
    """One scene.

    `cameras` are u8 [cameras, 3, height, width], `points` f32 [P, 4] (x, y, z, intensity), `boxes` f32 [K, 8] (x, y, z,
    length, width, height, yaw, class), `segmentation` i64 [cells, cells], UNKNOWN_GROUND where the truth is unknown.
    `radar` are f32 [R, RADAR_NUMBERS] (x, y, z, cross-section, vx, vy, age), and `rig` [cameras, RIG_NUMBERS] is the
    calibration of the cameras if each scene has its own. Arrays of sensors that the model lacks are empty.
    """

    cameras: np.ndarray
    points: np.ndarray
    boxes: np.ndarray
    segmentation: np.ndarray
    radar: np.ndarray = field(default_factory=lambda: np.zeros((0, RADAR_NUMBERS), dtype=np.float32))
    rig: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class SensorRays:
    """Rays from one point. Each column has one azimuth; `rays` f32 [columns, rows, 3] are unit vectors."""

    azimuths: np.ndarray
    rays: np.ndarray
    metres: float


@dataclass(frozen=True, slots=True)
class Road:
    """A straight road: its direction, the distance of its centre line from the vehicle, and half its width."""

    heading: float
    offset: float
    half_width: float

    def across(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return the distance of each point from the centre line; positive to the left."""
        return y * math.cos(self.heading) - x * math.sin(self.heading) - self.offset


def blank_scene(rules: SceneRules) -> SimulatedScene:
    """Return a scene without content, in place of a quarantined one."""
    cameras = np.zeros((rules.cameras, 3, rules.height, rules.width), dtype=np.uint8)
    points, boxes = np.zeros((0, 4), dtype=np.float32), np.zeros((0, BOX_NUMBERS), dtype=np.float32)
    return SimulatedScene(cameras, points, boxes, np.zeros((rules.cells, rules.cells), dtype=np.int64))


def make_scene(seed: int, number: int, rules: SceneRules) -> SimulatedScene:
    """Return scene `number` for this seed."""
    draw = np.random.default_rng([seed, number])
    heading = draw.uniform(-0.4, 0.4)
    roads = [Road(heading, draw.uniform(-2, 2), draw.uniform(3, 4.5))]
    if draw.random() < 0.5:  # a crossing road
        heading = heading + math.pi / 2 + draw.uniform(-0.2, 0.2)
        roads.append(Road(heading, draw.uniform(-8, 8), draw.uniform(2.5, 4)))
    boxes = _boxes(draw, roads, rules)
    distances, hits, _ = cast(_lidar(), boxes)
    counts = np.bincount(hits[hits >= 0], minlength=len(boxes))
    points = _points(draw, distances, hits, rules)
    blank = blank_scene(rules)
    images = _images(draw, boxes, roads, rules) if rules.cameras else blank.cameras
    radar = radar_points(seed, number, boxes, rules) if rules.radar else blank.radar
    boxes, centres = boxes[counts >= MIN_BOX_POINTS], cell_centres(rules)
    on_road = _on_road(roads, centres[:, None], centres[None, :])
    classes = np.where(on_road, GROUND.index("road"), GROUND.index("terrain"))
    return SimulatedScene(images, points, boxes, with_objects(classes, boxes, rules), radar)


def cast(rig: SensorRays, boxes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return distance, hit box (or GROUND_HIT, SKY) and brightness of each ray [columns, rows], by the slab method."""
    down = rig.rays[..., 2] < -1e-3
    with np.errstate(divide="ignore"):
        distances = np.where(down, -rig.metres / rig.rays[..., 2], np.float32(np.inf)).astype(np.float32)
    hits = np.where(down, GROUND_HIT, SKY)
    shades = np.ones_like(distances)
    for number, (x, y, z, *size, yaw, _) in enumerate(boxes):
        half = np.array(size, dtype=np.float32) / 2
        away, wide = math.hypot(x, y), math.hypot(half[0], half[1])
        reach = math.asin(min(1.0, wide / away))
        turned = np.abs((rig.azimuths - math.atan2(y, x) + math.pi) % (2 * math.pi) - math.pi)
        columns = np.flatnonzero(turned <= reach)
        if not len(columns):
            continue
        cos, sin = math.cos(yaw), math.sin(yaw)
        axes = np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]], dtype=np.float32)  # columns: the box's own axes
        rays = rig.rays[columns] @ axes
        rays[np.abs(rays) < 1e-6] = 1e-6
        start = (np.array([-x, -y, rig.metres - z], dtype=np.float32) @ axes).astype(np.float32)
        middle, extent = -start / rays, half / np.abs(rays)
        near, far = middle - extent, (middle + extent).min(axis=-1)
        face = near.argmax(axis=-1)
        enter = near.max(axis=-1)
        closer = (enter < far) & (enter > 0) & (enter < distances[columns])
        distances[columns] = np.where(closer, enter, distances[columns])
        hits[columns] = np.where(closer, number, hits[columns])
        shades[columns] = np.where(closer, FACE_BRIGHTNESS[face], shades[columns])
    return distances, hits, shades


@lru_cache(maxsize=8)
def _lidar() -> SensorRays:
    azimuths = (np.arange(LIDAR_COLUMNS) + 0.5) * (2 * math.pi / LIDAR_COLUMNS) - math.pi
    heights = np.radians(np.linspace(*LIDAR_DEGREES, LIDAR_BEAMS))
    flat = np.stack([np.cos(azimuths), np.sin(azimuths)], axis=-1)[:, None] * np.cos(heights)[None, :, None]
    up = np.broadcast_to(np.sin(heights)[None, :, None], (*flat.shape[:2], 1))
    return SensorRays(azimuths, np.concatenate([flat, up], axis=-1).astype(np.float32), LIDAR_METRES)


@lru_cache(maxsize=8)
def camera_rays(rules: SceneRules) -> SensorRays:
    """Return the rays of all cameras: their columns side by side, left to right within each camera."""
    right = (np.arange(rules.width) + 0.5 - rules.width / 2) / rules.focal
    up = (rules.horizon - np.arange(rules.height) - 0.5) / rules.focal
    azimuths = (np.array(rules.headings)[:, None] - np.arctan(right)).ravel()
    ahead = np.tile(np.sqrt(1 + right**2), rules.cameras)  # distance to the image plane at each column
    flat = np.stack([np.cos(azimuths), np.sin(azimuths)], axis=-1) * ahead[:, None]
    rays = np.empty((len(azimuths), rules.height, 3), dtype=np.float32)
    rays[..., :2], rays[..., 2] = flat[:, None], up
    return SensorRays(azimuths, rays / np.linalg.norm(rays, axis=-1, keepdims=True), CAMERA_METRES)


def _boxes(draw: np.random.Generator, roads: list[Road], rules: SceneRules) -> np.ndarray:
    """Return boxes on the ground that touch neither each other nor the vehicle; yaw is in [-pi/2, pi/2)."""
    boxes: list[np.ndarray] = []
    wanted, edge = draw.integers(2, MAX_OBJECTS + 1), rules.reach - MARGIN_METRES
    for _ in range(wanted * PLACEMENT_ATTEMPTS):
        if len(boxes) == wanted:
            break
        kind = int(draw.choice(len(OBJECTS), p=OBJECT_FRACTIONS))
        length, width, height = SIZES[kind] * draw.uniform(0.9, 1.1, 3)
        yaw = draw.uniform(-math.pi / 2, math.pi / 2)
        x, y = draw.uniform(-edge, edge, 2)
        road = roads[draw.integers(len(roads))]
        if OBJECTS[kind] != "pedestrian" and draw.random() < 0.8:
            yaw = road.heading + draw.normal(0, 0.1)
            shift = road.across(x, y) - draw.uniform(-1, 1) * max(0.0, road.half_width - width / 2)
            x, y = x + shift * math.sin(road.heading), y - shift * math.cos(road.heading)
        yaw = (yaw + math.pi / 2) % math.pi - math.pi / 2
        wide = math.hypot(length, width) / 2
        clear = all(math.hypot(x - each[0], y - each[1]) > wide + math.hypot(*each[3:5]) / 2 for each in boxes)
        if clear and max(abs(x), abs(y)) < edge and math.hypot(x, y) > MIN_DISTANCE_METRES + wide:
            boxes.append(np.array([x, y, height / 2, length, width, height, yaw, kind], dtype=np.float32))
    return np.array(boxes, dtype=np.float32).reshape(-1, BOX_NUMBERS)


def _points(draw: np.random.Generator, distances: np.ndarray, hits: np.ndarray, rules: SceneRules) -> np.ndarray:
    """Return the LiDAR points: some are dropped, the rest are noisy. Intensity does not depend on the class."""
    rig = _lidar()
    returned = (hits != SKY) & (draw.random(hits.shape, dtype=np.float32) > LIDAR_DROP_FRACTION)
    noise = draw.standard_normal(np.count_nonzero(returned), dtype=np.float32)
    away = distances[returned] + noise * LIDAR_NOISE_METRES
    points = np.empty((len(away), 4), dtype=np.float32)
    points[:, :3] = rig.rays[returned] * away[:, None]
    points[:, 2] += rig.metres
    points[:, 3] = draw.random(len(away), dtype=np.float32) / (1 + 0.1 * away)
    return points[(np.abs(points[:, :2]) < rules.reach).all(axis=1)]


def _images(draw: np.random.Generator, boxes: np.ndarray, roads: list[Road], rules: SceneRules) -> np.ndarray:
    rig = camera_rays(rules)
    distances, hits, shades = cast(rig, boxes)
    kinds = boxes[:, -1].astype(np.int64)
    paints = PAINTS[draw.integers(len(PAINTS), size=len(boxes))]
    paints = np.where((kinds == OBJECTS.index("taxi"))[:, None], TAXI_YELLOW, paints)
    colours = np.concatenate([paints, SKY_BLUE[None], TERRAIN_GREEN[None], ROAD_GREY[None]])
    sky, terrain, road = (len(boxes) + each for each in range(3))
    # Where each ray meets the ground. Rays into the sky have an infinite distance, which would give NaN: use 0.
    flat = np.where(np.isfinite(distances), distances, 0)[..., None] * rig.rays[..., :2]
    on_road = _on_road(roads, flat[..., 0], flat[..., 1])
    which = np.where(hits == SKY, sky, np.where(hits == GROUND_HIT, np.where(on_road, road, terrain), hits))
    noise = draw.standard_normal((*which.shape, 3), dtype=np.float32) * PIXEL_NOISE
    light = draw.uniform(0.8, 1.1)
    pixels = (colours[which] * (shades * np.float32(light))[..., None] + noise).clip(0, 255).astype(np.uint8)
    shape = (rules.cameras, rules.width, rules.height, 3)
    return np.ascontiguousarray(pixels.reshape(shape).transpose(0, 3, 2, 1))


def cell_centres(rules: SceneRules) -> np.ndarray:
    """Return the x, or y, of the centres of the cells along one side of the grid."""
    return (np.arange(rules.cells, dtype=np.float32) + 0.5) * rules.cell - rules.reach


def with_objects(classes: np.ndarray, boxes: np.ndarray, rules: SceneRules) -> np.ndarray:
    """Return the classes of the cells, where those whose centre is under a box are objects."""
    centres, classes = cell_centres(rules), classes.copy()
    x, y = centres[:, None], centres[None, :]
    for box_x, box_y, _, length, width, _, yaw, _ in boxes:
        cos, sin = math.cos(yaw), math.sin(yaw)
        along, across = (x - box_x) * cos + (y - box_y) * sin, (y - box_y) * cos - (x - box_x) * sin
        classes[(np.abs(along) < length / 2) & (np.abs(across) < width / 2)] = GROUND.index("object")
    return classes.astype(np.int64)


def _on_road(roads: list[Road], x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.logical_or.reduce([np.abs(road.across(x, y)) < road.half_width for road in roads])
