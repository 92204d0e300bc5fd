"""The radar points of a simulated scene: several radars, several sweeps, in the coordinates of the vehicle.

Radar is sparse and coarse, but it measures the radial velocity, and its cross-section says how large an object is.
"""

import math
from dataclasses import dataclass

import numpy as np

from trimaran.core.input_rules import OBJECTS, RADAR_NUMBERS, SceneRules

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
    """Return the points [R, RADAR_NUMBERS] of all radars and sweeps of scene `number`, inside the grid.

    They have a generator of their own, so that a scene's other sensors are the same with and without radar.
    """
    draw = np.random.default_rng([seed, number, RADAR_NUMBERS])
    velocities = _velocities(draw, boxes)
    sweeps = [
        _sweep(draw, boxes, velocities, radar, age, rules)
        for age in np.arange(SWEEPS) * SWEEP_SECONDS
        for radar in RADARS
    ]
    points = np.concatenate(sweeps).astype(np.float32)
    return points[(np.abs(points[:, :2]) < rules.reach).all(axis=1)]


def _velocities(draw: np.random.Generator, boxes: np.ndarray) -> np.ndarray:
    """Return the velocity of each box [K, 2]: vehicles along their length, people in any direction."""
    kinds = boxes[:, -1].astype(np.int64)
    speeds = draw.uniform(0.2, 1.0, len(boxes)) * TOP_SPEEDS[kinds] * (draw.random(len(boxes)) > PARKED_FRACTION)
    ends = math.pi * draw.integers(2, size=len(boxes))
    walks = draw.uniform(-math.pi, math.pi, len(boxes))
    headings = np.where(kinds == OBJECTS.index("pedestrian"), walks, boxes[:, 6] + ends)
    return np.stack([np.cos(headings), np.sin(headings)], axis=1) * speeds[:, None]


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
