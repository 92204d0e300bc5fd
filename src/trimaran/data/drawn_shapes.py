"""A generated image dataset: drawn shapes with questions, answers and captions. Nothing has to be downloaded.

A sample is a pure function of its number.
"""

import io
from dataclasses import dataclass

import numpy as np
from PIL import Image

NUM_SAMPLES = 12_000
SEED, VERSION = 20260, 4  # increase the version when the content of a sample changes
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
SHAPE_COUNT_FRACTIONS = (0.45, 0.3, 0.15, 0.1)  # of the images: with one, two, three and four shapes
MIN_CELL_PIXELS = 16  # side of the smallest cell that holds one shape
# Of the questions: the colour of a shape, the number of shapes, whether a colour occurs, the shape of a colour.
QUESTION_FRACTIONS = (0.35, 0.25, 0.3, 0.1)
TEXT_ONLY_FRACTION, CAPTION_FRACTION = 0.1, 0.06  # of the samples: without an image, and with a caption only
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


DrawnShape = tuple[str, str]  # and its colour


@dataclass(frozen=True, slots=True)
class DrawnSample:
    """One sample: a PNG (empty for text-only samples) and a question (empty if the answer is a caption)."""

    image: bytes
    question: str
    answer: str


def draw(number: int) -> DrawnSample:
    """Return sample `number`."""
    random = np.random.default_rng([SEED, number])
    if random.random() < TEXT_ONLY_FRACTION:
        return DrawnSample(b"", *FACTS[random.integers(len(FACTS))])
    width, height = random.choice(SIDES, 2).tolist()
    # One to four different shapes in drawing order: left to right, then down.
    max_shapes = (width // MIN_CELL_PIXELS) * (height // MIN_CELL_PIXELS)
    count = min(1 + int(random.choice(len(SHAPE_COUNT_FRACTIONS), p=SHAPE_COUNT_FRACTIONS)), max_shapes)
    names = random.choice(len(SHAPES), count, replace=False)
    colours = random.choice(len(COLOURS), count)
    shapes = [(SHAPES[name], list(COLOURS)[colour]) for name, colour in zip(names, colours, strict=True)]
    file = io.BytesIO()
    Image.fromarray(_render(random, shapes, width, height)).save(file, "PNG", compress_level=1)
    image = file.getvalue()
    if random.random() < CAPTION_FRACTION:
        return DrawnSample(image, "", " and ".join(f"a {colour} {shape}" for shape, colour in shapes))
    shape, colour = shapes[random.integers(len(shapes))]
    kind = random.choice(len(QUESTION_FRACTIONS), p=QUESTION_FRACTIONS)
    if kind == 0:
        return DrawnSample(image, f"what colour is the {shape}?", colour)
    if kind == 1:
        return DrawnSample(image, "how many shapes?", COUNTS[len(shapes)])
    if kind == 2:
        absent = [each for each in COLOURS if all(other != each for _, other in shapes)]
        if random.random() < 0.5:
            return DrawnSample(image, f"is anything {absent[random.integers(len(absent))]}?", "no")
        return DrawnSample(image, f"is anything {colour}?", "yes")
    num_same = sum(each == colour for _, each in shapes)
    if num_same > 1:
        return DrawnSample(image, f"how many {colour} shapes?", COUNTS[num_same])
    return DrawnSample(image, f"what shape is {colour}?", shape)


def _render(random: np.random.Generator, shapes: list[DrawnShape], width: int, height: int) -> np.ndarray:
    """Return u8 [height, width, 3]: each shape in a cell of its own, on a grey background with a little noise."""
    ground = random.integers(90, 150) + random.integers(-8, 9, (height, width, 1))
    image = np.broadcast_to(ground, (height, width, 3)).astype(np.int16)
    grids = [(across, -(-len(shapes) // across)) for across in range(1, len(shapes) + 1)]
    across, down = max(grids, key=lambda each: min(width / each[0], height / each[1]))  # with the largest cells
    cells = np.sort(random.choice(across * down, len(shapes), replace=False))
    for (shape, colour), cell in zip(shapes, cells.tolist(), strict=True):
        cell_width, cell_height = width / across, height / down
        radius = min(cell_width, cell_height) / 2 * random.uniform(0.65, 0.95)
        centre_x = (cell % across + 0.5) * cell_width + random.uniform(-1, 1) * (cell_width / 2 - radius)
        centre_y = (cell // across + 0.5) * cell_height + random.uniform(-1, 1) * (cell_height / 2 - radius)
        x, y = np.arange(width)[None] + 0.5 - centre_x, np.arange(height)[:, None] + 0.5 - centre_y
        if shape == "circle":
            inside = x**2 + y**2 < radius**2
        elif shape == "ring":
            distance = x**2 + y**2
            inside = (distance < radius**2) & (distance > (0.55 * radius) ** 2)
        elif shape == "square":
            inside = np.maximum(abs(x), abs(y)) < 0.85 * radius
        elif shape == "triangle":
            inside = (y < 0.8 * radius) & (abs(x) < (y + radius) * 0.55)
        else:
            inside = (np.minimum(abs(x), abs(y)) < 0.28 * radius) & (np.maximum(abs(x), abs(y)) < radius)
        image[inside] = np.array(COLOURS[colour]) + random.integers(-10, 11, 3)
    return image.clip(0, 255).astype(np.uint8)
