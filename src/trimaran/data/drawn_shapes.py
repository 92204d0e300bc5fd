"""Drawn shapes with questions, captions and answers: pictures to learn to see with, without a file to download.

A sample is a pure function of its number.
"""

import io
from dataclasses import dataclass

import numpy as np
from PIL import Image

NUM_SAMPLES = 12_000
SEED, VERSION = 20260, 4  # a change to what is drawn gets a new version
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 230),
    "yellow": (240, 210, 40),
    "white": (245, 245, 245),
    "black": (15, 15, 15),
}
SHAPES = ("circle", "square", "triangle", "cross", "ring")
COUNTS = ("none", "one", "two", "three", "four")
SIDES = (32, 40, 48, 56, 64)
HOW_MANY = (0.45, 0.3, 0.15, 0.1)  # of the images have one shape, two, three, four
CELL = 16  # the least room of one shape, in pixels a side
KINDS = (0.35, 0.25, 0.3, 0.1)  # of the questions: a colour, how many, whether there is a colour, a shape
TEXT_ONLY, CAPTIONS = 0.1, 0.06  # shares of the samples without an image, and of those that only describe one
FACTS = (
    ("which shape has three corners?", "triangle"),
    ("which shape has four corners?", "square"),
    ("which shape has no corner and is full?", "circle"),
    ("which shape has a hole?", "ring"),
    ("what colour is snow?", "white"),
    ("what colour is coal?", "black"),
    ("what colour is grass?", "green"),
    ("what comes after one?", "two"),
    ("what comes after two?", "three"),
    ("what comes before four?", "three"),
)


@dataclass(frozen=True, slots=True)
class Thing:
    shape: str
    colour: str


@dataclass(frozen=True, slots=True)
class Drawn:
    """One sample: a PNG, or nothing; a question, or nothing when the answer describes the picture."""

    image: bytes
    question: str
    answer: str


def draw(number: int) -> Drawn:
    """Return sample `number`."""
    random = np.random.default_rng([SEED, number])
    if random.random() < TEXT_ONLY:
        return Drawn(b"", *FACTS[random.integers(len(FACTS))])
    width, height = random.choice(SIDES, 2).tolist()
    things = _choose(random, (width // CELL) * (height // CELL))
    image = _png(_render(random, things, width, height))
    if random.random() < CAPTIONS:
        return Drawn(image, "", " and ".join(f"a {thing.colour} {thing.shape}" for thing in things))
    return Drawn(image, *_ask(random, things))


def _choose(random: np.random.Generator, room: int) -> list[Thing]:
    """Return one to four different shapes, in the order in which they are drawn: left to right, then down."""
    count = min(1 + int(random.choice(len(HOW_MANY), p=HOW_MANY)), room)
    names = random.choice(len(SHAPES), count, replace=False)
    colours = random.choice(len(COLOURS), count)
    return [Thing(SHAPES[name], list(COLOURS)[colour]) for name, colour in zip(names, colours, strict=True)]


def _ask(random: np.random.Generator, things: list[Thing]) -> tuple[str, str]:
    """Return a question that the picture answers, and the answer."""
    thing = things[random.integers(len(things))]
    kind = random.choice(len(KINDS), p=KINDS)
    if kind == 0:
        return f"what colour is the {thing.shape}?", thing.colour
    if kind == 1:
        return "how many shapes?", COUNTS[len(things)]
    if kind == 2:
        absent = [colour for colour in COLOURS if all(each.colour != colour for each in things)]
        if random.random() < 0.5:
            return f"is anything {absent[random.integers(len(absent))]}?", "no"
        return f"is anything {thing.colour}?", "yes"
    same = [each for each in things if each.colour == thing.colour]
    if len(same) > 1:
        return f"how many {thing.colour} shapes?", COUNTS[len(same)]
    return f"what shape is {thing.colour}?", thing.shape


def _render(random: np.random.Generator, things: list[Thing], width: int, height: int) -> np.ndarray:
    """Return u8 [height, width, 3]: the things, each in a cell of its own, on a grey ground with a little noise."""
    ground = random.integers(90, 150) + random.integers(-8, 9, (height, width, 1))
    image = np.broadcast_to(ground, (height, width, 3)).astype(np.int16)
    across, down = _cells(len(things), width, height)
    cells = np.sort(random.choice(across * down, len(things), replace=False))
    for thing, cell in zip(things, cells.tolist(), strict=True):
        room_x, room_y = width / across, height / down
        radius = min(room_x, room_y) / 2 * random.uniform(0.65, 0.95)
        x = (cell % across + 0.5) * room_x + random.uniform(-1, 1) * (room_x / 2 - radius)
        y = (cell // across + 0.5) * room_y + random.uniform(-1, 1) * (room_y / 2 - radius)
        inside = _inside(thing.shape, np.arange(width)[None] + 0.5 - x, np.arange(height)[:, None] + 0.5 - y, radius)
        image[inside] = np.array(COLOURS[thing.colour]) + random.integers(-10, 11, 3)
    return image.clip(0, 255).astype(np.uint8)


def _cells(count: int, width: int, height: int) -> tuple[int, int]:
    """Return how many cells across and down hold `count` things and are as square as can be."""
    most = [(across, -(-count // across)) for across in range(1, count + 1)]
    return max(most, key=lambda each: min(width / each[0], height / each[1]))


def _inside(shape: str, x: np.ndarray, y: np.ndarray, radius: float) -> np.ndarray:
    """Return which pixels, `x` and `y` away from the middle, the shape covers."""
    if shape == "circle":
        return x**2 + y**2 < radius**2
    if shape == "ring":
        distance = x**2 + y**2
        return (distance < radius**2) & (distance > (0.55 * radius) ** 2)
    if shape == "square":
        return np.maximum(abs(x), abs(y)) < 0.85 * radius
    if shape == "triangle":
        return (y < 0.8 * radius) & (abs(x) < (y + radius) * 0.55)
    return (np.minimum(abs(x), abs(y)) < 0.28 * radius) & (np.maximum(abs(x), abs(y)) < radius)


def _png(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG", compress_level=1)
    return file.getvalue()
