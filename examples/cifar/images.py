"""CIFAR-10 from its binary files, or ten generated classes of the same shape where there are none."""

from pathlib import Path

import numpy as np

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIZE = 32
RECORD = 1 + 3 * SIZE * SIZE  # a label, then the red, green and blue planes


def load(folder=None, *, num_train=2048, num_test=512):
    """Return (pixels, labels) for training and for the test: [N, 32, 32, 3] and [N], of uint8.

    `folder` holds the binary version of CIFAR-10 (cifar-10-binary.tar.gz); its python version is made of pickles, which
    can run any code, and is not read. Without a folder images are generated.
    """
    if folder is None:
        return generate(num_train, seed=1), generate(num_test, seed=2)
    files = sorted(Path(folder).glob("data_batch_*.bin"))
    test = Path(folder) / "test_batch.bin"
    if not files or not test.is_file():
        raise SystemExit(
            f"{folder} has no data_batch_*.bin and test_batch.bin: download the binary version of CIFAR-10, "
            "cifar-10-binary.tar.gz, and name the folder it unpacks to"
        )
    training = [read_records(file) for file in files]
    return tuple(np.concatenate(each) for each in zip(*training, strict=True)), read_records(test)


def read_records(file):
    """Return the pixels and labels of a binary file."""
    content = np.fromfile(file, dtype=np.uint8)
    if len(content) == 0 or len(content) % RECORD:
        raise SystemExit(f"{file} has {len(content):,} bytes, which are not records of {RECORD:,}: download it again")
    records = content.reshape(-1, RECORD)
    if records[:, 0].max() >= len(CLASSES):
        raise SystemExit(f"{file} has the label {records[:, 0].max()}: it is not CIFAR-10")
    return records[:, 1:].reshape(-1, 3, SIZE, SIZE).transpose(0, 2, 3, 1), records[:, 0]


def generate(number, *, seed):
    """Return `number` images of ten classes. A class has a pattern and a typical colour; place and noise are random."""
    random = np.random.default_rng(seed)
    labels = (np.arange(number) % len(CLASSES)).astype(np.uint8)
    random.shuffle(labels)
    y, x = np.mgrid[0:SIZE, 0:SIZE][:, None] - random.integers(8, 24, (2, number))[:, :, None, None]
    distance, wide = np.hypot(x, y), random.integers(4, 7, number)[:, None, None]
    patterns = [
        distance < 2 * wide,  # a disc
        np.abs(distance - 1.5 * wide) < 2,  # a ring
        np.maximum(np.abs(x), np.abs(y)) < 1.5 * wide,  # a square
        np.minimum(np.abs(x), np.abs(y)) < 2,  # a cross
        x // wide % 2 == 0,  # vertical stripes
        y // wide % 2 == 0,  # horizontal stripes
        (x + y) // wide % 2 == 0,  # diagonal stripes
        (x // wide + y // wide) % 2 == 0,  # a board
        x + y < 0,  # a half
        (np.abs(x) + np.abs(y)) < 2 * wide,  # a diamond
    ]
    shown = np.choose(labels[:, None, None], patterns)[..., None]
    hue = 2 * np.pi * (labels / len(CLASSES) + random.normal(0, 0.08, number))
    colour = 128 + 90 * np.cos(hue[:, None] + 2 * np.pi * np.arange(3) / 3)
    pixels = np.where(shown, colour[:, None, None], 110) + random.normal(0, 25, (number, SIZE, SIZE, 3))
    return pixels.clip(0, 255).astype(np.uint8), labels
