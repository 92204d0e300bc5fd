"""Writes images as PNG files and questions about them, for recipe.yaml: `python examples/cifar/write_samples.py`.

With `--data FOLDER` they are those of the binary version of CIFAR-10.
"""

import argparse
import json
from pathlib import Path

from images import CLASSES, load
from PIL import Image


def write(images, folder, name):
    """Write `folder/name.jsonl`: one image with its class as the answer in each line."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.jsonl").open("w") as lines:
        for number, (pixels, label) in enumerate(zip(*images, strict=True)):
            file = f"{name}/{number:05}.png"
            Image.fromarray(pixels).save(folder / file, compress_level=1)
            lines.write(json.dumps({"image": file, "question": "?", "answer": CLASSES[label]}) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, help="a folder with the binary version of CIFAR-10")
    parser.add_argument("--out", type=Path, default=Path("runs/cifar-samples"))
    args = parser.parse_args()
    for name, images in zip(("train", "test"), load(args.data), strict=True):
        write(images, args.out, name)
        print(f"{args.out}/{name}.jsonl has {len(images[1]):,} images")


if __name__ == "__main__":
    main()
