"""Files of nuScenes' sensors: LiDAR points, radar points and masks of the drivable surface."""

from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL.PngImagePlugin import PngImageFile

from trimaran.data.quarantine import BadSampleError
from trimaran.data.scenes.sensor_files import read_sensor_file

LIDAR_FIELDS = 5  # x, y, z, intensity from 0 to 255, and the beam
MAX_INTENSITY = 255.0
MAX_RADAR_POINTS = 1_000_000
MAX_HEADER_LINES = 32

# Points that are kept, as by the defaults of nuScenes' own code: valid ones, all but stopped ones, unambiguous ones.
KEPT_STATES = {"invalid_state": (0,), "dyn_prop": tuple(range(7)), "ambig_state": (3,)}
RADAR_FIELDS = ("x", "y", "z", "rcs", "vx_comp", "vy_comp")
KINDS = {"F": "f", "I": "i", "U": "u"}

MAP_METRES = 0.1  # of a pixel
ON_MAP = 225  # pixels at least as bright are drivable
MAX_MAP_PIXELS = 1 << 30


def read_lidar(path: Path) -> np.ndarray:
    """Return the points [P, 4] of a .pcd.bin file: x, y, z, and intensity from 0 to 1, in the LiDAR's coordinates."""
    content = read_sensor_file(path)
    if len(content) % (4 * LIDAR_FIELDS):
        raise BadSampleError(f"{path}: {len(content)} bytes are not points of {LIDAR_FIELDS} float32")
    points = np.frombuffer(content, dtype="<f4").reshape(-1, LIDAR_FIELDS)[:, :4].astype(np.float64)
    points[:, 3] /= MAX_INTENSITY
    return points


def read_radar(path: Path) -> np.ndarray:
    """Return the kept points [R, 6] of a .pcd file: x, y, z, cross-section and compensated velocity (vx, vy).

    They are in the radar's coordinates. A file whose first point is not a number holds no points.
    """
    content = read_sensor_file(path)
    header, body = _header(content, path)
    try:
        names, kinds = header["FIELDS"], zip(header["TYPE"], header["SIZE"], strict=True)
        dtype = np.dtype([(name, f"<{KINDS[kind]}{size}") for name, (kind, size) in zip(names, kinds, strict=True)])
        count = int(header["WIDTH"][0]) * int(header["HEIGHT"][0])
        if header["DATA"] != ["binary"] or any(each != "1" for each in header["COUNT"]):
            raise ValueError("DATA is not binary, or a field has several values")
        if not 0 <= count <= MAX_RADAR_POINTS or len(body) < count * dtype.itemsize:
            raise ValueError(f"it holds {len(body)} bytes instead of {count} points of {dtype.itemsize}")
        rows = np.frombuffer(body, dtype=dtype, count=count)
        points = np.stack([rows[name].astype(np.float64) for name in RADAR_FIELDS], axis=1)
        keep = np.logical_and.reduce([np.isin(rows[name], states) for name, states in KEPT_STATES.items()])
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise BadSampleError(f"{path}: it is not a radar file of nuScenes: {error}") from None
    if count and not np.isfinite(points[0]).all():
        return points[:0]
    return points[keep]


def _header(content: bytes, path: Path) -> tuple[dict[str, list[str]], bytes]:
    """Return the words of each line of a .pcd header, by the first of them, and the bytes after it."""
    header: dict[str, list[str]] = {}
    start = 0
    for _ in range(MAX_HEADER_LINES):
        end = content.find(b"\n", start)
        if end < 0:
            break
        name, *words = content[start:end].decode("ascii", "replace").split() or [""]
        header[name], start = words, end + 1
        if name == "DATA":
            return header, content[start:]
    raise BadSampleError(f"{path}: it has no .pcd header")


class DrivableMap:
    """A mask of the drivable surface, packed to one bit a pixel: a city has some 10^8 of them."""

    def __init__(self, path: Path) -> None:
        with PngImageFile(path) as image:  # Pillow's own limit of `Image.open` is below the size of a city
            if image.width * image.height > MAX_MAP_PIXELS:
                raise BadSampleError(f"{path}: it has more than {MAX_MAP_PIXELS:,} pixels")
            self._size = image.width, image.height
            self._rows = np.packbits(np.asarray(image.convert("L")) >= ON_MAP, axis=1)

    def contains(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return whether the places, in metres in the world, are drivable. Outside the mask nothing is."""
        (wide, tall), column = self._size, np.floor(x / MAP_METRES).astype(np.int64)
        row = tall - 1 - np.floor(y / MAP_METRES).astype(np.int64)  # y points up, rows go down
        known = (column >= 0) & (column < wide) & (row >= 0) & (row < tall)
        column, row = np.where(known, column, 0), np.where(known, row, 0)
        return known & ((self._rows[row, column >> 3] >> (7 - (column & 7))) & 1).astype(bool)


@lru_cache(maxsize=8)
def open_map(path: Path) -> DrivableMap:
    """Return the map in a PNG file. Forked loader processes share it once it is read."""
    read_sensor_file(path)
    try:
        return DrivableMap(path)
    except (OSError, SyntaxError, ValueError) as error:
        raise BadSampleError(f"{path}: {error}") from None
